"""The op `projection` with weights in fewer bits: a decode step takes the less time the less it reads.

The kernel reads whole numbers and scales as they were saved, and multiplies in registers; x keeps its 16 bits. For more
rows than it takes, the weight is written out in the dtype of x and cuBLAS multiplies.
"""

import torch

from accel_kernels import norm as norms
from accel_kernels.norm import ACTIVATIONS, Norm
from accel_kernels.op import Case, Op, capability, dtype_reason
from accel_kernels.projection import MOST_ROWS
from accel_kernels.projection import in_passes as full_in_passes
from accel_kernels.projection import reference as full_reference
from accel_kernels.quantised import Quantised, pack

QUAD = 16  # bytes of the weight that a thread reads at a time; a scale covers whole ones
CPU_ROWS = 32  # beyond, a CPU is faster with the weight written out
# Torch's product on a CPU loads so many bytes of x and of the weight at multiples of them, and so many scales, without
# asking whether they are there.
CPU_X_BYTES, CPU_WEIGHT_BYTES, CPU_SCALES = 32, 16, 4


def reference(
    x, weight, bias=None, *, norm=None, up=None, up_bias=None, activation=None, residual=None, scale=1.0
):  # fmt: skip
    """x: (..., K); weight, up: Quantised (N, K); all else, and the result, as of `projection`.

    The weight is rounded once to the dtype of x; sums as torch does them.
    """
    return full_reference(
        x, weight.dequantised(x.dtype), bias, norm=norm, up=None if up is None else up.dequantised(x.dtype),
        up_bias=up_bias, activation=activation, residual=residual, scale=scale,
    )  # fmt: skip


def in_passes(
    x, weight, bias=None, *, norm=None, up=None, up_bias=None, activation=None, residual=None, scale=1.0
):  # fmt: skip
    """The same with cuBLAS's products of weights written out for this one call."""
    from accel_kernels.dequantise import dequantise  # which names what this module knows of such weights

    return full_in_passes(
        x, dequantise(weight, x.dtype), bias, norm=norm, up=None if up is None else dequantise(up, x.dtype),
        up_bias=up_bias, activation=activation, residual=residual, scale=scale,
    )  # fmt: skip


def on_cpu(
    x, weight, bias=None, *, norm=None, up=None, up_bias=None, activation=None, residual=None, scale=1.0
):  # fmt: skip
    """The same by torch's own product of bf16 and int8 where that takes less time than writing the weight out."""
    if not all(_multiplies_bytes(x, one) for one in (weight, up) if one is not None):
        return reference(
            x, weight, bias, norm=norm, up=up, up_bias=up_bias, activation=activation, residual=residual, scale=scale
        )
    h = x if norm is None else norms.reference(x, norm)
    y = _product_of_bytes(h, weight, bias)
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    if up is not None:
        y = y * _product_of_bytes(h, up, up_bias)
    if scale != 1.0:
        y = y * scale
    return y if residual is None else residual + y


def _multiplies_bytes(x: torch.Tensor, weight: Quantised) -> bool:
    """Symmetric int8 by row; float32 and float16 are slower there, and float32 scales are read as bfloat16."""
    return (
        x.device.type == weight.data.device.type == "cpu"
        and x.dtype == weight.scales.dtype == torch.bfloat16
        and weight.data.dtype == torch.int8
        and weight.zeros is None
        and weight.scales.shape[1] == 1
        and x.shape[-1] == weight.shape[1]
        and weight.shape[1] % CPU_WEIGHT_BYTES == 0
        and weight.shape[0] % CPU_SCALES == 0
        and weight.data.is_contiguous()
        and 0 < x.numel() <= CPU_ROWS * x.shape[-1]
        and not (torch.is_grad_enabled() and x.requires_grad)
    )


def _product_of_bytes(h: torch.Tensor, weight: Quantised, bias: torch.Tensor | None) -> torch.Tensor:
    rows = _placed(h.reshape(-1, h.shape[-1]).contiguous(), CPU_X_BYTES)
    y = torch._weight_int8pack_mm(rows, _placed(weight.data, CPU_WEIGHT_BYTES), weight.scales.reshape(-1))
    y = y.view(*h.shape[:-1], -1)
    return y if bias is None else y + bias


