"""The layout of compressed-tensors: what a quantized linear is called in a file, and what config.json says of it.

Formats "int-quantized" and "float-quantized": `weight` int8 or float8_e4m3fn (N, K). "pack-quantized": `weight_packed`
int32, numbers of 2 to 8 bits stored plus half their range, the first in the lowest bits, with `weight_shape`; here up
to 4 bits take 4, others 8. All:
`weight_scale` (N, groups); where 0 does not stand for 0, `weight_zero_point`, int8 (N, groups), packed along the rows
where the weight is packed; where columns that share a scale lie apart, `weight_g_idx` (K), the group of each. Whole
numbers are written packed, which is where vLLM looks for weights that meet
activations in 16 bits; it takes "int-quantized" only with activations in 8 bits. Read is either. Source: the package
compressed-tensors 0.20, compressors/pack_quantized and compressors/naive_quantized.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from accel_kernels.gemm.quantized_weight import PER_WORD, WORD, Quantized, pack, unpack
from torch import nn

from accel.patching.structure import stock_method
from accel.quantization.activations import FIXED, ROW_DTYPES, SCALE, is_static, weight_dtype_of
from accel.quantization.formats.repacked import UNROUNDED, Repacked, column_order, held_tensors
from accel.quantization.scheme import Scheme

METHOD, PACKAGE = "compressed-tensors", "compressed_tensors."
PACKED, BYTEWISE, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
GROUP_OF = "weight_g_idx"
NAMES = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", GROUP_OF)
BYTES = (torch.int8, torch.float8_e4m3fn)


def format_of(scheme: Scheme) -> str:
    """The name that compressed-tensors has for it."""
    if scheme.weight_dtype == "fp8":
        return FLOAT
    return PACKED if _rounded(scheme) is None else BYTEWISE


def parts(quantized: Quantized, format: str = PACKED) -> dict[str, torch.Tensor]:
    """What is written for a weight, by the last part of its name; the same memory where the layout is the same.

    8-bit integers, which are not, are packed on the CPU: no second copy of a model takes room on its GPU.
    """
    data, scales, zeros, stored, order = quantized
    if order is not None:
        data = stored.pack(quantized.numbers())
        group_of = torch.empty_like(order, dtype=torch.int32)
        group_of[order] = torch.arange(len(order), device=order.device, dtype=torch.int32) // quantized.group
        return parts(Quantized(data, scales, zeros, stored), format) | {GROUP_OF: group_of}
    if stored.name == "fp8" or format == BYTEWISE:
        return {"weight": data, "weight_scale": scales}
    packed = stored.name == "int4"
    words = data if packed else pack(data.cpu(), 8)
    found = {
        "weight_packed": words,
        "weight_scale": scales,
        "weight_shape": torch.tensor(quantized.shape, device="cpu"),
    }
    if zeros is not None:
        found["weight_zero_point"] = packed_zeros(zeros, stored.bits)
    return found


def read(held: Mapping[str, torch.Tensor | None], taken: bool = False) -> Quantized:
    """The weight that these parts are. Raises ValueError where they do not fit one another, or what we can hold.

    taken: nobody else reads the parts, so that numbers may be unpacked in their memory.
    """
    scales = _held(held, "weight_scale")
    if not scales.is_floating_point() or scales.dtype in BYTES:
        raise ValueError(f"scales of dtype {scales.dtype}")
    data, zeros = held.get("weight"), held.get("weight_zero_point")
    packed = held.get("weight_packed")
    if packed is not None:
        data, zeros = _unpacked(packed, _held(held, "weight_shape"), scales, zeros, taken)
    elif data is None or data.dtype not in BYTES or data.dim() != 2:
        raise ValueError("a weight that is no matrix of int8 or float8_e4m3fn, nor packed")
    rows = data.shape[0]
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(rows, 1).contiguous()
        zeros = None if zeros is None else zeros.reshape(1, 1).expand(rows, 1).contiguous()
    columns = Quantized.of(data, scales).shape[1]
    if scales.dim() != 2 or scales.shape[0] != rows or not scales.shape[1] or columns % scales.shape[1]:
        raise ValueError(f"scales {tuple(scales.shape)} for a weight {(rows, columns)}")
    if columns % PER_WORD:
        raise ValueError(f"{columns} inputs, not a multiple of {PER_WORD}")
    if zeros is not None and (zeros.dtype != torch.int8 or zeros.shape != scales.shape):
        raise ValueError(f"zero points {tuple(zeros.shape)} of {zeros.dtype} for scales {tuple(scales.shape)}")
    weight, group_of = Quantized.of(data, scales, zeros), held.get(GROUP_OF)
    return weight if group_of is None or group_of.is_meta else weight.by_order(_order(weight, group_of))


def _order(weight: Quantized, group_of: torch.Tensor) -> torch.Tensor | None:
    columns, groups = weight.shape[1], weight.scales.shape[1]
    if group_of.dtype.is_floating_point or group_of.shape != (columns,):
        raise ValueError(f"an order of columns {tuple(group_of.shape)} of {group_of.dtype} for {columns} inputs")
    order, repeats = column_order(group_of, groups)
    if bool((repeats != 1).any()):
        raise ValueError(f"an order of columns that does not give each of {groups} groups {weight.group} of them")
    return order


def _held(held: Mapping[str, torch.Tensor | None], name: str) -> torch.Tensor:
    tensor = held.get(name)
    if tensor is None:
        raise ValueError(f"no {name}")
    return tensor


def _unpacked(
    words: torch.Tensor, shape: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, taken: bool
) -> tuple:
    """Data and zero points as a Quantized has them."""
    if words.dtype != torch.int32 or words.dim() != 2 or shape.numel() != 2:
        raise ValueError(f"a packed weight {tuple(words.shape)} of {words.dtype}")
    rows, columns = shape.tolist()
    wide = bits(words, shape)
    if words.shape[0] != rows or wide not in range(2, 9) or words.shape[1] * WORD != wide * columns:
        raise ValueError(f"a packed weight {tuple(words.shape)} for the shape {(rows, columns)}: not of 2 to 8 bits")
    if zeros is not None:
        if zeros.dtype != torch.int32 or zeros.shape != (-(-rows * wide // WORD), scales.shape[-1]):
            raise ValueError(f"packed zero points {tuple(zeros.shape)} of {zeros.dtype} for {rows} rows")
        zeros = unpacked_zeros(zeros, rows, wide)
    if wide in (4, 8):
        return (words if wide == 4 else _bytes(words, taken)), zeros
    numbers = unpack(words, wide)
    return (pack(numbers) if wide < 4 else numbers), zeros


def bits(words: torch.Tensor, shape: torch.Tensor) -> int:
    """Of a number in a packed weight of this shape."""
    columns = int(shape.flatten()[-1])
    return columns and words.shape[-1] * WORD // columns


def packed_zeros(zeros: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """(N, groups) as int32 (ceil(N bits / 32), groups), packed along the rows."""
    lacking = -zeros.shape[0] % (WORD // bits)
    return pack(torch.nn.functional.pad(zeros.t(), (0, lacking), value=-(1 << bits - 1)), bits).t().contiguous()


def unpacked_zeros(words: torch.Tensor, rows: int, bits: int = 4) -> torch.Tensor:
    """`packed_zeros` taken back: (rows, groups) int8."""
    whole = nn.functional.pad(words.t(), (0, -words.shape[0] % bits))  # no number begun in the last word
    return unpack(whole, bits)[:, :rows].t().contiguous()


def _bytes(words: torch.Tensor, taken: bool) -> torch.Tensor:
    """int8 (N, K) of 8-bit numbers in int32 (N, K / 4); in the same memory where that is `taken`."""
    if not taken:
        return unpack(words, 8)
    return words.contiguous().view(torch.uint8).bitwise_xor_(128).view(torch.int8)


def scheme_of(quantized: Quantized) -> Scheme:
    """As the tensors are; a group that takes all columns is a scale by row."""
    group = None if quantized.scales.shape[1] == 1 else quantized.group
    return Scheme(quantized.format.name, group, quantized.zeros is None, ordered=quantized.order is not None)


def config(schemes: Mapping[str, Scheme], ignored: list[str], heads: Collection[str] = ()) -> dict:
    """`quantization_config` of config.json. schemes: by the path of each quantized linear. heads: those of them that
    are output heads, which are always named: other engines' classes for them are not called linear.
    """
    by_scheme: dict[Scheme, list[str]] = {}
    for path, scheme in schemes.items():
        by_scheme.setdefault(scheme, []).append(path)
    alone = len(by_scheme) == 1 and not schemes.keys() <= set(heads)
    groups = [
        _group(scheme, [*sorted(heads), "Linear"] if alone else sorted(paths)) for scheme, paths in by_scheme.items()
    ]
    formats = sorted({group["format"] for group in groups})
    # compressed-tensors 0.20 has no room for packed zero points where transformers loads a model as it is stored.
    packed = any(format_of(scheme) == PACKED and not scheme.symmetric for scheme in by_scheme)
    return ({"dequantize": True} if packed else {}) | {
        "quant_method": METHOD,
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def rounding_of(found: Mapping) -> str | None:
    """How `input_activations` has inputs rounded: a value of `Options.activations`.

    None for inputs that stay as they are, and for what is not understood: scales that go neither by token nor, fixed,
    by tensor.
    """
    kinds: dict[object, str] = {"int": "int8", "float": "fp8"}
    kind = kinds.get(found.get("type"))
    if kind is None or found.get("num_bits") != 8 or not found.get("symmetric", True):
        return None
    ways: dict[object, str] = {(True, "token"): kind, (False, "tensor"): f"{kind}-static"}
    return ways.get((found.get("dynamic"), found.get("strategy")))


def input_scale(held: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
    """(1,) float32. Raises ValueError where there is none, or no number above 0."""
    scale = _held(held, SCALE)
    if scale.numel() != 1 or not scale.is_floating_point():
        raise ValueError(f"scales of inputs {tuple(scale.shape)} of {scale.dtype}, not one")
    scale = scale.detach().to(torch.float32, copy=True).view(1)
    if not 0 < scale.item() < float("inf"):
        raise ValueError(f"{scale.item()} as the scale of its inputs")
    return scale


def _rounded(scheme: Scheme) -> dict | None:
    """What is said of inputs; of those with columns in 16 bits nothing, which others could not do."""
    static = FIXED.get(scheme.activations) == SCALE
    if not static and scheme.activations not in ("int8", "fp8"):
        return None
    kind, strategy = scheme.format.saved, "tensor" if static else "token"
    how = {"strategy": strategy, "group_size": None, "dynamic": not static}
    return {"num_bits": 8, "type": kind, "symmetric": True} | how


def _group(scheme: Scheme, targets: list[str]) -> dict:
    weights = {
        "num_bits": scheme.format.bits,
        "type": scheme.format.saved,
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group is None else "group",
        "group_size": scheme.group,
        "dynamic": False,
    } | ({"actorder": "group"} if scheme.ordered else {})
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": _rounded(scheme),
        "output_activations": None,
        "format": format_of(scheme),
    }


def read_compressed_tensors(module: Any) -> Repacked | str | None:
    """As transformers makes of a folder in this layout, before its first call."""
    held, scheme = held_tensors(module), vars(module).get("quantization_scheme")
    if not isinstance(module, nn.Linear) or "weight_scale" not in held or scheme is None:
        return None  # tensors of these names mean something else to others, as Gemma's
    weight = held.get("weight")
    if weight is not None and weight.is_floating_point() and weight.dtype not in BYTES:
        return "its weight was dequantized by a call before accel.optimize"
    if "weight_packed" in held and "weight_shape" not in held:
        return "numbers in floats of 4 bits are not read"
    forward = vars(module).get("forward")
    if forward is not None and not stock_method(module, forward) and not of_package(forward):
        return f"its forward was replaced ({type(forward).__name__})"
    name = "weight_packed" if "weight_packed" in held else "weight"
    big = held[name]
    found = getattr(scheme, "input_activations", None)
    said = {name: getattr(found, name, None) for name in ("num_bits", "type", "symmetric", "strategy", "dynamic")}
    rounding = rounding_of(said)
    fixed = rounding is not None and is_static(rounding) and ROW_DTYPES[weight_dtype_of(rounding)] == big.dtype
    if fixed:
        input_scale(held)
    wide = bits(big, held["weight_shape"]) if "weight_packed" in held else 0
    taken = 4 if wide <= 4 else 8
    return Repacked(
        module,
        METHOD if wide in (0, taken) else f"{METHOD} of {wide} bits, {taken} in memory",
        name,
        (_of_module,),
        partial(_data, wide=wide),
        note=UNROUNDED if found is not None else "",
        input_scale=_scale_of_module if fixed else None,
        called=False,
    )


def of_package(function: object) -> bool:
    """Whether a forward or a hook is one of compressed-tensors' own."""
    function = getattr(function, "__func__", function)
    return getattr(function, "__globals__", {}).get("__name__", "").startswith(PACKAGE)


def _of_module(module: nn.Module) -> Quantized:
    held = {name: tensor.detach() for name, tensor in held_tensors(module).items()}
    if "weight" in held and held["weight"].dtype not in BYTES:  # float8 that was cast with the model
        held["weight"] = held["weight"].to(torch.float8_e4m3fn)
    return read(held)


def _scale_of_module(module: nn.Module) -> torch.Tensor:
    return input_scale(held_tensors(module))


def _data(quantized: Quantized, wide: int) -> torch.Tensor:
    """As it lies in the file; the same memory where it lies so here. wide: bits of packed numbers, 0 of others."""
    if wide not in (0, 4):
        return pack(quantized.numbers(), wide)
    return quantized.data if quantized.order is None else quantized.format.pack(quantized.numbers())
