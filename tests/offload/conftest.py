"""A card that is a piece of the host's memory."""

import pytest

from support.objects.streaming import emulate


@pytest.fixture
def streaming(monkeypatch):
    """Gives a function that counts the buffers that are left."""
    return emulate(monkeypatch)