def _placed(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """At a multiple of `step` bytes: a copy where it is not, as of a file mapped into memory, so that results are the
    same wherever a weight lies.
    """
    return tensor.clone() if tensor.data_ptr() % step else tensor


def supports(
    x, weight, bias=None, *, norm=None, up=None, up_bias=None, activation=None, residual=None, scale=1.0
) -> str | None:  # fmt: skip
    rows = x.numel() // max(1, x.shape[-1])
    if x.numel() == 0 or weight.data.numel() == 0:
        return "empty"
    if rows > MOST_ROWS:
        return f"{rows} rows, more than {MOST_ROWS}"
    if x.dtype == torch.float32:
        return "x of float32, which numbers of fewer bits do not pay for"
    if activation is not None and activation not in ACTIVATIONS:
        return f"activation {activation!r}"
    if up is not None and (activation is None or not _alike(weight, up)):
        return "a gate without activation, or of another shape, dtype or group"
    if norm is not None and norm.bias is not None and not norm.centred:
        return "a norm with a bias and no mean"
    if weight.shape[1] % 8 or x.shape[-1] != weight.shape[1]:
        return f"{weight.shape[1]} inputs, not a multiple of 8"
    reason = next((reason for one in (weight, up) if one is not None and (reason := weight_reason(one))), None)
    if reason is not None:
        return reason
    if not x.is_contiguous() or x.data_ptr() % 8:
        return "x not contiguous, or not at a multiple of 8 bytes"
    if residual is not None and (not residual.is_contiguous() or residual.dtype != x.dtype):
        return "residual not contiguous, or of another dtype"
    scales = (weight.scales, up.scales) if up is not None else (weight.scales,)
    return dtype_reason(x, bias, up_bias, residual, *scales, *((norm.weight, norm.bias) if norm else ()))


def _alike(weight: Quantised, up: Quantised) -> bool:
    pairs = zip(weight, up, strict=True)
    return all((a is None) == (b is None) and (a is None or (a.shape, a.dtype) == (b.shape, b.dtype)) for a, b in pairs)


def weight_reason(weight: Quantised) -> str | None:
    """Why the kernel cannot read this weight."""
    quad = QUAD * 8 // weight.bits
    if weight.scales.shape[1] > 1 and (weight.shape[1] % weight.scales.shape[1] or weight.group % quad):
        return f"a scale to {weight.group} columns, not a multiple of {quad}"
    for name, tensor in weight._asdict().items():
        if tensor is not None and not tensor.is_contiguous():
            return f"{name} of the weight not contiguous"
    if weight.data.data_ptr() % 4:
        return "a weight not at a multiple of 4 bytes"
    if weight.data.dtype == torch.float8_e4m3fn:
        if weight.zeros is not None:
            return "float8 with zeros"
        if weight.data.is_cuda and capability(weight.data.device) < (8, 9):
            return "float8 below compute capability 8.9"
    return None


def quantise(weight: torch.Tensor, dtype: torch.dtype, group: int = 0, zeros: bool = False) -> Quantised:
    """The nearest numbers to weight (N, K), by rows or by groups of columns; scales in the weight's dtype.

    dtype: int8, int32 (4 bits) or float8_e4m3fn. group: columns to a scale, 0 for all. zeros: numbers from the least to
    the greatest value rather than evenly around 0.
    """
    values = weight.float().unflatten(1, (-1, group or weight.shape[1]))
    most = {torch.int8: 127, torch.int32: 7, torch.float8_e4m3fn: 448}[dtype]
    middle = None
    if zeros:
        low, high = values.amin(2, keepdim=True).clamp_max(0), values.amax(2, keepdim=True).clamp_min(0)
        scales = ((high - low) / (2 * most + 1)).clamp_min(1e-12).to(weight.dtype)
        middle = (-1 - most - low / scales.float()).round().clamp(-1 - most, most)
    else:
        scales = (values.abs().amax(2, keepdim=True) / most).clamp_min(1e-12).to(weight.dtype)
    numbers = values / scales.float()
    if dtype == torch.float8_e4m3fn:
        return Quantised(numbers.clamp(-most, most).flatten(1).to(dtype), scales[..., 0])
    numbers = (numbers if middle is None else numbers + middle).round().clamp(-1 - most, most).to(torch.int8).flatten(1)
    zero = None if middle is None else middle[..., 0].to(torch.int8)
    return Quantised(pack(numbers) if dtype == torch.int32 else numbers, scales[..., 0].contiguous(), zero)


def _case(name, rows, k, n, kind=torch.int32, group=0, *, zeros=False, norm=None, bias=False, gate=False,
          activation=None, residual=False, scale=1.0, small=False):  # fmt: skip
    def make(device, dtype):
        g = torch.Generator("cpu").manual_seed(0)

        def rand(*size, spread=1.0):
            return (torch.randn(*size, generator=g) * spread).to(device, dtype)

        def weight():
            return quantise(rand(n, k, spread=k**-0.5) + (0.5 * k**-0.5 if zeros else 0.0), kind, group, zeros)

        given = {"activation": activation, "scale": scale}
        if norm == "rms":
            given["norm"] = Norm(rand(k), None, 1e-5)
        elif norm == "gemma":
            given["norm"] = Norm(rand(k), None, 1e-6, offset=1.0)
        elif norm == "layer":
            given["norm"] = Norm(rand(k), rand(k), 1e-5, centred=True)
        if gate:
            given["up"] = weight()
            given["up_bias"] = rand(n) if bias else None
        if residual:
            given["residual"] = rand(rows, n)
        return (rand(rows, k), weight(), rand(n) if bias else None), given

    return Case(name, make, small)


INT8, INT4, FP8 = torch.int8, torch.int32, torch.float8_e4m3fn
CASES = (
    _case("int8", 1, 64, 48, INT8, small=True),
    _case("int8-rms", 1, 1032, 21, INT8, norm="rms", residual=True, small=True),
    _case("int8-group-zeros", 1, 192, 13, INT8, 32, zeros=True, norm="gemma", small=True),
    _case("int8-layer-bias-gelu", 1, 104, 50, INT8, norm="layer", bias=True, activation="gelu_tanh", small=True),
    _case("int8-gate-bias", 1, 72, 37, INT8, gate=True, bias=True, activation="gelu", small=True),
    _case("int8-rows-3", 3, 88, 41, INT8, norm="rms", residual=True, scale=0.5, small=True),
    _case("int8-rows-17-gate", 17, 136, 35, INT8, norm="layer", gate=True, activation="silu", small=True),
    _case("int8-rows-2-group-zeros", 2, 192, 33, INT8, 64, zeros=True, small=True),
    _case("int4", 1, 64, 48, small=True),
    _case("int4-odd", 1, 136, 33, norm="rms", residual=True, scale=0.5, small=True),
    _case("int4-32", 1, 192, 37, INT4, 32, norm="rms", gate=True, activation="silu", small=True),
    _case("int4-64-zeros", 1, 448, 19, INT4, 64, zeros=True, bias=True, activation="relu2", small=True),
    _case(
        "int4-128-gate-zeros",
        1,
        1280,
        13,
        INT4,
        128,
        zeros=True,
        norm="layer",
        gate=True,
        bias=True,
        activation="gelu",
        small=True,
    ),  # fmt: skip
    _case("int4-rows-2", 2, 72, 33, norm="rms", small=True),
    _case("int4-rows-5-32-zeros", 5, 160, 35, INT4, 32, zeros=True, residual=True, small=True),
    _case(
        "int4-rows-17-64-gate", 17, 192, 33, INT4, 64, norm="layer", gate=True, bias=True, activation="silu", small=True
    ),  # fmt: skip
    _case("int4-rows-33-128-gate-zeros", 33, 384, 21, INT4, 128, zeros=True, gate=True, activation="relu", small=True),
    # As above with columns enough for products in registers, every way of scales.
    _case("int4-64-residual", 1, 256, 35, INT4, 64, residual=True, small=True),
    _case("int8-rows-3-gemma", 3, 192, 35, INT8, norm="gemma", residual=True, small=True),
    _case("int8-rows-4-32-zeros", 4, 128, 35, INT8, 32, zeros=True, norm="rms", small=True),
    _case(
        "int8-rows-16-layer-gate", 16, 320, 37, INT8, norm="layer", gate=True, bias=True, activation="gelu", small=True
    ),
    _case("int4-rows-2-rms-gate", 2, 384, 37, INT4, 128, norm="rms", gate=True, activation="silu", small=True),
    _case("int4-rows-7-128-zeros", 7, 512, 35, INT4, 128, zeros=True, bias=True, small=True),
    _case("int4-rows-5-32-zeros-wide", 5, 256, 35, INT4, 32, zeros=True, norm="rms", residual=True, small=True),
    _case("int4-rows-9-64", 9, 256, 50, INT4, 64, gate=True, activation="relu2", small=True),
    _case("int4-rows-4-by-row", 4, 256, 19, INT4, activation="gelu_tanh", scale=0.5, small=True),
    _case("int4-rows-40-32", 40, 192, 35, INT4, 32, zeros=True, residual=True, small=True),
    _case("fp8-rows-3-gate", 3, 192, 35, FP8, norm="rms", gate=True, activation="silu", small=True),
    _case("fp8-rows-64", 64, 128, 50, FP8, residual=True, small=True),
    _case("fp8", 1, 88, 33, FP8, norm="rms", residual=True, small=True),
    _case("fp8-gate", 1, 64, 37, FP8, gate=True, bias=True, activation="gelu", small=True),
    _case("fp8-rows-9", 9, 96, 35, FP8, norm="layer", gate=True, activation="silu", small=True),
    *(
        _case(f"llama-{name}-{label}-{rows}", rows, k, n, kind, group, **more)
        for label, kind, group in (("int8", INT8, 0), ("int4", INT4, 128), ("fp8", FP8, 0))
        for rows in (1, 2, 32)
        for name, k, n, more in (
            ("qkv", 4096, 6144, {"norm": "rms"}),
            ("gate-up", 4096, 14336, {"norm": "rms", "gate": True, "activation": "silu"}),
            ("down", 14336, 4096, {"residual": True}),
        )
    ),
    _case("llama-gate-up-int4-zeros", 1, 4096, 14336, INT4, 128, zeros=True, norm="rms", gate=True, activation="silu"),
    _case("qwen-0.5b-qkv-int4", 1, 896, 1152, INT4, 32, norm="rms", bias=True),
)

quantised_projection = Op(
    "quantised_projection",
    reference,
    "accel_kernels.triton_kernels.quantised_projection:quantised_projection",
    supports,
    CASES,
    instead=in_passes,
    on_cpu=on_cpu,
)
