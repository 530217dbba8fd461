"""Linears of other libraries whose numbers are held as ours while they are optimized: GPTQ's and AWQ's.

Numbers of 2 to 8 bits are packed into int32 as one stream of bits, the first in the lowest bits. GPTQ: `qweight`
(K bits / 32, N), along the inputs; `qzeros` (groups, N bits / 32), in the first version of the format stored minus 1;
`scales` (groups, N); `g_idx` (K): the group of each input, in "act-order" in any order. AWQ: `qweight`
(K, N bits / 32), along the outputs, `qzeros` alike; of 4 bits eight columns to a word in the order 0, 2, 4, 6, 1, 3,
5, 7.

Here numbers of up to 4 bits take 4, others 8; columns that share a scale are put together, see `Quantized.order`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
from accel_kernels.gemm.quantized_weight import PER_WORD, WORD, Quantized, pack, unpack
from torch import nn

from accel.patching.rule import set_data

UNROUNDED = "activations keep their dtype, and the original layer rounds them: give `activations` to round them too"
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in an AWQ word of 4 bits, of its columns in order


@dataclass(eq=False)
class Repacked:
    """A linear of another library whose numbers are held as ours while it is optimized.

    kind: what the report calls it. name: of the tensor that holds the numbers. ways: functions of the module that give
    its weight, in the same memory where the layout is ours, or raise ValueError where its tensors do not fit one
    another; of several, one is right. back: gives the big tensor again. note: what is different. input_scale: gives the
    one of all its inputs, fixed, (1,) float32; None where it has none for numbers like the weight's. called: whether a
    call may tell if it computes what its tensors say.
    """

    module: Any
    kind: str
    name: str
    ways: tuple[Callable[[Any], Quantized], ...]
    back: Callable[[Quantized], torch.Tensor]
    note: str = ""
    input_scale: Callable[[Any], torch.Tensor] | None = None
    called: bool = True
    holders: list[Any] = field(default_factory=list)  # of bitsandbytes' second reference to it

    @property
    def big(self) -> torch.Tensor:
        """What holds the numbers; empty, in the dtype that it would have, while ours does."""
        return held_tensors(self.module)[self.name]

    def read(self) -> Quantized:
        return self.ways[0](self.module)

    def release(self) -> None:
        """Empties the big tensor, so that the numbers are held once."""
        self.holders = [
            one for one in (self.big, vars(self.module).get("state")) if getattr(one, "CB", None) is not None
        ]
        for holder in self.holders:
            holder.CB = None
        if not self.big.is_inference():
            set_data(self.big, lambda data: data.new_empty(0))

    def refill(self, quantized: Quantized) -> None:
        """Gives the numbers back."""
        self.module.to(device=quantized.data.device)
        if not self.big.is_inference():
            whole = self.back(quantized).to(self.big.dtype)
            alone = whole.untyped_storage().nbytes() == whole.nbytes  # and no rows beside another's, see `Stacked`
            set_data(self.big, lambda data: whole if alone else whole.clone())
        for holder in self.holders:
            holder.CB = self.big.data

    @contextmanager
    def whole(self, linear: Any) -> Iterator[nn.Module]:
        """Inside, the module holds its numbers. linear: ours, which does otherwise."""
        big, held = self.big, self.module._parameters if self.name in self.module._parameters else self.module._buffers
        try:
            self.refill(linear.quantized)
            yield self.module
        finally:
            held[self.name] = big  # in place of what was assigned, which is not ours to empty
            self.release()

    def bias(self, dtype: torch.dtype) -> nn.Parameter | None:
        """In the dtype of the model: others cast it in their own product."""
        held = held_tensors(self.module).get("bias")
        if held is None or (isinstance(held, nn.Parameter) and held.dtype == dtype):
            return held
        return nn.Parameter(held.to(dtype), requires_grad=False)


def held_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the module's own."""
    held = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def column_order(group_of: torch.Tensor, groups: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Of the group of each column, (K,): the order (K,) in which those of a group lie together, None where they do; and
    for how many equal groups each one stands, (groups,). Raises ValueError for sizes that have no such group.
    """
    sizes = group_of.bincount(minlength=groups)
    unit = gcd(*sizes.tolist())
    if len(sizes) > groups or (unit % WORD and unit != sizes.max()):
        raise ValueError(f"groups of uneven sizes: {sorted(set(sizes.tolist()))} inputs share a scale")
    order = group_of.argsort(stable=True).int()
    return None if bool((group_of.diff() >= 0).all()) else order, sizes // unit


@dataclass(frozen=True)
class PackedWords:
    """How GPTQ, or AWQ, packs numbers of so many bits. offset: of zero points above what is stored."""

    awq: bool
    bits: int
    offset: int = 0

    def weight(self, module: nn.Module) -> Quantized:
        """Raises ValueError for groups that cannot be made equal, or a zero point with no room."""
        held, few = held_tensors(module), self.bits <= 4
        words, scales = held["qweight"].detach(), held["scales"].detach()
        numbers = self._placed(unpack(words, self.bits), PLACES).t() if self.awq else unpack(words.t(), self.bits)
        order, repeats = column_order(_group_of(held), len(scales))
        zeros = self._placed(unpack(held["qzeros"], self.bits), PLACES).short() + self.offset
        if zeros.max() > (7 if few else 127):
            raise ValueError(f"a zero point of {1 << self.bits}")
        scales, zeros = (one.repeat_interleave(repeats, 0).t().contiguous() for one in (scales, zeros.to(torch.int8)))
        data = pack(numbers) if few else numbers.contiguous()
        return Quantized.of(data, scales, zeros if bool(zeros.any()) else None).by_order(order)

    def words(self, quantized: Quantized) -> torch.Tensor:
        """`qweight`."""
        numbers = quantized.numbers()
        if self.awq:
            return pack(self._placed(numbers.t(), [PLACES.index(place) for place in range(PER_WORD)]), self.bits)
        return pack(numbers, self.bits).t().contiguous()

    def _placed(self, numbers: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
        if not self.awq or self.bits != 4:
            return numbers
        return numbers.unflatten(1, (-1, PER_WORD))[:, :, list(places)].flatten(1)


def read_words(module: Any) -> Repacked | str | None:
    """A linear as GPTQ or AWQ stores it."""
    held = held_tensors(module)
    if not {"qweight", "qzeros", "scales"} <= held.keys():
        return None
    words, zeros, (groups, outputs), awq = held["qweight"], held["qzeros"], held["scales"].shape, "g_idx" not in held
    columns = len(words) if awq else held["g_idx"].numel()
    bits = words.shape[1] * WORD / max(1, outputs) if awq else len(words) * WORD / max(1, columns)
    if bits not in range(2, 9):
        return f"{bits:g} bits: only 2 to 8 are read"
    whole = groups and not (awq and (columns % groups or columns % PER_WORD))
    if not whole or (len(zeros), zeros.shape[1] * WORD) != (groups, outputs * bits):
        return f"{columns} inputs in {groups} groups, zero points {tuple(zeros.shape)}"
    ways = [PackedWords(awq, int(bits), offset) for offset in ((0,) if awq else (1, 0))]  # two versions of GPTQ's
    kind, taken = "AWQ" if awq else "GPTQ", 4 if bits <= 4 else 8
    kind += "" if bits == taken else f" of {bits:g} bits, {taken} in memory"
    return Repacked(module, kind, "qweight", tuple(way.weight for way in ways), ways[0].words)


def _group_of(held: dict[str, torch.Tensor]) -> torch.Tensor:
    if (group_of := held.get("g_idx")) is not None:
        return group_of
    columns, groups = len(held["qweight"]), len(held["scales"])
    return torch.arange(columns, device=held["scales"].device) // (columns // groups)
