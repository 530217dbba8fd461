"""A convolution outside the blocks: its bias added in a pass that takes the channel stats for the norm after it."""

from typing import Any

import torch
from torch import nn

from accel.fusion.channels_last import convolve, keep_channel_stats, nhwc
from accel.patching.context import Context
from accel.patching.fast_forward import FastForward
from accel.patching.guard import Parts
from accel.patching.rule import Match
from accel.patching.site import Site
from accel.patching.structure import tampered

LEAST_CHANNELS = 32  # of the output; a narrower one ends a model, and no norm comes after


class ConvolutionForward(FastForward):
    """nn.Conv2d over a channels-last image; (N, C, H, W) -> (N, C', H', W')."""

    def unfit(self, input: Any) -> str | None:
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
    return Match(ConvolutionForward(m, site.path, context.kernels, context.ledger))
