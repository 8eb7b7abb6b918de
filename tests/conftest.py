"""Quick hypothesis, and the iteration that mmengine's runner would report."""

import hypothesis
import pytest
import torch
from mmengine.logging import MessageHub

# Phases: without the last one, 'explain', which runs a failing test a few hundred times more.
hypothesis.settings.register_profile(
    'core', derandomize=True, deadline=None, max_examples=20, phases=list(hypothesis.Phase)[:-1]
)
hypothesis.settings.load_profile('core')


@pytest.fixture(autouse=True)
def seed():
    """The masks depend on torch's seed: the same one for each test, whichever ran before."""
    torch.manual_seed(0)


@pytest.fixture
def iteration():
    """Sets the iteration that mmengine's runner would report; afterwards it is as without a runner."""
    hub = MessageHub.get_current_instance()
    yield lambda step: hub.update_info('iter', step)
    hub.runtime_info.pop('iter', None)
