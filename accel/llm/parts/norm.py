"""One norm of a layer: where it is, what it computes, and what it was when that was found."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from accel.fusion.norm_kind import NormKind, norm_kind, random_twin, stock_output
from accel.llm.recording.record import Call, LayerRecord
from accel.patching.guard import plain_settings
from accel.quantization.experts import holds_numbers


@dataclass(frozen=True)
class NormSpec:
    """name: from the layer. kind: the formula, None for a norm that must be called. settings: see `plain_settings`.
    gain: the parameter by which it multiplies and does no more, as a layer scale (Touvron et al. 2021); "" for a norm.
    Where the parameter is the layer's own, name is "".
    """

    name: str
    kind: NormKind | None
    settings: tuple
    gain: str = ""


def norm_spec(layer: LayerRecord, call: Call) -> NormSpec:
    """The norm that a recorded call was of."""
    found, width = plain_settings(call.module), call.input.held.shape[-1]
    shapes = tuple(p.shape for p in call.module.parameters())
    key = (found, width, shapes)
    if key not in layer.kinds:
        layer.kinds[key] = norm_kind(call.module, width), _gain(call.module, width)
    kind, gain = layer.kinds[key]
    return NormSpec(layer.name(call.module), kind, found, gain)


def _gain(module: nn.Module, width: int) -> str:
    generator = torch.Generator().manual_seed(0)
    twin, x = random_twin(module, generator), torch.randn(2, 3, width, generator=generator, device="cpu")
    parameters, y = {name: one for name, one in twin._parameters.items() if one is not None}, stock_output(twin, x)
    if len(parameters) != 1 or twin._modules or twin._buffers or not isinstance(y, torch.Tensor):
        return ""
    (name, weight), *_ = parameters.items()
    return name if torch.equal(y, x * weight) else ""


def normlike(layer: LayerRecord, call: Call) -> bool:
    """Whether a call may be a norm's: one tensor to another of its shape, without matrices; no dropout at rest."""
    if not call.alone or call.made is None or call.output.held.shape != call.input.held.shape:
        return False
    if holds_numbers(call.module) or not all(p.dim() == 1 for p in call.module.parameters()):
        return False
    if any(held.dim() > 1 for held in call.module.buffers()):
        return False
    own = next(call.module.parameters(), None) is not None  # which may be ones today
    return own or not torch.equal(call.output.held, call.input.held) or norm_spec(layer, call).kind is not None


FLAT, HEADS, TURNED = "(rows, new, heads * D)", "(rows, new, heads, D)", "(rows, heads, new, D)"


@dataclass(frozen=True)
class HeadNorm:
    """One norm of queries or keys. layout: what the module is given."""

    norm: NormSpec
    layout: str


def given(t: torch.Tensor, layout: str) -> torch.Tensor:
    """(rows, tokens, heads, D) in the layout that the norm of heads takes."""
    if layout == FLAT:
        return t.flatten(-2)
    return t if layout == HEADS else t.transpose(1, 2)


def given_back(t: torch.Tensor, layout: str, dim: int) -> torch.Tensor:
    """The reverse of `given`."""
    if layout == FLAT:
        return t.unflatten(-1, (-1, dim))
    return t if layout == HEADS else t.transpose(1, 2)


def head_norm(layer: LayerRecord, calls: list[Call], t: torch.Tensor) -> Iterator[tuple[HeadNorm | None, torch.Tensor]]:
    """None, with t itself; and every recorded call that was given t, with what it made of it, (rows, new, heads, D)."""
    for call in calls:
        if not call.alone or call.made is None or call.output.held.shape != call.input.held.shape:
            continue
        for layout in (HEADS, TURNED, FLAT):
            wanted = given(t, layout)
            if call.input.held.shape == wanted.shape and torch.equal(call.input.held, wanted):
                normed = given_back(call.output.held, layout, t.shape[-1])
                if not torch.equal(normed, t):  # a dropout at rest is no norm
                    yield HeadNorm(norm_spec(layer, call), layout), normed
    yield None, t
