"""What commands are given to look at."""

import pytest


@pytest.fixture
def wrong_resnets(monkeypatch):
    """A plugin whose resnet blocks are 1 % off."""
    from accel.diffusion.blocks.resnet import ResnetForward

    call = ResnetForward.__call__  # not `fast`, which is examined before a block is replaced
    monkeypatch.setattr(ResnetForward, "__call__", lambda self, *args, **kwargs: 1.01 * call(self, *args, **kwargs))
