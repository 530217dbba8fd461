"""Every test here needs a CUDA GPU; without one they are skipped, and say so."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
