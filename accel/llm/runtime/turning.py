"""How queries and keys become those that attention is given: normed per head, and rotated, in either order."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accel_kernels import Norm

from accel.comparison import agree
from accel.llm.parts.norm import HEADS, TURNED, HeadNorm, given, given_back, head_norm, norm_spec
from accel.llm.recording.record import Call, LayerRecord
from accel.llm.runtime.rotary import Rotary, SmallStore, rotaries


@dataclass(frozen=True)
class Turning:
    """One way that fits the stored keys. fields: of a `SoftmaxSpec`. q, k: (rows, tokens, heads, D), and arguments, as
    `accel_kernels.paged_attention` takes them; norms before the rotation have been applied to them.
    """

    fields: dict[str, Any]
    q: torch.Tensor
    k: torch.Tensor
    arguments: dict[str, Any]

    @cached_property
    def queries(self) -> torch.Tensor:
        """Normed and rotated."""
        norm = self.arguments.get("q_norm")
        return _stored(self.q, self.arguments | {"k_norm": norm})


def turnings(layer: LayerRecord, calls: list[Call], q: torch.Tensor, k: torch.Tensor) -> Iterator[Turning]:
    """Of what projections give, q and k, (rows, tokens, heads, D)."""
    keys = layer.cached.keys
    for k_norm, normed_k in head_norm(layer, calls, k):
        for rotary in rotaries(layer, normed_k, keys):
            for q_norm, normed_q in head_norm(layer, calls, q):
                yield Turning(_fields(rotary, q_norm, k_norm), normed_q, normed_k, _angles(layer, rotary, q))
    for k_call, layout in _norms(calls, keys.transpose(1, 2), made=True):
        k_norm, k_formula = _fused(layer, k_call, layout)
        rotated = given_back(k_call.input.held, layout, k.shape[-1])
        for rotary in rotaries(layer, k, rotated.transpose(1, 2)) if k_formula is not None else ():
            angles = _angles(layer, rotary, q)
            for q_call, q_layout in _norms(calls, _stored(q, angles), made=False):
                q_norm, q_formula = _fused(layer, q_call, q_layout)
                if q_formula is not None:
                    norms = {"q_norm": q_formula, "k_norm": k_formula, "norms_after": True}
                    yield Turning(_fields(rotary, q_norm, k_norm, after=True), q, k, angles | norms)


def _fields(rotary: Rotary | None, q_norm: HeadNorm | None, k_norm: HeadNorm | None, after: bool = False) -> dict:
    return {"q_norm": q_norm, "k_norm": k_norm, "rotary": rotary, "norms_after": after}


def _angles(layer: LayerRecord, rotary: Rotary | None, q: torch.Tensor) -> dict[str, Any]:
    if rotary is None:
        return {}
    cos, sin = (t.to(q.dtype) for t in rotary.angles(layer.call.kwargs, layer.attention))
    return {"cos": cos, "sin": sin, "interleaved": rotary.interleaved}


def _stored(t: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    store = SmallStore(t)
    store(t, t, t, 1.0, **arguments)
    return store.keys


def _norms(calls: list[Call], t: torch.Tensor, made: bool) -> Iterator[tuple[Call, str]]:
    """Calls that gave t, (rows, tokens, heads, D), or were given what rounding makes of it; each with its layout."""
    for call in calls:
        if not call.alone or call.made is None or call.output.held.shape != call.input.held.shape:
            continue
        for layout in (HEADS, TURNED):
            wanted, held = given(t, layout), call.output.held if made else call.input.held
            if held.shape == wanted.shape and (torch.equal(held, wanted) if made else agree(wanted, held)):
                yield call, layout


def _fused(layer: LayerRecord, call: Call, layout: str) -> tuple[HeadNorm, Norm | None]:
    """A norm of heads, and its formula if attention can apply it."""
    norm = HeadNorm(norm_spec(layer, call), layout)
    kind = norm.norm.kind
    fits = kind is not None and not kind.centered and kind.bias is None
    return norm, kind.of(call.module) if kind is not None and fits else None
