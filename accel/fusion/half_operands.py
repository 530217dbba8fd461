"""Decoders in float32 whose convolutions stock rounds to TF32; here they run in float16, which rounds the same.

See `accel_kernels.image.half_operands`. An example is SDXL's decoder: its activations exceed float16, so diffusers runs
it in float32. What blocks hand on stays in float32. Between a norm and the end of its block values are of moderate
size, and in float16.
"""

import torch
from accel_kernels.image.half_operands import GAIN, SCALE, halved
from torch import Tensor, nn

from accel.fusion.channels_last import keep_channel_stats, normalize
from accel.fusion.float32_precision import convolutions_in_tf32
from accel.patching.fast_forward import Kernels
from accel.patching.rule import Context, Site


class HalfOperands:
    """Whether a model's convolutions run so: the check for overflow switches it off for good at the first one."""

    def __init__(self) -> None:
        self.on, self.path = False, "."

    @classmethod
    def watch(cls, site: Site, context: Context) -> "HalfOperands":
        """Of what is beneath a site, which rules see later than the site itself; on as soon as one of them asks."""
        found = context.of(cls)
        found.path = f"{site.path}."
        return found

    @classmethod
    def beneath(cls, site: Site, context: Context) -> "HalfOperands":
        """The one of the watched site that this one is beneath; else one that is off."""
        found = context.find(cls)
        if found is None or not site.path.startswith(found.path):
            return cls()
        found.on = True
        return found

    def state(self) -> tuple[bool]:
        return (self.on,)

    def takes(self, x: Tensor) -> bool:
        """Whether stock's convolution would round x to TF32, and this is to be done."""
        return self.on and x.dtype is torch.float32 and x.is_cuda and convolutions_in_tf32()


def convolve_half(kernels: Kernels, x: Tensor, norm: nn.GroupNorm, conv: nn.Conv2d, **before: Tensor | None) -> Tensor:
    """SCALE * conv(silu(norm(x))) without its bias, in float16. x: in float32, or what this returns, unscaled.

    before: shift and add, see `group_norm`.
    """
    half = x.dtype is torch.float16
    more = {name: None if one is None else one * SCALE if half else one for name, one in before.items()}
    eps = norm.eps * SCALE**2 if half else norm.eps  # of SCALE * x, whose variance is smaller
    y = normalize(kernels, x, norm, silu=True, dtype=torch.float16, eps=eps, **more)
    return conv._conv_forward(y, halved(conv.weight), None)


def end_in_float32(kernels: Kernels, x: Tensor, residual: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """(x / SCALE + residual + bias[c]) / scale; the channel stats of the sum kept."""
    return keep_channel_stats(kernels.image_sum(x, residual, bias, scale, gain=GAIN))
