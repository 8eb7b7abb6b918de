"""In two ranks, ten steps with verification end with the weights of ten steps without, bit for bit."""

import pytest
from helpers import run_ranks
from verify_worker import main

VERIFIES = True


@pytest.mark.slow
def test_training_is_the_same_on_two_ranks(tmp_path):
    run_ranks(main, tmp_path)
    for rank in range(2):
        lines = (tmp_path / f'{rank}.txt').read_text().splitlines()
        assert lines == [f'{preset} different=0 verified=True' for preset in ('exact', 'sbp')]
