"""Linears of other libraries whose numbers are held as ours while they are optimized: GPTQ's and AWQ's.

Numbers of 2 to 8 bits are packed into int32 as one stream of bits, the first in the lowest bits. GPTQ: `qweight`
(K bits / 32, N), along the inputs; `qzeros` (groups, N bits / 32), in the first version of the format stored minus 1;
`scales` (groups, N); `g_idx` (K): the group of each input, in "act-order" in any order. AWQ: `qweight`
(K, N bits / 32), along the outputs, `qzeros` alike; of 4 bits eight columns to a word in the order 0, 2, 4, 6, 1, 3,
5, 7.

Here numbers of up to 4 bits take 4, others 8; columns that share a scale are put together, see `Quantized.order`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any

import torch
from accel_kernels.gemm.quantized_weight import PER_WORD, WORD, Quantized, pack, unpack
from torch import nn

from accel.patching.rule import set_data

UNROUNDED = "activations keep their dtype, and the original layer rounds them: give `activations` to round them too"
BITS = range(2, 9)
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in an AWQ word of 4 bits, of its columns in order


@dataclass(eq=False)
class Repacked:
    """A linear of another library whose numbers are held as ours while it is optimized.

    kind: what the report calls it. big: the tensor that holds the numbers. ways: functions of the module that give its
    weight, in the same memory where the layout is ours, or raise ValueError where its tensors do not fit one another;
    of several, one is right. back: gives the big tensor again. note: what is different. input_scale: of all its inputs,
    fixed, (1,) float32; None where it has none for numbers like the weight's. called: whether a call may tell if it
    computes what its tensors say.
    """

    module: Any
    kind: str
    big: torch.Tensor
    ways: tuple[Callable[[Any], Quantized], ...]
    back: Callable[[Quantized], torch.Tensor]
    note: str = ""
    input_scale: torch.Tensor | None = None
    called: bool = True
    holders: list[Any] = field(default_factory=list)  # of bitsandbytes' second reference to it

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

    def refill(self, quantized: Quantized, dtype: torch.dtype | None) -> None:
        """Gives the numbers back. dtype: which the model has been given meanwhile, None where it has kept its own."""
        self.module.to(device=quantized.data.device, dtype=dtype)
        if not self.big.is_inference():
            whole = self.back(quantized)
            alone = whole.untyped_storage().nbytes() == whole.nbytes  # and no rows beside another's, see `Stacked`
            set_data(self.big, lambda data: whole if alone else whole.clone())
        for holder in self.holders:
            holder.CB = self.big.data

    def state_dict(self, quantized: Quantized) -> dict[str, torch.Tensor]:
        """The module's own, as it came. quantized: its weight now."""
        held = self.module.state_dict(keep_vars=True)
        return {name: self.back(quantized) if one is self.big else one.detach() for name, one in held.items()}

    @property
    def bias(self) -> nn.Parameter | None:
        held = held_tensors(self.module).get("bias")
        return held if held is None or isinstance(held, nn.Parameter) else nn.Parameter(held, requires_grad=False)


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
    order = group_of.argsort(stable=True)
    return None if bool((group_of.diff() >= 0).all()) else order, sizes // unit


def read_gptq(module: Any) -> Repacked | str | None:
    """A linear as GPTQ stores it."""
    held = held_tensors(module)
    if not {"qweight", "qzeros", "scales", "g_idx"} <= held.keys():
        return None
    words, columns = held["qweight"], held["g_idx"].numel()
    bits = words.shape[0] * WORD / max(1, columns)
    if bits not in BITS:
        return f"{bits:g} bits: only 2 to 8 are read"
    ways = tuple(partial(_gptq_weight, bits=int(bits), offset=offset) for offset in (1, 0))  # the format's two versions
    kind = _kind("GPTQ", int(bits))
    return _sizes(held, columns, words.shape[1], int(bits)) or Repacked(
        module, kind, words, ways, partial(_gptq_words, bits=int(bits))
    )


def read_awq(module: Any) -> Repacked | str | None:
    """A linear as AWQ stores it."""
    held = held_tensors(module)
    if not {"qweight", "qzeros", "scales"} <= held.keys() or "g_idx" in held:
        return None
    words, (groups, outputs) = held["qweight"], held["scales"].shape
    bits = words.shape[1] * WORD / max(1, outputs)
    if bits not in BITS:
        return f"{bits:g} bits: only 2 to 8 are read"
    columns = words.shape[0]
    uneven = columns % groups or columns % PER_WORD
    reason = _sizes(held, columns, outputs, int(bits), uneven)
    ways = (partial(_awq_weight, bits=int(bits)),)
    return reason or Repacked(module, _kind("AWQ", int(bits)), words, ways, partial(_awq_words, bits=int(bits)))


def _sizes(held: dict[str, torch.Tensor], columns: int, outputs: int, bits: int, uneven: int = 0) -> str | None:
    zeros, groups = held["qzeros"], len(held["scales"])
    if uneven or not groups or (zeros.shape[0], zeros.shape[1] * WORD) != (groups, outputs * bits):
        return f"{columns} inputs in {groups} groups, zero points {tuple(zeros.shape)}"
    return None


def _kind(name: str, bits: int) -> str:
    taken = 4 if bits <= 4 else 8
    return name if bits == taken else f"{name} of {bits} bits, {taken} in memory"


def _weight(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> Quantized:
    """numbers: (N, K); scales, zeros: (groups, N). Raises ValueError for a zero point with no room."""
    if zeros.numel() and zeros.max() > (7 if bits <= 4 else 127):
        raise ValueError(f"a zero point of {1 << bits}")
    middle = zeros.t().to(torch.int8).contiguous() if bool(zeros.any()) else None
    return Quantized.of(pack(numbers) if bits <= 4 else numbers.contiguous(), scales.detach().t().contiguous(), middle)


def _gptq_weight(module: nn.Module, bits: int, offset: int) -> Quantized:
    held = held_tensors(module)
    order, repeats = column_order(held["g_idx"], len(held["scales"]))
    zeros = unpack(held["qzeros"], bits).short() + offset
    scales, zeros = (one.repeat_interleave(repeats, 0) for one in (held["scales"], zeros))
    numbers = unpack(held["qweight"].detach().t(), bits)
    return _weight(numbers, scales, zeros, bits).by_order(order)


def _gptq_words(quantized: Quantized, bits: int) -> torch.Tensor:
    return pack(quantized.numbers(), bits).t().contiguous()


def _awq_weight(module: nn.Module, bits: int) -> Quantized:
    held = held_tensors(module)
    numbers, zeros = (unpack(held[name].detach(), bits) for name in ("qweight", "qzeros"))
    if bits == 4:
        numbers, zeros = (one.unflatten(1, (-1, PER_WORD))[:, :, list(PLACES)].flatten(1) for one in (numbers, zeros))
    return _weight(numbers.t(), held["scales"], zeros, bits)


def _awq_words(quantized: Quantized, bits: int) -> torch.Tensor:
    numbers = quantized.numbers().t()
    if bits == 4:
        places = [PLACES.index(place) for place in range(PER_WORD)]
        numbers = numbers.unflatten(1, (-1, PER_WORD))[:, :, places].flatten(1)
    return pack(numbers, bits)
