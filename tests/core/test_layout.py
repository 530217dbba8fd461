"""Moments hang on the image they were taken of, and on no other."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel.layout import moments_kept, normalise


@pytest.fixture
def given():
    """Kernels whose norm tells what moments it was given."""
    return SimpleNamespace(group_norm=lambda *args, moments=None, **more: moments)


def test_the_norm_is_given_the_moments_of_its_image(given):
    image = moments_kept((torch.randn(1, 4, 2, 2), "moments"))
    assert normalise(given, image, nn.GroupNorm(2, 4)) == "moments"


@pytest.mark.parametrize("change", ["in place", "a view", "a copy", "inference mode", "none taken"])
def test_never_those_of_another(given, change):
    image = torch.randn(1, 4, 2, 2)
    if change == "inference mode":
        with torch.inference_mode():
            image = image.clone()
    image = moments_kept((image, None if change == "none taken" else "moments"))
    if change == "in place":
        image[:, :1, :1, :1] += 1
    elif change == "a view":
        image = image[:, :, :1]
    elif change == "a copy":
        image = image.clone()
    with torch.inference_mode(change == "inference mode"):
        assert normalise(given, image, nn.GroupNorm(2, 4)) is None
