"""A linear layer with its neighbors: norm before, activation or gate after, residual added.

y = residual + scale * act(norm(x) W^T + b), or with a gate act(h W^T + b) * (h U^T + c), h = norm(x). For the few rows
of a decode step it is one kernel; more rows take cuBLAS's product between fused elementwise passes.
"""

from functools import partial

import torch
import torch.nn.functional as F

from accel_kernels.gemm.adapters.low_rank_addend import low_rank_addend
from accel_kernels.gemm.adapters.low_rank_term import MOST_PARTS, with_low_rank
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.linear import torch_linear
from accel_kernels.norm import norm as norms
from accel_kernels.norm.layer_norm import layer_norm
from accel_kernels.norm.norm import Norm, norm_reason, norm_weights
from accel_kernels.norm.rms_norm import rms_norm
from accel_kernels.op import contiguous_reason, dtype_reason, make_op
from accel_kernels.product_cases import product_case

MOST_ROWS = 64
FEW_ROWS = 16  # that are multiplied one by one where the weight is wider, as of routers, which are small


def reference(x, weight, bias=None, *, norm=None, low_rank=None, **after):
    """x: (..., K); weight: (N, K). Returns (..., N).

    norm: a Norm over K, or None. low_rank: a `LowRankTerm` of adapters, or None. bias, after: the fields of `Epilogue`.
    x may be of another dtype than the weight, of which the result is: one row in float32 beside 16 bits, which is
    rounded first, or few rows the other way round. Beside weights in 16 bits the residual may be float32, which then is
    the dtype of the result.
    """
    x = x.to(weight.dtype)
    h = x if norm is None else norms.reference(x, norm)
    product = with_low_rank(lambda one, shift: F.linear(h, one, shift), h, low_rank, after.get("up"))
    return Epilogue(bias, **after).exact(weight, product)


def in_passes(x, weight, bias=None, *, norm=None, low_rank=None, linear=torch_linear, **after):
    """The same with cuBLAS's products: the residual is added inside the product where nothing stands between.

    linear: what multiplies, as `torch_linear`.
    """
    epilogue, x = Epilogue(bias, **after), x.to(weight.dtype)
    h = x if norm is None else apply_norm(x, norm)
    plain = epilogue._replace(bias=None).plain and (epilogue.residual is None or epilogue.residual.dtype == h.dtype)
    if low_rank is not None and epilogue.up is None:
        if len(low_rank.ends) > MOST_PARTS:
            y = linear(h, weight, None, low_rank_addend(h, low_rank, epilogue.bias))
        else:
            y = low_rank.add_to(linear(h, weight, epilogue.bias), h)
        return epilogue.in_passes(weight, lambda *_: y)
    product = with_low_rank(partial(linear, h), h, low_rank, epilogue.up)
    if plain and epilogue.spare and epilogue.bias is low_rank is None and linear is torch_linear:
        return linear(h, weight, None, epilogue.residual, out=epilogue.residual)
    if plain:
        return product(weight, epilogue.bias, *(() if epilogue.residual is None else (epilogue.residual,)))
    return epilogue.in_passes(weight, product)


