"""Every test here needs a CUDA GPU; without one they are skipped, and say so."""

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Without a GPU a test is skipped once, not with each of its thousands of arguments: telling so takes seconds."""
    if not torch.cuda.is_available():
        metafunc.fixturenames = []
        metafunc.definition.own_markers = [m for m in metafunc.definition.own_markers if m.name != "parametrize"]


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def exact():
    """float32 is float32, and no gradients."""
    from transformers.utils import logging

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    logging.set_verbosity_error()
    with torch.no_grad():
        yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
