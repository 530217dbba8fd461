"""Every test here needs a CUDA GPU; without one they are skipped, and say so."""

import pytest
import torch


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
