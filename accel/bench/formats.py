"""What formats of other libraries cost: calls by the library's own path and by accel, in turns, beside plain ones."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from accel_kernels.gemm.blocks.ggml import GGML
from torch import nn

import accel
from accel.bench.adapters import first_error, linears_of_blocks, parts_called, plain_subject
from accel.bench.llm.models import beside
from accel.bench.memory import allocated_bytes
from accel.bench.timing import compare_times
from accel.errors import reason_of
from accel.libraries.models import is_causal_lm

Convert = Callable[[nn.Module, dict[str, nn.Linear]], None]


def _each(make: Callable[[nn.Linear], nn.Module | None]) -> Convert:
    """By a linear in the format, None where its size does not fit."""

    def convert(model: nn.Module, linears: dict[str, nn.Linear]) -> None:
        for path, linear in linears.items():
            if (new := make(linear)) is not None:
                model.set_submodule(path, new)

    return convert


def _nf4(linear: nn.Linear) -> nn.Module | None:
    kinds, weight = import_module("bitsandbytes.nn"), linear.weight
    if linear.in_features % 64:  # numbers to a scale
        return None
    with torch.device("meta"):
        new = kinds.Linear4bit(linear.in_features, linear.out_features, compute_dtype=weight.dtype, quant_type="nf4")
    new.weight = kinds.Params4bit(weight.data, requires_grad=False, quant_type="nf4", module=new)
    new.bias = linear.bias
    return new.to(weight.device)


def _ggml(name: str, linear: nn.Linear) -> nn.Module | None:
    """Random blocks: the library has no code that makes all of them."""
    library, format = import_module("diffusers.quantizers.gguf.utils"), GGML[name]
    weight, blocks = linear.weight, linear.in_features // format.columns
    if linear.in_features % format.columns:
        return None
    data = torch.randint(256, (weight.shape[0] * blocks, format.bytes), dtype=torch.uint8, device=weight.device)
    scale = weight.float().std() / 2**format.low.bits / (32 if format.packing else 1) * 3
    for first, value in ((format.scale, scale), (format.minimum, scale * 2 ** (format.low.bits - 1))):
        if first is not None:
            data[:, first : first + 2] = value.half().reshape(1, 1).view(torch.uint8)
    with torch.device("meta"):
        new = library.GGUFLinear(linear.in_features, linear.out_features, True, weight.dtype)
    kind = import_module("gguf").GGMLQuantizationType[name]
    new._parameters["weight"] = library.GGUFParameter(data.reshape(weight.shape[0], -1), quant_type=kind)
    new.bias = linear.bias
    return new


def _fp8(linear: nn.Linear) -> nn.Module:
    weight, block = linear.weight, tuple(math.gcd(128, size) for size in linear.weight.shape)
    tiles = weight.float().unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scales = tiles.abs().amax((1, 3)).clamp_min(1e-12) / 448
    with torch.device("meta"):
        kind = import_module("transformers.integrations.finegrained_fp8").FP8Linear
        new = kind(linear.in_features, linear.out_features, block, has_bias=linear.bias is not None)
    numbers = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn).reshape(weight.shape)
    new.weight, new.weight_scale_inv = (nn.Parameter(one, requires_grad=False) for one in (numbers, scales))
    new.bias = linear.bias
    return new


def _torchao(name: str, model: nn.Module, linears: dict[str, nn.Linear]) -> None:
    library = import_module("torchao.quantization")
    library.quantize_(model, getattr(library, name)(), lambda _, path: path in linears)


def _quanto(name: str, model: nn.Module, linears: dict[str, nn.Linear]) -> None:
    library = import_module("optimum.quanto")
    library.quantize(model, weights=getattr(library, name), include=list(linears))
    library.freeze(model)


# By name: the package that has it, and what puts it in the place of a model's linears.
FORMATS: dict[str, tuple[str, Convert]] = {
    "nf4": ("bitsandbytes", _each(_nf4)),
    "Q8_0": ("gguf", _each(partial(_ggml, "Q8_0"))),
    "Q4_K": ("gguf", _each(partial(_ggml, "Q4_K"))),
    "fp8": ("transformers", _each(_fp8)),
    "torchao-int8": ("torchao", partial(_torchao, "Int8WeightOnlyConfig")),
    "torchao-int4": ("torchao", partial(_torchao, "Int4WeightOnlyConfig")),
    "torchao-float8": ("torchao", partial(_torchao, "Float8WeightOnlyConfig")),
    "quanto-int8": ("optimum.quanto", partial(_quanto, "qint8")),
    "quanto-int4": ("optimum.quanto", partial(_quanto, "qint4")),
    "quanto-float8": ("optimum.quanto", partial(_quanto, "qfloat8")),
}


def installed_formats() -> list[str]:
    """The formats whose packages there are."""

    def there(package: str) -> bool:
        return find_spec(package.partition(".")[0]) is not None and find_spec(package) is not None

    return [name for name, (package, _) in FORMATS.items() if there(package)]


def measure_formats(name: str, device: torch.device, formats: Iterable[str], budget_s: float) -> dict:
    """Milliseconds a call and MiB of the library's own path, of accel, and of accel with plain weights, by format.

    error: of accel's first output from the library's, relative; of tokens, the share that differs. Linears inside of
    the model's blocks are in the format, all else is shared. Raises KeyError for an unknown model.
    """
    plain, call = plain_subject(name, device)
    linears, rows = linears_of_blocks(plain), {}
    full = beside(plain)
    accel.optimize(full)
    for format in formats:
        if FORMATS[format][0] == "transformers" and not is_causal_lm(plain):  # diffusers has none of it
            continue
        try:
            stock = beside(plain)
            before = allocated_bytes(device)
            with torch.no_grad():
                FORMATS[format][1](stock, linears)
            made = [stock.get_submodule(path) for path in linears]
            if all(type(one) is nn.Linear and type(one.weight) is nn.Parameter for one in made):
                raise ValueError("no linear layer has a size for it")
            stock.requires_grad_(False).eval()
            held = allocated_bytes(device) - before
            rows[format] = _compared({"library": stock, "accel": beside(stock), "plain": full}, call, device, budget_s)
            rows[format]["weights_mb"] = round(held / 2**20, 1) or None
        except Exception as error:  # the others are still worth their time
            rows[format] = {"failed": reason_of(error)}
    whole = sum(linear.weight.nbytes for linear in linears.values())
    return {"name": name, "formats": rows, "weights_mb": round(whole / 2**20, 1)}


def _compared(models: dict[str, nn.Module], call: Callable, device: torch.device, budget_s: float) -> dict:
    outputs: dict[str, Any] = {}
    found: dict[str, Any] = {"peak_mb": {}}
    with torch.no_grad():  # Quanto's tensors of 4 bits refuse inference mode
        for variant, model in list(models.items()):
            try:
                if variant == "accel":
                    accel.optimize(model)
                before = allocated_bytes(device)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                outputs[variant], *_ = [call(model, 0) for _ in range(3)]
                if device.type == "cuda":
                    found["peak_mb"][variant] = round((torch.cuda.max_memory_allocated(device) - before) / 2**20, 1)
            except Exception as error:
                if variant != "library":
                    raise
                found["library"] = {"failed": reason_of(error)}  # as without a kernel that it needs
                del models[variant]
        times = compare_times({key: partial(call, one) for key, one in models.items()}, device, budget_s=budget_s)
    found |= {variant: timing.to_dict() for variant, timing in times.items()}
    if "library" in outputs:
        found["error"] = first_error(outputs["library"], outputs["accel"])
        found["speedup"] = round(times["library"].median_ms / times["accel"].median_ms, 3)
    found["of_plain"] = round(times["accel"].median_ms / times["plain"].median_ms, 3)
    return found | {"called": parts_called(models["accel"])}
