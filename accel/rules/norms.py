"""Single norms, where the block around them is not understood: GroupNorm over images, LayerNorm over rows."""

import torch
from torch import nn

from accel.forward import FastForward
from accel.layout import normalise
from accel.rule import Match
from accel.structure import plain


class GroupNormForward(FastForward):
    """nn.GroupNorm through the fused kernel, in the layout the image comes in."""

    def unfit(self, input) -> str | None:
        return None if type(input) is torch.Tensor else f"input of type {type(input).__name__}"

    def fast(self, input):
        return normalise(self.kernels, input, self.module)


class LayerNormForward(FastForward):
    """nn.LayerNorm over the last dimension through the fused kernel."""

    def unfit(self, input) -> str | None:
        return None if type(input) is torch.Tensor else f"input of type {type(input).__name__}"

    def fast(self, input):
        m = self.module
        return self.kernels.layer_norm(input, m.weight, m.bias, m.eps)


def match_group_norm(site, context) -> Match | None:
    """Exactly nn.GroupNorm; a subclass may compute something else."""
    if plain(site.module, nn.GroupNorm) is not None:
        return None
    return Match(GroupNormForward(site.module, site.path, context.kernels, context.ledger))


def match_layer_norm(site, context) -> Match | None:
    """Exactly nn.LayerNorm over one dimension."""
    if plain(site.module, nn.LayerNorm) is not None or len(site.module.normalized_shape) != 1:
        return None
    return Match(LayerNormForward(site.module, site.path, context.kernels, context.ledger))
