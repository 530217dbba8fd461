"""Convolutions outside of the blocks of a UNet or VAE, without leaving channels-last: alone, and between its levels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accel.fusion.channels_last import convolve, keep_channel_stats, nhwc
from accel.fusion.half_operands import HalfOperands
from accel.libraries.adapters import base
from accel.patching.fast_forward import FastForward
from accel.patching.guard import Parts
from accel.patching.probe import example
from accel.patching.rule import Context, Match, Site, Skip
from accel.patching.structure import holds, meta_weights, no_tensor, plain, tampered, untouched
from accel.quantization.product import keeps_forward

LEAST_CHANNELS = 32  # of the output; a narrower one ends a model, and no norm comes after


class ConvolutionForward(FastForward):
    """nn.Conv2d over a channels-last image; (N, C, H, W) -> (N, C', H', W')."""

    def unfit(self, input: Any) -> str | None:
        if keeps_forward(self.module):  # which would be this one
            return "a weight that is no parameter of torch's"
        return None if type(input) is torch.Tensor and input.dim() == 4 else "input that is not a batch of images"

    def parts(self) -> Parts:
        return Parts(live=(self.module,))

    def fast(self, input: torch.Tensor) -> torch.Tensor:
        y, bias = convolve(nhwc(input), self.module)
        return y if bias is None else keep_channel_stats(self.kernels.image_sum(nhwc(y), None, bias))


def match_convolution(site: Site, context: Context) -> Match | None:
    """Exactly nn.Conv2d with a bias; a subclass may compute something else."""
    m = site.module
    if type(m) is not nn.Conv2d or tampered(m) is not None or m.bias is None or m.out_channels < LEAST_CHANNELS:
        return None
    return Match(ConvolutionForward(m, site.path, context.kernels, context.log))


# Torch's channels-last nearest kernel fails on larger outputs (pytorch issue 141831) and batches (diffusers issue 984).
MOST_ELEMENTS, MOST_IMAGES = 2**31 - 1, 63


def same_padded(conv: nn.Conv2d) -> bool:
    """Whether it is the 3x3 convolution with zeros around that the fused one computes."""
    return (
        (conv.kernel_size, conv.stride, conv.dilation, conv.groups) == ((3, 3), (1, 1), (1, 1), 1)
        and conv.padding in ((1, 1), "same")
        and conv.padding_mode == "zeros"
    )


class UpsampleForward(FastForward):
    """(N, C, H, W) -> (N, C', 2 H, 2 W) or the size asked for: nearest neighbor, then the convolution."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.half = HalfOperands()

    def unfit(self, hidden_states: Any, output_size: Any = None) -> str | None:
        if (reason := no_tensor(hidden_states)) is not None:
            return reason
        n, c, h, w = hidden_states.shape
        height, width = (2 * h, 2 * w) if output_size is None else output_size
        large = n > MOST_IMAGES or n * c * height * width > MOST_ELEMENTS
        ours = output_size is None and same_padded(base(self.module.conv))
        if large and not (ours and hidden_states.is_cuda):
            return "an image too large for torch's channels-last upsampling"
        return None

    def parts(self) -> Parts:
        return Parts((self.module,), answered=(self.module.conv,))

    def fast(self, hidden_states: torch.Tensor, output_size: int | None = None) -> torch.Tensor:
        x, conv = nhwc(hidden_states), self.module.conv
        if output_size is None and not keeps_forward(conv) and same_padded(conv):
            return self.kernels.upsample_convolve(x, conv.weight, conv.bias, half=self.half.takes(x))
        size = [2 * side for side in x.shape[2:]] if output_size is None else output_size
        return convolve(F.interpolate(x, size=size, mode="nearest"), conv, deferred=False)[0]


class DownsampleForward(FastForward):
    """(N, C, H, W) -> (N, C', ceil(H / 2), ceil(W / 2)): a convolution of stride 2, padded on both sides or one."""

    def unfit(self, hidden_states: Any) -> str | None:
        return no_tensor(hidden_states)

    def parts(self) -> Parts:
        return Parts((self.module,), answered=(self.module.conv,))

    def fast(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = nhwc(hidden_states)
        if self.module.padding == 0:
            x = F.pad(x, (0, 1, 0, 1))
        y, bias = convolve(x, self.module.conv)
        return y if bias is None else keep_channel_stats(self.kernels.image_sum(nhwc(y), None, bias))


class UpsamplePairForward(FastForward):
    """(N, C, H, W) -> (N, C', 2 H, 2 W): nearest neighbor, which may go through float32, then a convolution."""

    def unfit(self, input: Any) -> str | None:
        conv = self.module[1]
        if type(input) is not torch.Tensor or input.dim() != 4 or input.numel() == 0:
            return "input that is not a batch of images"
        if input.dtype is not conv.weight.dtype:
            return "input of another dtype than the weight"
        return None if same_padded(conv) else "a convolution that is not 3x3 with zeros around"

    def parts(self) -> Parts:
        return Parts((self.module, self.module[0]), (self.module[1],))

    def fast(self, input: torch.Tensor) -> torch.Tensor:
        conv = self.module[1]
        return self.kernels.upsample_convolve(nhwc(input), conv.weight, conv.bias)


def match_upsample_pair(site: Site, context: Context) -> Match | Skip | None:
    """Nearest-neighbor upsampling by two and a 3x3 convolution in an nn.Sequential; the probe confirms it."""
    m: Any = site.module
    if type(m) is not nn.Sequential or len(m) != 2 or not isinstance(m[0], nn.Upsample):
        return None
    upsample: Any = m[0]
    conv: Any = m[1]
    doubles = upsample.size is None and upsample.scale_factor in (2.0, (2.0, 2.0))
    if upsample.mode not in ("nearest", "nearest-exact") or not doubles:
        return None
    if plain(conv, nn.Conv2d, stored=True) is not None or not same_padded(conv) or meta_weights(m):
        return None
    if (reason := untouched(upsample)) is not None:
        return Skip(reason)
    forward = UpsamplePairForward(m, site.path, context.kernels, context.log)
    reason = context.probe.unlike(forward, (example(m, 2, conv.in_channels, 6, 5),))
    return Match(forward) if reason is None else Skip(reason)


def match_resample(site: Site, context: Context) -> Match | Skip | None:
    """One convolution beside `channels` and `out_channels`; its stride tells the direction, the probe the rest."""
    m: Any = site.module
    if not holds(m, "conv") or not hasattr(m, "use_conv") or plain(m.conv, nn.Conv2d, stored=True) is not None:
        return None
    kind = DownsampleForward if m.conv.stride == (2, 2) else UpsampleForward
    forward = kind(m, site.path, context.kernels, context.log)
    reason = context.probe.unlike(forward, (example(m, 1, m.conv.in_channels, 6, 5),))
    if reason is not None:
        return Skip(reason)
    if isinstance(forward, UpsampleForward):
        forward.half = HalfOperands.beneath(site, context)
    return Match(forward)
