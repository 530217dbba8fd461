"""Channel stats hang on the image they were taken of, and on no other."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel.fusion.channels_last import keep_channel_stats, normalize


@pytest.fixture
def given():
    """Kernels whose norm tells what channel stats it was given."""
    return SimpleNamespace(group_norm=lambda *args, channel_stats=None, **more: channel_stats)


def test_the_norm_is_given_the_moments_of_its_image(given):
    image = keep_channel_stats((torch.randn(1, 4, 2, 2), "channel_stats"))
    assert normalize(given, image, nn.GroupNorm(2, 4)) == "channel_stats"


@pytest.mark.parametrize("change", ["in place", "a view", "a copy", "inference mode", "none taken"])
def test_never_those_of_another(given, change):
    image = torch.randn(1, 4, 2, 2)
    if change == "inference mode":
        with torch.inference_mode():
            image = image.clone()
    image = keep_channel_stats((image, None if change == "none taken" else "channel_stats"))
    if change == "in place":
        image[:, :1, :1, :1] += 1
    elif change == "a view":
        image = image[:, :, :1]
    elif change == "a copy":
        image = image.clone()
    with torch.inference_mode(change == "inference mode"):
        assert normalize(given, image, nn.GroupNorm(2, 4)) is None
