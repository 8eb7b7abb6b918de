"""In two ranks, ten steps with verification end with the weights of ten steps without, bit for bit."""

import pytest
from helpers import ROOT, run


@pytest.mark.slow
def test_training_is_the_same_on_two_ranks(tmp_path):
    command = ('python', '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2')
    run(*command, ROOT / 'tests/verify_worker.py', tmp_path, cwd=tmp_path, PYTHONPATH=ROOT)
    for rank in range(2):
        lines = (tmp_path / f'{rank}.txt').read_text().splitlines()
        assert lines == [f'{preset} different=0 verified=True' for preset in ('exact', 'sbp')]