def apply_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The norm by itself, in one pass."""
    if norm.centered and norm.offset == 0.0:
        return layer_norm(x, norm.weight, norm.bias, norm.eps)
    if not norm.centered and norm.bias is None:
        return rms_norm(x, norm.weight, norm.eps, offset=norm.offset)
    return norms.reference(x, norm)


def supports(x, weight, bias=None, *, norm=None, low_rank=None, **after) -> str | None:
    epilogue = Epilogue(bias, **after)
    up, residual = epilogue.up, epilogue.residual
    rows = x.numel() // max(1, x.shape[-1])
    if x.numel() == 0 or weight.numel() == 0:
        return "empty"
    if rows > MOST_ROWS:
        return f"{rows} rows, more than {MOST_ROWS}"
    if rows > 1 and x.dtype == torch.float32:
        return "several rows of float32, which cuBLAS adds up with less error"
    alike = epilogue.modulation is not None and len(epilogue.modulation) == 1 and epilogue.addend is None
    if (reason := epilogue.refusal(weight, modulated=alike, mixed=True)) is not None:
        return reason
    if (reason := norm_reason(norm)) is not None:
        return reason
    if weight.shape[1] % 8 or x.shape[-1] != weight.shape[1]:
        return f"{weight.shape[1]} inputs, not a multiple of 8"
    n = weight.shape[0]
    sizes = (epilogue.addend, rows * n), (epilogue.share, rows), (epilogue.modulation, n)
    if any(one is not None and one.numel() != size for one, size in sizes):
        return "an addend, a share or a modulation of another shape"
    given = {name: getattr(epilogue, name) for name in ("residual", "addend", "share", "modulation")}
    if (reason := contiguous_reason(x=x, weight=weight, up=up, **given)) is not None:
        return reason
    most = FEW_ROWS if weight.dtype == torch.float32 else 1
    if x.dtype != weight.dtype and (rows > most or torch.float32 not in (x.dtype, weight.dtype)):
        return "x and weight of different dtypes"
    if residual is not None and residual.dtype not in (weight.dtype, torch.float32):
        return "residual of another dtype, and not float32"
    if low_rank is not None and (low_rank.shared or x.dtype != weight.dtype):
        return "adapters whose A both weights share, or of a weight of another dtype"
    if low_rank is not None and (reason := low_rank.reason(x, weight.shape, up is not None)) is not None:
        return reason
    others = bias, up, epilogue.up_bias, *given.values(), *norm_weights(norm)
    return dtype_reason(x, weight, *others, products=rows > 1)


SWIGLU, GEGLU = {"gate": True, "activation": "silu"}, {"gate": True, "activation": "gelu"}
CASES = (
    product_case("plain", (1, 64), 48, small=True),
    product_case("rms", (1, 136), 40, norm="rms", small=True),
    product_case("gemma-residual", (1, 72), 33, norm="gemma", residual=True, scale=0.5, small=True),
    product_case("layer-bias-gelu", (1, 104), 50, norm="layer", bias=True, activation="gelu_tanh", small=True),
    product_case("gate", (1, 64), 37, norm="rms", gate=True, activation="silu", small=True),
    product_case("gate-bias", (1, 64), 37, gate=True, bias=True, activation="gelu", small=True),
    product_case("rows-3", (3, 88), 41, norm="rms", residual=True, small=True),
    product_case("rows-5-gate", (5, 96), 35, norm="layer", gate=True, activation="silu", small=True),
    product_case("wide", (1, 72), 33, norm="rms", residual=True, wide=True, small=True),
    product_case("wide-weight", (1, 72), 33, wide="weight", small=True),
    product_case("rows-3-wide-weight", (3, 72), 33, bias=True, wide="weight", small=True),
    product_case("rows-4-wide-residual", (4, 72), 33, residual=True, wide="residual", small=True),
    product_case("mixed", (1, 72), 33, residual=True, addend=True, share=True, scale=0.5, small=True),
    product_case("addend", (1, 72), 33, norm="rms", residual=True, addend=True, small=True),
    product_case("rows-5-mixed", (5, 72), 33, residual=True, addend=True, share=True, small=True),
    product_case("modulated", (1, 72), 33, norm="rms", modulation=True, residual=True, scale=0.5, small=True),
    product_case("rows-3-modulated", (1, 3, 72), 33, modulation=True, small=True),
    product_case("rows-17", (17, 128), 33, bias=True, activation="relu", small=True),
    product_case("low-rank", (1, 72), 33, norm="rms", residual=True, scale=0.5, low_rank=(33,), small=True),
    product_case("low-rank-parts", (1, 136), 56, norm="layer", bias=True, low_rank=(24, 40, 56), small=True),
    product_case("low-rank-together", (1, 136), 56, norm="rms", low_rank=(24, 56), together=True, small=True),
    product_case("low-rank-gate", (1, 64), 37, norm="rms", **SWIGLU, low_rank=(37,), together=True, small=True),
    product_case("low-rank-by-row", (1, 1, 72), 33, norm="rms", low_rank=(33,), by_row=True, together=True, small=True),
    product_case("rows-6-low-rank-by-row", (3, 2, 72), 56, low_rank=(24, 56), by_row=True, small=True),
    product_case("rows-5-low-rank", (5, 72), 56, norm="rms", residual=True, low_rank=(24, 40, 56), small=True),
    product_case("rows-3-low-rank-gate", (3, 64), 37, bias=True, **GEGLU, low_rank=(37,), small=True),
    product_case(
        "llama-qkv-low-rank", (1, 4096), 6144, norm="rms", low_rank=(4096, 5120, 6144), rank=64, together=True
    ),
    product_case("llama-gate-up-low-rank", (1, 4096), 14336, norm="rms", **SWIGLU, low_rank=(14336,), together=True),
    product_case("llama-down-8-low-rank", (8, 14336), 4096, residual=True, low_rank=(4096,), rank=128),
    product_case("llama-qkv", (1, 4096), 6144, norm="rms"),
    product_case("llama-out", (1, 4096), 4096, residual=True),
    product_case("llama-gate-up", (1, 4096), 14336, norm="rms", gate=True, activation="silu"),
    product_case("llama-down", (1, 14336), 4096, residual=True),
    product_case("llama-head", (1, 4096), 128256, norm="rms"),
    product_case("llama-qkv-8", (8, 4096), 6144, norm="rms"),
    product_case("llama-gate-up-8", (8, 4096), 14336, norm="rms", gate=True, activation="silu"),
    product_case("llama-down-32", (32, 14336), 4096, residual=True),
    product_case("qwen-0.5b-qkv", (1, 896), 1152, norm="rms", bias=True),
    product_case("phi-mlp", (2, 2560), 10240, norm="layer", bias=True, activation="gelu_tanh"),
)

fused_linear = make_op("fused_linear", reference, supports, CASES, instead=in_passes)
