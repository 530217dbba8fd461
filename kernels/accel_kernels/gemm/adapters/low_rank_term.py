"""What adapters of low rank add to one product, in the form that kernels of products take (Hu et al., "LoRA", 2021)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

RANKS = (16, 32, 64, 128)  # columns of B, the last of which may be zeros
WIDE = (*RANKS, 256, 512, 1024)  # also those that no kernel takes, of products in passes
MOST_PARTS = 3
COPIES = 64  # of what programs hand on, so that not all readers wait at one place in memory


def by_row(inner: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """x A^T times what rows keep of it. inner: (..., R). rows: (n, R), each for an nth of the rows of x, or None."""
    return inner if rows is None else (inner.view(len(rows), -1, inner.shape[-1]) * rows[:, None]).view(inner.shape)


class LowRankTerm(NamedTuple):
    """(x A^T) B^T, added to the sums of a product before anything else follows; x: its input after the norm.

    down: (P * R, K), A of each of P parts of the outputs, one after the other. up: (N, R), B. ends: rows of the weight
    where parts end, P of them. gate_up: (N, R), B of a gate's weight, or None; its A are R more rows of `down`, or with
    `shared` the only ones. All in the dtype of x, contiguous. R: one of WIDE. A scale is part of B.
    rows: (n, P * R), by which x A^T is multiplied, each for an nth of the rows of x, or None: texts or tokens that have
    adapters of their own have zeros for the others.
    starts: int32 (P + 1,), 0 and `ends`, for kernels of any number of parts; None where there are at most MOST_PARTS.
    step, tagged: int32 (1,) and int64 (COPIES, rows of down), or None. Through these one launch computes both products
    for one row: its programs hand x A^T on, each number beside the step, by which readers know that it is there. So
    step is to be another number for each launch that has the same `tagged`.
    """

    down: torch.Tensor
    up: torch.Tensor
    ends: tuple[int, ...]
    gate_up: torch.Tensor | None = None
    shared: bool = False
    rows: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    step: torch.Tensor | None = None
    tagged: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return self.up.shape[1]

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        """x A^T by itself, by row where rows have adapters of their own. h: x after the norm."""
        return by_row(F.linear(h, self.down), self.rows)

    def parts(self, y: torch.Tensor, inner: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of a product (..., N): columns of it, of x A^T, and rows of B, a part each."""
        starts = (0, *self.ends[:-1])
        inners = inner.split(self.rank, dim=-1)
        return [
            (y[..., start:end], one, self.up[start:end])
            for start, end, one in zip(starts, self.ends, inners, strict=False)
        ]

    def add_to(self, y: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """y, to which it is added in place, contiguous."""
        for part, inner, up in self.parts(y, self.inner(h)):
            part.flatten(0, -2).addmm_(inner.flatten(0, -2), up.t())
        return y

    def reason(self, x: torch.Tensor, sizes: tuple[int, ...], gate: bool, most: int = MOST_PARTS) -> str | None:
        """Why kernels cannot take it beside x and a weight of these sizes, in so many parts."""
        rows = len(self.ends) + (self.gate_up is not None and not self.shared)
        given = [one for one in (self.down, self.up, self.gate_up) if one is not None]
        if self.rank not in RANKS or len(self.ends) > most or self.ends[-1:] != sizes[:1]:
            return f"adapters of rank {self.rank} in {len(self.ends)} parts"
        if self.down.shape != (rows * self.rank, *sizes[1:]) or self.up.shape[:1] != sizes[:1]:
            return "adapters of another shape than the weight"
        if (self.gate_up is not None) != gate or (gate and len(self.ends) > 1):
            return "adapters of a gate, or none of it"
        if self.rows is not None and x.shape[:-1].numel() % len(self.rows):
            return f"adapters of {len(self.rows)} rows beside {tuple(x.shape)}"
        if any(not one.is_contiguous() or one.dtype != x.dtype or one.device != x.device for one in given):
            return "adapters not contiguous, or of another dtype or device than x"
        return None


def with_low_rank(product: Callable, h: torch.Tensor, low_rank: LowRankTerm | None, gate: object) -> Callable:
    """product(weight, bias) with what adapters add. h: x after the norm. gate: the weight whose B is `gate_up`."""
    if low_rank is None:
        return product
    inner, term = low_rank.inner(h), low_rank

    def both(weight, bias):
        y = product(weight, bias)
        parts: Any = [(y, inner[..., -term.rank :], term.gate_up)] if weight is gate else term.parts(y, inner)
        return torch.cat([part + F.linear(own, up) for part, own, up in parts], -1)

    return both


class LowRankArguments(NamedTuple):
    """A term as kernels take it."""

    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    gate_up: torch.Tensor | None = None
    inner: torch.Tensor | None = None
    step: torch.Tensor | None = None
    tagged: torch.Tensor | None = None
    first: int = 0
    second: int = 0

    @classmethod
    def of(cls, term: LowRankTerm | None, inner: torch.Tensor | None) -> "LowRankArguments":
        """inner: x A^T; None where the kernel computes it."""
        if term is None:
            return cls()
        first, second = (*term.ends, *(term.ends[-1],) * 2)[:2]
        if inner is None:
            return cls(term.down, term.up, term.gate_up, None, term.step, term.tagged, first, second)
        return cls(None, term.up, term.gate_up, inner, None, None, first, second)
