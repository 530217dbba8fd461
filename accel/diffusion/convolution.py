"""A convolution outside the blocks: its bias added in a pass that takes the moments of the norm after it."""

import torch
from torch import nn

from accel.forward import FastForward
from accel.layout import convolve, moments_kept, nhwc
from accel.reads import Parts
from accel.rule import Match
from accel.structure import plain

LEAST_CHANNELS = 32  # of the output; a narrower one ends a model, and no norm comes after


class ConvolutionForward(FastForward):
    """nn.Conv2d over a channels-last image; (N, C, H, W) -> (N, C', H', W')."""

    def unfit(self, input) -> str | None:
        return None if type(input) is torch.Tensor and input.dim() == 4 else "input that is not a batch of images"

    def parts(self) -> Parts:
        return Parts(live=(self.module,))

    def fast(self, input):
        y, bias = convolve(nhwc(input), self.module)
        return y if bias is None else moments_kept(self.kernels.image_sum(nhwc(y), None, bias))


def match_convolution(site, context) -> Match | None:
    """Exactly nn.Conv2d with a bias; a subclass may compute something else."""
    m = site.module
    if plain(m, nn.Conv2d) is not None or m.bias is None or m.out_channels < LEAST_CHANNELS:
        return None
    return Match(ConvolutionForward(m, site.path, context.kernels, context.ledger))
