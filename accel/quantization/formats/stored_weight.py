"""Weights in the formats of other libraries: who can read them, and whether that is what their modules compute.

To add a library, write its reader and name it here. A reader recognizes a module by what it holds, and gives what reads
the weight, with what gives it back; why it cannot be read; or None where the module is of another library.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from accel_kernels import BlockWeight
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from accel.comparison import relative_rms
from accel.errors import reason_of
from accel.libraries.code import lacks_kernel
from accel.parallel.sharded_layers import known
from accel.patching.rule import foreign_forward
from accel.patching.structure import hooked
from accel.quantization.formats.bitsandbytes import read_bitsandbytes, read_bitsandbytes8
from accel.quantization.formats.bytewise import DYNAMIC, read_float8, read_tensor
from accel.quantization.formats.compressed_tensors import read_compressed_tensors
from accel.quantization.formats.ggml import read_ggml
from accel.quantization.formats.repacked import Repacked, held_tensors, read_words
from accel.quantization.formats.stored import MISPLACED, StoredWeight
from accel.tolerances import PREQUANTIZED

# Of numbers that are held as ours, by modules of ours.
REPACKED: tuple[Callable[[Any], Repacked | str | None], ...] = (read_compressed_tensors, read_words, read_bitsandbytes8)
# Of weights that are read as they lie. They are asked at every call anew, since whoever changes a module need not tell:
# so they only look at attributes.
STORED: tuple[Callable[[Any], StoredWeight | str | None], ...] = (
    read_bitsandbytes,
    read_ggml,
    read_float8,
    read_tensor,
)

PROBED = 64  # outputs that are compared


def recognize(module: nn.Module, dtype: torch.dtype) -> Repacked | StoredWeight | str | None:
    """How the weight of a module of any library is read, or why it runs its own forward; None for one that holds no
    numbers in fewer bits. dtype: of the model.
    """
    try:
        given = next((found for read in REPACKED if (found := read(module)) is not None), None)
        if given is not None:
            return given if isinstance(given, str) else settled(given, dtype)
    except ValueError as error:
        return str(error)
    except Exception as error:  # whatever tensors of other shapes, or without memory, may raise
        return f"its tensors cannot be read: {reason_of(error)}"
    stored = read_stored(module)
    if not isinstance(stored, StoredWeight):
        return stored
    reason = foreign_forward(module) or ("its weight is divided among ranks" if known(module) else None)
    return reason or (stored_weight(module) or "it computes something else than its tensors say")


def read_stored(module: Any) -> StoredWeight | str | None:
    """What the first reader gives that knows the module, of those that have inputs and outputs."""
    if "in_features" not in vars(module):  # as embeddings in the same formats
        return None
    try:
        found = next((found for read in STORED if (found := read(module)) is not None), None)
        if isinstance(found, StoredWeight) and found.misplaced:
            return MISPLACED
        weight = found.weight if isinstance(found, StoredWeight) else None
        timed = isinstance(weight, BlockWeight) and weight.format.most_rows  # products known to pay on a GPU
        if weight is None or not weight.is_cuda or timed or lacks_kernel(module):
            return found
        return f"products of {weight.format.name} have not been timed on a GPU"
    except (AttributeError, RuntimeError, TypeError) as error:  # of another version, or half made
        return f"its weight cannot be read: {reason_of(error)}"


def stored_weight(module: nn.Module) -> StoredWeight | None:
    """The same, if the module computes a product with that weight and nothing else; hooks are the caller's to look for.

    The first module of a kind is called with small numbers, and compared; not where it cannot run.
    """
    found = read_stored(module)
    if not isinstance(found, StoredWeight):
        return None
    if lacks_kernel(module):
        return found
    kind, weight = type(module), type(module._parameters["weight"])
    try:
        bias = None if found.bias is None else found.bias.dtype
        return None if disagreement(StoredKind((kind, kind.forward, weight, found.kind, bias), ref(module))) else found
    except Exception as error:  # whatever a forward may raise
        reason_of(error)
        return None


def coarsest(root: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """Of this dtype and those in which linears inside of root multiply, the one that rounds most."""
    found = map(read_stored, root.modules())
    dtypes = (one.dtype for one in found if isinstance(one, StoredWeight) and one.dtype is not None)
    return max((dtype, *dtypes), key=lambda one: torch.finfo(one).eps)


@dataclass(frozen=True)
class StoredKind:
    """What modules that compute alike have in common, and one of them."""

    common: tuple
    module: ref = field(compare=False)


@lru_cache(maxsize=256)  # raised errors are not kept
def disagreement(kind: StoredKind) -> str | None:
    """Why the module is not a product with its weight."""
    module, found = kind.module(), None
    if module is not None:
        found = read_stored(module)
    if module is None or not isinstance(found, StoredWeight):
        return "it is gone"
    step, forward = DYNAMIC if found.step is None else found.step, partial(type(module).forward, probe(module))
    return _closest(forward, [found.weight.first(PROBED)], found.bias, found.dtype or torch.bfloat16, step)[1]


def settled(found: Repacked, dtype: torch.dtype) -> Repacked | str:
    """The same with the one of its ways whose weight is closest to what the module computes, or why none is close."""
    if not found.called:
        found.read()
        return hooked(found.module) or found
    weights, refused = {}, None
    for way in found.ways:
        try:
            weights[way] = way(found.module).rows(0, PROBED)
        except ValueError as error:
            refused = error
    if refused is not None and not weights:
        raise refused
    # bitsandbytes moves what hangs on the weight to the state, at a first call.
    holders = [one for one in (found.big, vars(found.module).get("state")) if hasattr(one, "__dict__")]
    before = [(one, dict(vars(one))) for one in holders]
    bias = held_tensors(found.module).get("bias")
    try:
        at, reason = _closest(probe(found.module).forward, [*weights.values()], bias, dtype)
    except Exception as error:  # whatever a forward may raise
        return f"calling it to compare raised {reason_of(error)}"
    finally:
        for one, attributes in before:
            vars(one).clear()
            vars(one).update(attributes)
    return reason or hooked(found.module) or replace(found, ways=([*weights][at],))


def _closest(
    forward: Callable, weights: Sequence[Any], bias: torch.Tensor | None, dtype: torch.dtype, step: Any = DYNAMIC
) -> tuple[int, str | None]:
    """Which of the weights, the first rows of a module's, is closest to what its forward computes with small numbers,
    and why it is not that. Some modules pack theirs in another way at their first call: so a probe is called.
    """
    x = torch.randn(4, weights[0].shape[1], generator=torch.Generator().manual_seed(0), device="cpu") * 99
    x[:, ::16] = x[:, ::16].sign() * 448  # so that rounding to float8, whatever shares a scale, changes none
    x = (x.to(torch.float8_e4m3fn).to(weights[0].data.device, dtype) * step).to(dtype)
    bias = None if bias is None else bias[:PROBED].to(dtype)
    # Who watches the call in which this happens sees none of it.
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        # By no kernel: in a dry run they give nothing.
        wanted = [F.linear(x, weight.dequantized(dtype), bias).float() for weight in weights]
        given = forward(x)[..., :PROBED].float()
        apart, at = min((relative_rms(given, one), at) for at, one in enumerate(wanted))
    return at, None if apart < PREQUANTIZED else f"it computes something else than its tensors say ({apart:.0%} off)"


def probe(module: nn.Module) -> nn.Module:
    """The module in another object, with a bias of its own: some cast it in place when they are called."""
    other = type(module).__new__(type(module))
    vars(other).update(vars(module), _parameters=dict(module._parameters), _buffers=dict(module._buffers))
    if (bias := module._parameters.get("bias")) is not None:
        other._parameters["bias"] = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return other
