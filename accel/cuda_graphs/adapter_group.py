"""The buffers of linears that one product multiplies for, and which adapters belong in them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from accel_kernels import LowRank
from accel_kernels.gemm.adapters.low_rank_term import LowRankTerm
from accel_kernels.op import FLOATS
from torch import nn

from accel.casting import casts_of
from accel.libraries.adapters import ANOTHER, BASE, BASE_ROW, DOWN, base, low_rank_scales, own_parts, row_adapters
from accel.offload.call_hooks import one_call
from accel.quantization.adapters import BUFFERS, TOKENS, read_low_rank
from accel.quantization.product import device_and_dtype

ALIGNED = 16  # bytes
Kind = tuple[bool, torch.dtype, torch.dtype]  # of a copy: whether it is of B, and the dtypes of source and target


class AdapterParts:
    """What a fingerprint of adapters is taken of."""

    def __init__(self, layers: Sequence[nn.Module]):
        parts = (part for layer in layers for part in own_parts(layer))
        self.found = [one for one in parts if one._modules or one._parameters or not isinstance(one, nn.ModuleDict)]

    def modules(self) -> Iterator[nn.Module]:
        return iter(self.found)


@dataclass(eq=False)
class AdapterGroup:
    """The buffers of linears whose outputs one product gives. Tensors are as of `LowRankTerm`; up: (N of all, R).

    names, scales, kinds: as they were read, of all adapters of each linear; kinds: of their B.
    """

    layers: list[ref]
    dtype: torch.dtype
    ends: tuple[int, ...]
    down: torch.Tensor
    up: torch.Tensor
    starts: torch.Tensor
    tagged: torch.Tensor
    names: list[list[str]]
    scales: list[float]
    kinds: list[Kind]

    def term(self, gate: bool, rows: torch.Tensor | None, step: torch.Tensor | None) -> LowRankTerm:
        """gate: the first of two linears is the gate of the second. rows, step: of `LowRankTerm`."""
        beside = rows, self.starts, step, None if step is None else self.tagged
        if not gate:
            return LowRankTerm(self.down, self.up, self.ends, None, False, *beside)
        first, *_ = self.ends
        return LowRankTerm(self.down, self.up[:first], (first,), self.up[first:], False, *beside)

    def pairs(self, found: Sequence[tuple[LowRank, ...]]) -> Iterator[tuple[bool, torch.Tensor, torch.Tensor, float]]:
        """Whether it is a B, a matrix of an adapter, where it belongs, and its factor."""
        start, rank = 0, self.up.shape[1]
        for part, (end, own) in enumerate(zip(self.ends, found, strict=True)):
            first = 0
            for down, up, scale, _ in own:
                behind = first + down.shape[0]
                yield False, down.detach(), self.down[part * rank + first : part * rank + behind], 1.0
                yield True, up.detach(), self.up[start:end, first:behind], scale
                first = behind
            start = end

    def scales_now(self, whole: bool) -> list[float]:
        """Of adapters that are active, or of all, of all linears."""
        layers = (layer for layer in self.present if layer is not None and BASE in layer._modules)
        return [scale for layer in layers for scale in (low_rank_scales(layer, whole) or {}).values()]

    def kept(self, rows: int, masks: dict[tuple, torch.Tensor], given: Sequence | None = None) -> torch.Tensor | None:
        """(rows, P * R): ones where a row has an adapter; None where there are fewer rows than names of theirs.

        masks: those of other groups, by all that they depend on. given: names for peft's, None for all active ones.
        """
        parts: list[tuple] = []
        for part, (layer, names) in enumerate(zip(self.present, self.names, strict=True)):
            if not names or layer.disable_adapters:
                continue
            named, active = given or row_adapters(layer) or [None] * rows, low_rank_scales(layer) or {}
            if len(named) > rows:
                return None
            sizes = [layer._modules[DOWN][name].out_features for name in names]
            parts.append((part, tuple(named), tuple(active), tuple(names), tuple(sizes)))
        key = rows, len(self.down), self.dtype, self.down.device, *parts
        if key not in masks:
            found = torch.zeros(rows, len(self.down), dtype=self.dtype, device="cpu")
            for part, named, active, names, sizes in parts:
                first = part * self.up.shape[1]
                for name, size in zip(names, sizes, strict=True):
                    at = [i for i, one in enumerate(named) if one == name or (one is None and name in active)]
                    found[at, first : first + size] = 1.0
                    first += size
            masks[key] = found.to(self.down.device)
        return masks[key]

    @property
    def present(self) -> list[Any]:
        """The linears, None for one that is gone."""
        return [one() for one in self.layers]


def adapters_of(layer: Any, dtype: torch.dtype, whole: bool) -> tuple[LowRank, ...] | None:
    """Those that are active, or all of them; none of a plain linear; None where buffers cannot hold them."""
    if layer is None or BASE not in layer._modules:
        return None if layer is None else ()
    if casts_of(own_parts(layer)):  # they lie elsewhere in each call
        return None
    found = read_low_rank(layer, dtype, whole)
    if not found:
        return found
    device, _ = device_and_dtype(base(layer))
    tensors = (t for one in found for t in one[:2])
    fit = all(t.device == device and t.is_contiguous() and not t.data_ptr() % ALIGNED for t in tensors)
    return found if fit else None


class AdaptersNotByToken(ValueError):
    """A linear computes with the same adapters for all tokens of a forward, or may do anything else."""


@contextmanager
def each_token(model: nn.Module, index: torch.Tensor) -> Iterator[None]:
    """Inside, tokens of a forward have their own adapters, see `TOKENS`. Raises AdaptersNotByToken."""
    buffers, token = BUFFERS.get(), TOKENS.set(index)
    try:
        buffers.asked.clear()
        yield
    finally:
        TOKENS.reset(token)
    for path, layer in adapted_layers(model).items():
        if id(layer) not in buffers.asked:
            raise AdaptersNotByToken(f"{path}: with adapters it is computed for all tokens of a step alike")


def adapted_layers(model: Any) -> dict[str, Any]:
    """By path, linears whose adapters may differ by token. Raises AdaptersNotByToken where there are others."""
    found, head = dict[str, Any](), model.get_output_embeddings()
    adapted = {path: one for path, one in model.named_modules() if BASE in one._modules or ANOTHER in one._modules}
    with one_call(model, None):
        for path, layer in adapted.items():
            tried = (adapters_of(layer, dtype, True) for dtype in FLOATS)
            own = next((one for one in tried if one is not None), None)
            if own is None or layer is head or ANOTHER in layer._modules:
                raise AdaptersNotByToken(
                    f"{path}: its adapters are merged, or not alone products of low rank in a layer"
                )
            found |= {path: layer} if own else {}
    return found


def known_adapter(model: nn.Module, name: str) -> str:
    """The name. Raises ValueError where no linear computes with it; cheap, other than `adapted_layers`."""
    known = (one for one in model.modules() if name in (getattr(one, DOWN, None) or ()))
    if name == BASE_ROW or any(not layer.disable_adapters for layer in known):
        return name
    names = sorted({one for layer in adapted_layers(model).values() for one in layer._modules[DOWN]})
    if name in names:
        raise ValueError(f"adapter={name!r}: the model's adapters are disabled, enable them first")
    raise ValueError(f"adapter={name!r}: the model has {', '.join(map(repr, names)) or 'none'}")
