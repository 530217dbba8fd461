"""Where linear layers are that may be quantized: what both kinds of models have in common."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from accel.libraries.adapters import BASE
from accel.quantization.formats.repacked import Repacked
from accel.quantization.formats.stored import StoredWeight
from accel.quantization.formats.stored_weight import REPACKED, read_stored
from accel.quantization.module import QuantizedLinear
from accel.quantization.scheme import Scheme

if TYPE_CHECKING:
    from transformers import Conv1D

Dense: TypeAlias = "nn.Linear | Conv1D"  # what has a matrix and perhaps a bias, and may be quantized

FEWEST = 16  # outputs: gates and routers that choose, where there is little to save and much to lose


def base_modules(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Every module below this one once, with its path, without the modules that adapters add."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    children = {name: child for name, child in module._modules.items() if child is not None}
    for name, child in children.items():
        if BASE not in children or name == BASE:
            yield from base_modules(child, f"{path}.{name}" if path else name, seen)


def nothing_to_quantize(scheme: str, skipped: Mapping[str, str]) -> str:
    """The message that a scheme fits no linear layer of a model, with the first reason."""
    path, reason = next(iter(skipped.items()), ("the model", "no linear layers inside its layers"))
    return f"nothing to quantize as {scheme!r}: {path}: {reason}"


def already(module: nn.Module) -> str | None:
    """That its weight is in fewer bits, ours or another library's, as a reason not to quantize it."""
    if type(module) is QuantizedLinear:
        return f"is {module.scheme} already"
    found = read_stored(module) or next((one for read in REPACKED if (one := read(module))), None)
    if isinstance(found, StoredWeight | Repacked):
        return f"is {found.weight.format.name if isinstance(found, StoredWeight) else found.kind} already"
    return found and f"is in the format of another library: {found}"


def size_reason(outputs: int, inputs: int, scheme: Scheme) -> str | None:
    """Why a weight of this size is not quantized."""
    if not inputs:
        return "no inputs"
    return f"{outputs} outputs, fewer than {FEWEST}" if outputs < FEWEST else scheme.refuses(inputs)
