"""Memory that shows what no program wrote."""

import pytest
import torch


@pytest.fixture
def poisoned(monkeypatch):
    """Fresh memory holds NaN, or a number that no kernel writes, so that an element no program wrote shows."""
    for name in ("empty", "empty_like"):

        def poison(*args, make=getattr(torch, name), **kwargs):  # noqa: B008 (torch's own, before it is replaced)
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else -128)

        monkeypatch.setattr(torch, name, poison)
