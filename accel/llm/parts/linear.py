"""The weights of a linear layer for a fused product, or None where the module must be called."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accel_kernels import fused_linear, hopper_gemm
from accel_kernels.gemm.fused_linear import MOST_ROWS, apply_norm, in_passes
from accel_kernels.gemm.hopper.hopper_gemm import fills_gpu
from accel_kernels.trials import collecting
from torch import nn
from transformers import Conv1D

from accel.fusion.norm_kind import random_twin, stock_output
from accel.libraries.adapters import base
from accel.parallel.ranks import Ranks
from accel.parallel.sharded_layers import INPUTS, divided, local, sharding
from accel.patching.fast_forward import Kernels
from accel.patching.structure import tampered, trains
from accel.quantization.formats.stored import StoredWeight
from accel.quantization.formats.stored_weight import read_stored, stored_weight
from accel.quantization.module import QuantizedLinear, row_tensors
from accel.tolerances import LINEAR

# Rows of products, as of a step or a short prompt, whose algorithm is chosen by measuring in a CUDA graph: by so few
# cuBLAS's first choice differs from the best the most.
MOST_MEASURED_ROWS = 512
# Rows from which a product with its activation in one kernel takes less than cuBLAS's and a pass (H100): of a gate,
# which is two products, and of an activation alone. By more inputs than so many the product takes longer than the pass.
LEAST_ROWS, MOST_INPUTS = {True: 1024, False: 1536}, 2048


def product_for(
    kernels: Kernels, x: torch.Tensor, outputs: int = 0, activation: str | None = None, gate: bool = False
) -> Callable:
    """The operation for a weight and a bias in the dtype of x, to multiply x. outputs, activation, gate: of it."""
    rows = x.numel() // x.shape[-1]
    together = activation is not None and rows >= LEAST_ROWS[gate] and x.shape[-1] <= MOST_INPUTS and x.is_cuda
    if together and kernels.fused_linear is fused_linear and fills_gpu(rows, outputs, x.device):
        return _at_once
    if MOST_ROWS < rows <= MOST_MEASURED_ROWS and kernels.fused_linear is fused_linear and collecting():
        return partial(in_passes, linear=kernels.linear)
    return kernels.fused_linear


def _at_once(x: torch.Tensor, weight: torch.Tensor, bias: Any, *, norm: Any, **after: Any) -> torch.Tensor:
    return hopper_gemm(x if norm is None else apply_norm(x, norm), weight, bias, **after)


class Weights(NamedTuple):
    """A linear, and how its tensors are read: `operands()` gives weight (out, in), plain, `Quantized` or a
    `BlockWeight`, and bias (out,) or None.

    No views are kept: whoever moves a model elsewhere wants the memory back. transposed: the weight is stored (in,
    out). rows: (first, count) from the weight's own first row on, more than its own where other weights lie behind it;
    None for its own. ranks: among which the inputs are divided, so that products are summed and the bias is added once.
    in_blocks: the weight is in the format of another library; it has no rows that could lie behind others.
    """

    module: Any
    transposed: bool = False
    rows: tuple[int, int] | None = None
    ranks: Ranks | None = None
    in_blocks: bool = False

    @property
    def quantized(self) -> bool:
        """Whether it has no plain tensor for a weight."""
        return self.in_blocks or type(self.module) is QuantizedLinear

    @property
    def stored(self) -> StoredWeight:
        """What it has `in_blocks`. Raises ValueError where that is not what it was."""
        found = read_stored(self.module)
        if not isinstance(found, StoredWeight):
            raise ValueError(found or "its weight is of another kind")
        return found

    @property
    def outputs(self) -> int:
        if self.in_blocks:
            return self.stored.weight.shape[0]
        weight = self.tensors()[0]
        assert weight is not None
        return weight.shape[1] if self.transposed else weight.shape[0]

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What lies in rows of the output, and may lie behind another's."""
        if type(self.module) is QuantizedLinear:
            return row_tensors(self.module)
        own = self.module._parameters  # nn.Module looks an attribute up in ten times as long, hundreds of times a step
        bias = own["bias"]
        return local(own["weight"]), None if bias is None else local(bias)

    def fits(self, other: "Weights") -> bool:
        """Whether one operation can take both, as gate and up."""
        if self.ranks is not None or other.ranks is not None or self.quantized != other.quantized:
            return False
        if self.in_blocks or other.in_blocks:
            return self.in_blocks == other.in_blocks and self.stored.kind == other.stored.kind
        return not self.quantized or self._kind() == other._kind()

    def _kind(self) -> tuple:
        """What quantized weights of one operation have in common."""
        tensors = [t is None or (t.dtype, t.shape[1:]) for t in self.tensors()[:-1]]
        return self.module.format, self.module.rounding, tensors

    def operands(self) -> tuple[Any, torch.Tensor | None]:
        if self.in_blocks:
            return self.stored.operand, self.stored.bias
        *parts, bias = self.tensors()
        if self.transposed:
            parts = [part.t() for part in parts if part is not None]
        if self.rows is not None:
            *parts, bias = (None if part is None else _rows(part, *self.rows) for part in (*parts, bias))
        return self.module.read(*parts) if self.quantized else parts[0], bias


