"""Adapters of low rank on a linear, read as they are at each call; others run the layer's own forward."""

import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from accel_kernels import LowRank
from accel_kernels.gemm.adapters.low_rank import add_low_rank
from accel_kernels.gemm.adapters.low_rank_term import LowRankTerm
from torch import nn

from accel.errors import reason_of
from accel.libraries.adapters import BASE, DOWN, UP, low_rank_scales, of_adapters, row_adapters, targeted
from accel.patching.structure import plain, tampered
from accel.quantization.experts import QuantizedExperts
from accel.tolerances import LINEAR

# Copies of adapters that products of this context read, see `cuda_graphs/adapter_buffers.py`; None to read them as they
# lie.
BUFFERS: ContextVar[Any] = ContextVar("accel_adapter_buffers", default=None)
# The adapter of each token of the forward that runs, (tokens,) int64 numbers of `AdapterBuffers`.
TOKENS: ContextVar[torch.Tensor | None] = ContextVar("accel_token_adapters", default=None)


def low_rank_term(layers: Sequence[Any], x: torch.Tensor, gate: bool = False) -> LowRankTerm | None:
    """What adapters add to the one product of x and these linears, for kernels to take with it; None where they cannot.

    gate: the first of two linears is the gate of the second.
    """
    buffers = BUFFERS.get()
    return None if buffers is None else buffers.term(layers, x, gate)


def low_rank(layer: Any, x: torch.Tensor) -> tuple[LowRank, ...] | None:
    """What adapters add to the linear `layer` is around, for all of the rows x; None where it computes anything else.

    Adapters must have the dtype of the rows, if they are not float32.
    """
    term = low_rank_term((layer,), x)
    if term is None:
        return read_low_rank(layer, x.dtype)
    return (LowRank(term.down, term.up, 1.0, term.rows),)


def read_low_rank(layer: Any, dtype: torch.dtype, whole: bool = False) -> tuple[LowRank, ...] | None:
    """The same for rows of this dtype, as the adapters lie. whole: all of them, also where rows have their own."""
    base = layer._modules.get(BASE)
    if base is None or BASE in base._modules or not (isinstance(base, nn.Linear) or hasattr(base, "nf")):  # GPT-2's
        return None
    named = whole and row_adapters(layer) is not None
    if tampered(layer, stored=True, known_hooks=named) or tampered(base, stored=True):
        return None
    scales = low_rank_scales(layer, whole)
    if scales is None or any(isinstance(scale, torch.Tensor) for scale in scales.values()):  # to be swapped in place
        return None
    if not _adds(Form(type(layer), bool(scales), weakref.ref(layer))):
        return None
    found = [(layer._modules[DOWN][name], layer._modules[UP][name], float(scale)) for name, scale in scales.items()]
    if not all(_fits(part, dtype) for *pair, _ in found for part in pair):
        return None
    return tuple(LowRank(down.weight, up.weight, scale) for down, up, scale in found)


def adapts_plain(layer: Any) -> bool:
    """Whether it is a plain linear with nothing but adapters of low rank around it."""
    inner = layer._modules.get(BASE)
    if inner is None or plain(inner, nn.Linear, stored=True) is not None or type(inner.weight) is not nn.Parameter:
        return False
    return read_low_rank(layer, inner.weight.dtype) is not None


def expect_all(model: nn.Module) -> None:
    """Raises ValueError where a model has adapters, and others are missing that were meant for experts of ours."""
    modules = dict(model.named_modules())
    packed = (
        f"{path}.{name}" for path, one in modules.items() if isinstance(one, QuantizedExperts) for name in one.formats
    )
    if (missed := targeted(model, packed)) is not None and any(BASE in one._modules for one in modules.values()):
        raise ValueError(
            f"{missed} is held in fewer bits, so peft put no adapter there: call accel.restore(model) before adapters "
            "are loaded"
        )


def with_adapters(
    x: torch.Tensor, ys: Sequence[torch.Tensor], adapters: Sequence[tuple[LowRank, ...]]
) -> Sequence[torch.Tensor]:
    """The products ys of one x, plus what the adapters of each add. x: (..., K)."""
    wide = {kind: x.to(kind).contiguous() for kind in {one.down.dtype for own in adapters for one in own}}
    sums = []
    for y, own in zip(ys, adapters, strict=True):
        total = y.to(own[0].down.dtype) if len(own) > 1 else y  # rounded once, behind the last
        for one in own:
            total = add_low_rank(wide[one.down.dtype], total, one)
        sums.append(total.to(x.dtype))
    return sums


def _fits(part: Any, dtype: torch.dtype) -> bool:
    """Whether it is a product without a bias, in this dtype or float32."""
    held = part._parameters if plain(part, nn.Linear, stored=True) is None else {}
    weight = held.get("weight")
    return type(weight) is nn.Parameter and weight.dtype in (dtype, torch.float32) and held["bias"] is None


@dataclass(frozen=True)
class Form:
    """A class of layers, with adapters that are active or without; layer: one of them, to be tried."""

    kind: type
    active: bool
    layer: weakref.ref = field(compare=False)


@lru_cache(maxsize=64)
def _adds(form: Form) -> bool:
    """Whether a layer of this class computes y + scale * (x A^T) B^T, tried on small numbers."""
    layer: Any = form.layer()
    g = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cpu", dtype=torch.float32)

    def linear(inputs: int, outputs: int) -> nn.Linear:
        given = {"bias": False, "device": "cpu", "dtype": torch.float32}
        made = nn.utils.skip_init(nn.Linear, inputs, outputs, **given).requires_grad_(False)  # draws no random numbers
        made.weight.copy_(rand(outputs, inputs))
        return made

    base, x, names = linear(5, 3), rand(2, 5), list(layer._modules[DOWN])
    downs, ups = ({name: linear(*sizes) for name in names} for sizes in ((5, 2), (2, 3)))
    scales = low_rank_scales(layer) or {}
    try:
        with torch.no_grad():
            wanted = base(x) + sum(ups[name](downs[name](x)) * scale for name, scale in scales.items())
            return torch.allclose(type(layer).forward(of_adapters(layer, base, downs, ups), x), wanted, atol=LINEAR)
    except Exception as error:  # needs more than these modules: not ours
        reason_of(error)
        return False
