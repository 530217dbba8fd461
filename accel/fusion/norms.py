"""Single norms, where the block around them is not understood: GroupNorm over images, Layer- and RMSNorm over rows."""

from typing import Any

import torch
from accel_kernels.norm.rms_norm import Gate
from torch import nn

from accel.fusion.channels_last import normalize
from accel.fusion.norm_kind import NormKind, rms_norm_kinds
from accel.patching.fast_forward import FastForward
from accel.patching.guard import Parts, plain_settings
from accel.patching.rule import Context, Match, Site
from accel.patching.structure import no_tensor, plain, tampered

UNKNOWN = "arguments the fast forward does not know"
PROMOTED = "dtypes of which stock promotes one to another"


def _unfit(x: Any, weight: torch.Tensor | None) -> str | None:
    return no_tensor(x) or (None if weight is None or weight.dtype is x.dtype else PROMOTED)


class GroupNormForward(FastForward):
    """nn.GroupNorm through the fused kernel, in the layout the image comes in."""

    example_rows = (64, 4096)

    def unfit(self, input: Any) -> str | None:
        return _unfit(input, self.module.weight)

    def parts(self) -> Parts:
        return Parts(live=(self.module,))

    def example(self, rows: int, like: torch.Tensor) -> tuple:
        like = like if self.module.weight is None else self.module.weight.detach()
        image = like.new_ones(1, self.module.num_channels, rows // 8, 8)
        return (image.contiguous(memory_format=torch.channels_last),)

    def fast(self, input: torch.Tensor) -> torch.Tensor:
        return normalize(self.kernels, input, self.module)


class LayerNormForward(FastForward):
    """nn.LayerNorm over the last dimension through the fused kernel."""

    def unfit(self, input: Any) -> str | None:
        reason = _unfit(input, self.module.weight)
        if reason is None and input.shape[-1:] != self.module.normalized_shape:
            return "input of another width, which stock refuses"  # where no weight would
        return reason

    def parts(self) -> Parts:
        return Parts(fixed=(self.module,))

    def example(self, rows: int, like: torch.Tensor) -> tuple:
        like = like if self.module.weight is None else self.module.weight.detach()
        return (like.new_ones(rows, *self.module.normalized_shape),)

    def fast(self, input: torch.Tensor) -> torch.Tensor:
        m = self.module
        return self.kernels.layer_norm(input, m.weight, m.bias, m.eps)


def match_group_norm(site: Site, context: Context) -> Match | None:
    """Exactly nn.GroupNorm; a subclass may compute something else."""
    if plain(site.module, nn.GroupNorm) is not None:
        return None
    return Match(GroupNormForward(site.module, site.path, context.kernels, context.log))


def match_layer_norm(site: Site, context: Context) -> Match | None:
    """Exactly nn.LayerNorm over one dimension."""
    norm = site.module
    if type(norm) is not nn.LayerNorm or tampered(norm) is not None or len(norm.normalized_shape) != 1:
        return None
    return Match(LayerNormForward(norm, site.path, context.kernels, context.log))


class RmsNormForward(FastForward):
    """An RMSNorm of any class through the fused kernel; called with a second tensor, by which it is gated, also that.

    kinds: the formula without a gate and the one with, either None where it is not known.
    """

    def __init__(self, *place: Any, kinds: tuple[NormKind | None, NormKind | None]):
        super().__init__(*place)
        self.kinds = {gated: kind for gated, kind in zip((False, True), kinds, strict=True) if kind is not None}

    def parts(self) -> Parts:
        return Parts(fixed=(self.module,))

    def remember(self) -> None:
        """Any class will do: what it computes was told by running it, and no row knows of the others."""
        super().remember()

    def _given(self, args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is to be normed, and the gate. Raises TypeError for other arguments."""
        if len(args) == 1 and not kwargs:
            return args[0], None
        given = self.named(args, kwargs)
        gate = given.pop(self.names[1], None) if len(self.names) > 1 else None
        if len(args) > 2 or given.keys() != {self.names[0]}:
            raise TypeError(UNKNOWN)
        return given[self.names[0]], gate

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        try:
            x, gate = self._given(args, kwargs)
        except TypeError:
            return UNKNOWN
        kind, held = self.kinds.get(gate is not None), vars(self.module)
        if kind is None:
            return f"{'with' if gate is not None else 'without'} a gate it is no norm known here"
        reason = no_tensor(x) or (None if gate is None else no_tensor(gate))
        if reason is not None:
            return reason
        weight = held["_parameters"][kind.weight]
        if x.shape[-1:] != weight.shape or (gate is not None and gate.shape != x.shape):
            return "input of another shape"
        return None if kind.keeps_dtype(x, weight, gate) else PROMOTED

    def example(self, rows: int, like: torch.Tensor) -> tuple:
        gated, kind = next(iter(self.kinds.items()))  # without a gate where both are known: the least that it saves
        weight = vars(self.module)["_parameters"][kind.weight]
        x = like.new_ones(rows, *weight.shape, device=weight.device)
        args = (x, x) if gated else (x,)
        return args if self.unfit(*args) is None else tuple(one.to(weight.dtype) for one in args)

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        x, gate = self._given(args, kwargs)
        kind = self.kinds[gate is not None]
        norm = kind.of(self.module)
        by = None if gate is None or kind.gate is None else Gate(gate, *kind.gate)
        x = x.contiguous()
        return self.kernels.rms_norm(x, norm.weight, norm.eps, offset=norm.offset, groups=kind.groups, gate=by)


class NormKinds(dict[tuple, tuple[NormKind | None, NormKind | None]]):
    """What the norms of one model compute: those of the same settings and sizes are run once for all."""

    def of(self, module: nn.Module) -> tuple[NormKind | None, NormKind | None]:
        """Without a gate and with one, see `rms_norm_kinds`."""
        key = plain_settings(module), tuple(parameter.shape for parameter in module.parameters())
        if key not in self:
            self[key] = rms_norm_kinds(module)
        return self[key]


def match_rms_norm(site: Site, context: Context) -> Match | None:
    """A module that, when run, computes RMSNorm over the last dimension, times w or 1 + w, gated or not."""
    if type(site.module) is nn.LayerNorm or tampered(site.module) is not None:
        return None
    kinds = context.of(NormKinds).of(site.module)
    if kinds == (None, None):
        return None
    return Match(RmsNormForward(site.module, site.path, context.kernels, context.log, kinds=kinds))
