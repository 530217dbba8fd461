"""Weights in the formats of other libraries: who can read them, and whether that is what their modules compute.

To add a library, write its reader and name it in READERS. A reader recognizes a module by what it holds, at every call
anew, since whoever changes it need not tell: so it only looks at attributes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from accel_kernels import BlockWeight
from torch import nn

from accel.comparison import relative_rms
from accel.errors import reason_of
from accel.libraries.code import lacks_kernel
from accel.quantization.formats.bitsandbytes import read_bitsandbytes
from accel.quantization.formats.bytewise import DYNAMIC, read_float8, read_tensor
from accel.quantization.formats.ggml import read_ggml
from accel.quantization.formats.stored import StoredWeight
from accel.tolerances import PREQUANTIZED

Reader = Callable[[Any], StoredWeight | str | None]
# Each gives the weight of a module, why it cannot be read, or None where the module is of another library.
READERS: tuple[Reader, ...] = (read_bitsandbytes, read_ggml, read_float8, read_tensor)

PROBED = 64  # outputs that are compared


def read_stored(module: Any) -> StoredWeight | str | None:
    """What the first reader gives that knows the module."""
    try:
        found = next((found for read in READERS if (found := read(module)) is not None), None)
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
    dtype, weight = found.dtype or torch.bfloat16, found.weight.first(PROBED)
    x = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0), device="cpu") * 99
    x[:, ::16] = x[:, ::16].sign() * 448  # so that rounding to float8, whatever shares a scale, changes none
    x = x.to(torch.float8_e4m3fn).to(weight.data.device, dtype) * (DYNAMIC if found.step is None else found.step)
    x = x.to(dtype)
    bias = None if found.bias is None else found.bias[:PROBED].to(dtype)
    with torch.inference_mode(False), torch.no_grad():
        wanted = F.linear(x, weight.dequantized(dtype), bias)  # by no kernel: in a dry run they give nothing
        given = type(module).forward(probe(module), x)[..., :PROBED]
    apart = relative_rms(given.float(), wanted.float())
    return None if apart < PREQUANTIZED else f"it computes something else than its tensors say ({apart:.0%} off)"


def probe(module: nn.Module) -> nn.Module:
    """The module in another object, with a bias of its own: some cast it in place when they are called."""
    other = type(module).__new__(type(module))
    vars(other).update(vars(module), _parameters=dict(module._parameters), _buffers=dict(module._buffers))
    if (bias := module._parameters.get("bias")) is not None:
        other._parameters["bias"] = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return other
