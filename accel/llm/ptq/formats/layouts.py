"""Linears as other libraries hold them: compressed-tensors, GPTQ, AWQ and bitsandbytes. What a layout leaves open,
calling the module settles.

GPTQ: `qweight` int32 (K / 8, N), the first row in the lowest bits, of 8 bits (K / 4, N); `qzeros` int32 (groups, N / 8)
or (groups, N / 4), in the first version of the format stored minus 1; `scales` (groups, N); `g_idx` (K): the group of
each row. AWQ: `qweight` int32 (K, N / 8), eight columns to a word in the order 0, 2, 4, 6, 1, 3, 5, 7, `qzeros` alike.
bitsandbytes' Linear8bitLt: `weight` int8 (N, K), and 127 times the scales in `SCB`.
"""

from typing import Any

import torch
from accel_kernels.gemm.quantized_weight import PER_WORD, Quantized, pack, unpack
from torch import nn

from accel.llm.ptq.formats import compressed_tensors as compressed
from accel.llm.ptq.formats.prequantized import UNROUNDED, PrequantizedLinear, closest, held_tensors, of_package
from accel.patching.structure import stock_method
from accel.quantization.activations import ROW_DTYPES, is_static, weight_dtype_of

WORD = 32
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column in each place of a word
TOP = 127


class CompressedTensors(PrequantizedLinear):
    """As transformers makes of a folder in the layout of compressed-tensors, before its first call."""

    @classmethod
    def recognize(cls, module: nn.Module, dtype: torch.dtype) -> "CompressedTensors | str | None":
        held = held_tensors(module)
        if not isinstance(module, nn.Linear) or "weight_scale" not in held:
            return None
        weight = held.get("weight")
        if weight is not None and weight.is_floating_point() and weight.dtype not in compressed.BYTES:
            return "its weight was dequantized by a call before accel.optimize"
        if "weight_g_idx" in held:
            return "act-order: its columns are in an order of their own"
        forward = vars(module).get("forward")
        if forward is not None and not stock_method(module, forward) and not of_package(forward):
            return f"its forward was replaced ({type(forward).__name__})"
        return cls(module)

    def __init__(self, module: nn.Module):
        super().__init__(module)
        held = held_tensors(module)
        self.big = held["weight_packed"] if "weight_packed" in held else held["weight"]
        self.bytes = "weight_packed" in held and compressed.bits(held["weight_packed"], held["weight_shape"]) == 8
        self.kind = compressed.METHOD
        found = getattr(vars(module).get("quantization_scheme"), "input_activations", None)
        self.note = UNROUNDED if found is not None else ""
        said = {name: getattr(found, name, None) for name in ("num_bits", "type", "symmetric", "strategy", "dynamic")}
        activations = compressed.rounding_of(said)
        if (
            activations is not None
            and is_static(activations)
            and ROW_DTYPES[weight_dtype_of(activations)] == self.big.dtype
        ):
            self.input_scale = compressed.input_scale(held)

    def read(self) -> Quantized:
        held = {name: tensor.detach() for name, tensor in held_tensors(self.module).items()}
        return compressed.read(held)

    def back(self, quantized: Quantized) -> torch.Tensor:
        return compressed.to_bytes(quantized.data) if self.bytes else quantized.data


