"""The buffers of linears that one product multiplies for, and which adapters belong in them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from accel_kernels import LowRank
from accel_kernels.gemm.adapters.low_rank_term import LowRankTerm

from accel.libraries.adapters import BASE, DOWN, low_rank_scales, row_adapters
from accel.quantization.adapters import read_low_rank
from accel.quantization.product import base, device_and_dtype

ALIGNED = 16  # bytes
Kind = tuple[bool, torch.dtype, torch.dtype]  # of a copy: whether it is of B, and the dtypes of source and target


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
            for down, up, scale in own:
                behind = first + down.shape[0]
                yield False, down.detach(), self.down[part * rank + first : part * rank + behind], 1.0
                yield True, up.detach(), self.up[start:end, first:behind], scale
                first = behind
            start = end

    def scales_now(self, whole: bool) -> list[float]:
        """Of adapters that are active, or of all, of all linears."""
        layers = (layer for layer in self.present if layer is not None and BASE in layer._modules)
        return [scale for layer in layers for scale in (low_rank_scales(layer, whole) or {}).values()]

    def kept(self, rows: int, masks: dict[tuple, torch.Tensor]) -> torch.Tensor | None:
        """(rows, P * R): ones where a row has an adapter; None where there are fewer rows than names of theirs.

        masks: those of other groups, by all that they depend on.
        """
        parts: list[tuple] = []
        for part, (layer, names) in enumerate(zip(self.present, self.names, strict=True)):
            if not names or layer.disable_adapters:
                continue
            named, active = row_adapters(layer), low_rank_scales(layer) or {}
            if named is not None and len(named) > rows:
                return None
            sizes = [layer._modules[DOWN][name].out_features for name in names]
            parts.append((part, None if named is None else tuple(named), tuple(active), tuple(names), tuple(sizes)))
        key = rows, len(self.down), self.dtype, self.down.device, *parts
        if key not in masks:
            found = torch.zeros(rows, len(self.down), dtype=self.dtype, device="cpu")
            for part, named, active, names, sizes in parts:
                first = part * self.up.shape[1]
                for name, size in zip(names, sizes, strict=True):
                    at = slice(None) if named is None else [i for i, one in enumerate(named) if one == name]
                    found[at, first : first + size] = float(named is not None or name in active)
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
    found = read_low_rank(layer, dtype, whole)
    if not found:
        return found
    device, _ = device_and_dtype(base(layer))
    tensors = (t for one in found for t in one[:2])
    fit = all(t.device == device and t.is_contiguous() and not t.data_ptr() % ALIGNED for t in tensors)
    return found if fit else None
