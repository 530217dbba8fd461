"""Single norms, where the block around them is not understood: GroupNorm over images, Layer- and RMSNorm over rows."""

import torch
from torch import nn

from accel.forward import FastForward
from accel.layout import normalise
from accel.norm_kind import NormKind, norm_kind
from accel.rule import Match
from accel.settings import settings
from accel.structure import plain, tampered


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


class RmsNormForward(FastForward):
    """An RMSNorm of any class through the fused kernel."""

    def __init__(self, module, path, kernels, ledger, kind: NormKind):
        super().__init__(module, path, kernels, ledger)
        self.norm_kind = kind

    def unfit(self, hidden_states) -> str | None:
        return None if type(hidden_states) is torch.Tensor else f"input of type {type(hidden_states).__name__}"

    def fast(self, hidden_states):
        norm = self.norm_kind.of(self.module)
        return self.kernels.rms_norm(hidden_states.contiguous(), norm.weight, norm.eps, offset=norm.offset)


def match_rms_norm(site, context) -> Match | None:
    """A module with one weight over the last dimension that computes RMSNorm, times w or 1 + w; told by running it."""
    if type(site.module) is nn.LayerNorm or tampered(site.module) is not None:
        return None
    kinds = context.share("norm kinds", dict)
    key = settings(site.module)
    if key not in kinds:
        kinds[key] = norm_kind(site.module)
    kind = kinds[key]
    if kind is None or kind.centred or kind.bias is not None or kind.weight is None:
        return None
    return Match(RmsNormForward(site.module, site.path, context.kernels, context.ledger, kind))