class Gptq(PrequantizedLinear):
    """A linear as GPTQ stores it: words along the inputs, zeros along the outputs."""

    kind = "GPTQ"

    @classmethod
    def recognize(cls, module: nn.Module, dtype: torch.dtype) -> "Gptq | str | None":
        held = held_tensors(module)
        if not {"qweight", "qzeros", "scales", "g_idx"} <= held.keys():
            return None
        words, groups = held["qweight"], held["scales"].shape[0]
        columns, order = held["g_idx"].numel(), held["g_idx"].long()
        bits = words.shape[0] * WORD / max(1, columns)
        if bits not in (4, 8):
            return f"{bits:g} bits: only 4 and 8 are read"
        if columns % groups or held["qzeros"].shape != (groups, words.shape[1] * bits // WORD):
            return f"{columns} inputs in {groups} groups, zero points {tuple(held['qzeros'].shape)}"
        if not torch.equal(order, torch.arange(columns, device=words.device) // (columns // groups)):
            uneven = bool((order.diff() >= 0).all())
            return "groups of uneven sizes" if uneven else "act-order: its columns are in an order of their own"
        return closest(*(cls(module, offset) for offset in (1, 0)), dtype=dtype)  # of the format's two versions

    def __init__(self, module: nn.Module, offset: int):
        super().__init__(module)
        self.big, self.offset = held_tensors(module)["qweight"], offset
        self.wide = self.big.shape[0] * 4 == held_tensors(module)["g_idx"].numel()  # of 8 bits

    def read(self) -> Quantized:
        held, numbers = held_tensors(self.module), compressed.from_bytes if self.wide else unpack
        zeros = (numbers(held["qzeros"]).short() + self.offset).t().contiguous()
        if zeros.numel() and zeros.max() > 127:
            raise ValueError("a zero point of 256")
        words = held["qweight"].detach().t().contiguous()
        return Quantized.of(
            compressed.from_bytes(words) if self.wide else words,
            held["scales"].detach().t().contiguous(),
            zeros.to(torch.int8) if bool(zeros.any()) else None,
        )

    def back(self, quantized: Quantized) -> torch.Tensor:
        return (compressed.to_bytes(quantized.data) if self.wide else quantized.data).t().contiguous()


class Awq(PrequantizedLinear):
    """A linear as AWQ stores it: words along the outputs, in an order of their own."""

    kind = "AWQ"

    @classmethod
    def recognize(cls, module: nn.Module, dtype: torch.dtype) -> "Awq | str | None":
        held = held_tensors(module)
        if not {"qweight", "qzeros", "scales"} <= held.keys() or "g_idx" in held:
            return None
        words, (groups, outputs) = held["qweight"], held["scales"].shape
        if words.shape[1] * WORD != 4 * outputs:
            return f"{words.shape[1] * WORD / max(1, outputs):g} bits: only 4 are read"
        if words.shape[0] % groups or words.shape[0] % PER_WORD or held["qzeros"].shape != (groups, words.shape[1]):
            return f"{words.shape[0]} inputs in {groups} groups, zero points {tuple(held['qzeros'].shape)}"
        return closest(cls(module), dtype=dtype)

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.big = held_tensors(module)["qweight"]

    def read(self) -> Quantized:
        held = held_tensors(self.module)
        zeros = _ordered(held["qzeros"]).t().contiguous()
        return Quantized.of(
            pack(_ordered(self.big.detach()).t()),
            held["scales"].detach().t().contiguous(),
            zeros if bool(zeros.any()) else None,
        )

    def back(self, quantized: Quantized) -> torch.Tensor:
        numbers = unpack(quantized.data).t().unflatten(1, (-1, PER_WORD))
        return pack(numbers[:, :, list(ORDER)].flatten(1))


def _ordered(words: torch.Tensor) -> torch.Tensor:
    """(rows, columns) int8 of -8..7 from AWQ's words."""
    places = [ORDER.index(column) for column in range(PER_WORD)]
    return unpack(words).unflatten(1, (-1, PER_WORD))[:, :, places].flatten(1)


class Bitsandbytes8(PrequantizedLinear):
    """Linear8bitLt, before its first call, where `weight` holds CB and SCB, or after it, where `state` does."""

    kind = "bitsandbytes int8"
    note = UNROUNDED

    @classmethod
    def recognize(cls, module: nn.Module, dtype: torch.dtype) -> "Bitsandbytes8 | str | None":
        weight, state = module._parameters.get("weight"), vars(module).get("state")
        scales = None if weight is None or weight.dtype != torch.int8 else _scales(weight, state)
        if weight is None or scales is None:
            return None
        if weight.dim() != 2 or weight.shape[1] % PER_WORD or scales.numel() != weight.shape[0]:
            return f"a weight {tuple(weight.shape)} with {scales.numel()} scales"
        before = [(one, dict(vars(one))) for one in (weight, state)]
        found = closest(cls(module), dtype=dtype)
        for one, attributes in before:  # a first call moves CB and SCB from the weight to the state
            vars(one).clear()
            vars(one).update(attributes)
        return found

    def __init__(self, module: Any):
        super().__init__(module)
        self.big = module.weight
        self.holders: list[Any] = []

    def read(self) -> Quantized:
        scales = _scales(self.module.weight, self.module.state)
        if scales is None:
            raise ValueError("no scales beside its weight, nor in its state")
        return Quantized.of(self.big.detach(), scales.detach().float().reshape(-1, 1) / TOP)

    def back(self, quantized: Quantized) -> torch.Tensor:
        return quantized.data

    def release(self) -> None:
        self.holders = [one for one in (self.big, self.module.state) if getattr(one, "CB", None) is not None]
        for holder in self.holders:
            holder.CB = None
        super().release()

    def refill(self, quantized: Quantized, dtype: torch.dtype | None) -> None:
        super().refill(quantized, dtype)
        for holder in self.holders:
            holder.CB = self.big.data


def _scales(weight: torch.Tensor, state: object) -> torch.Tensor | None:
    found = getattr(weight, "SCB", None)
    return getattr(state, "SCB", None) if found is None else found


# In the order in which a module is asked for: the first that knows it reads it.
LAYOUTS: tuple[type[PrequantizedLinear], ...] = (CompressedTensors, Gptq, Awq, Bitsandbytes8)