def _rows(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    place = tensor.storage_offset() + first * tensor.stride(0)
    return tensor.detach().as_strided((count, *tensor.shape[1:]), tensor.stride(), place)


def weights(module: nn.Module) -> Weights | None:
    """The weights of a module that computes x W^T + b; None where it does more: an adapter, a hook.

    Exact types: a LoRA layer's `.weight` is the base weight without the adapter. A subclass of nn.Linear with nothing
    else in it passes where its forward, tried on small numbers, computes the same. Of a layer that is divided among
    ranks this rank's part, where it is given its part of the inputs, or gives its part of the outputs.
    """
    found = sharding(module)
    if found is not None and (found.gathers or found.splits):
        return None
    if found is None and tampered(module) is not None:
        return None
    ranks = None if found is None or found.dim != INPUTS else found.ranks
    if type(module) is QuantizedLinear:
        return None if module.data.is_meta else Weights(module, ranks=ranks)
    parameters = vars(module)["_parameters"]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    usual = type(module) is nn.Linear and type(weight) is nn.Parameter
    if not usual and found is None and stored_weight(module) is not None:
        return Weights(module, in_blocks=True)
    kinds = [type(one) is nn.Parameter or (found is not None and divided(one)) for one in (weight, bias)]
    if not kinds[0] or not (bias is None or kinds[1]) or weight.dim() != 2:
        return None
    if not weight.is_floating_point() or weight.is_meta:
        return None
    if type(module) is nn.Linear:
        return Weights(module, ranks=ranks)
    if found is not None:
        return None
    if holds_transposed(module):
        return Weights(module, transposed=True)
    return Weights(module) if _multiplies(module) else None


def holds_transposed(module: nn.Module) -> bool:
    """Whether a linear holds its weight (in, out)."""
    return type(module) is Conv1D


def only_linear(module: nn.Module) -> nn.Module | None:
    """The linear inside of a module that computes no more than this, as where it clamps to bounds that are infinite."""
    inside, bounds = list(module.children()), [one for one in module._buffers.values() if one is not None]
    if len(inside) != 1 or not isinstance(base(inside[0]), nn.Linear | QuantizedLinear) or trains(module):
        return None
    if any(one is not None for one in module._parameters.values()) or tampered(module) is not None:
        return None
    if any(one.dim() or not one.is_floating_point() or one.is_meta or one.is_inference() for one in bounds):
        return None  # else whether they change is not known
    if not all(bool(one.isinf()) for one in bounds):
        return None
    g = torch.Generator().manual_seed(0)
    twin, linear = copy.copy(module), random_twin(nn.Linear(5, 3, device="meta"), g)
    vars(twin)["_modules"] = dict.fromkeys(module._modules, linear)
    vars(twin)["_buffers"] = {name: one if one is None else one.float().cpu() for name, one in module._buffers.items()}
    x = torch.randn(4, 5, generator=g, device="cpu", dtype=torch.float32)
    x *= x.new_tensor([1e-9, 1.0, 1e3, 1e30])[:, None]
    got, wanted = (stock_output(one, x) for one in (twin, linear))
    return inside[0] if isinstance(got, torch.Tensor) and torch.equal(got, wanted) else None


def _multiplies(module: nn.Module) -> bool:
    """Whether a subclass of nn.Linear computes what nn.Linear does, as Falcon's."""
    if not isinstance(module, nn.Linear) or vars(module)["_modules"] or vars(module)["_buffers"]:
        return False
    if set(vars(module)["_parameters"]) != {"weight", "bias"} or trains(module):
        return False
    g = torch.Generator().manual_seed(0)
    probe = random_twin(module, g, {"weight": (3, 5), "bias": (3,)})
    vars(probe).update(in_features=5, out_features=3)
    x = torch.randn(2, 5, generator=g, device="cpu", dtype=torch.float32)
    wanted, got = F.linear(x, probe.weight, probe.bias), stock_output(probe, x)
    alike = isinstance(got, torch.Tensor) and (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    return alike and torch.allclose(got, wanted, atol=LINEAR)
