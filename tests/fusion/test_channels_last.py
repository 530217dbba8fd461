"""Channel stats hang on the image they were taken of, and on no other."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel.fusion.channels_last import keep_channel_stats, normalize, project_image
from accel.fusion.float32_precision import full_precision


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


@pytest.mark.parametrize(
    "dtype, full, product", [(torch.float32, False, 0), (torch.float32, True, 1), (torch.float16, False, 1)]
)
def test_a_convolution_that_stock_has_in_tf32_is_no_product_in_full(dtype, full, product, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    conv, calls = nn.Conv2d(6, 5, 1).to(dtype), []
    x = torch.randn(2, 6, 3, 4).to(dtype).contiguous(memory_format=torch.channels_last)

    def linear(*args):
        calls.append(args)
        return torch.nn.functional.linear(*args)

    with full_precision() if full else nullcontext():
        y = project_image(x, conv, linear)
    assert len(calls) == product
    torch.testing.assert_close(y, conv(x), rtol=2e-3, atol=2e-3)
