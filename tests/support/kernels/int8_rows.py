"""Norms, weights and figures for products of rows in 8 bits."""

import torch
from accel_kernels import Norm, Quantized, quantize_rows

NORMS = {
    "none": None,
    "rms": Norm(torch.randn(80), None, 1e-5),
    "gemma": Norm(torch.randn(80), None, 1e-6, offset=1.0),
    "layer": Norm(torch.randn(80), torch.randn(80), 1e-5, centred=True),
    "plain-layer": Norm(None, None, 1e-5, centred=True),
}


def weight_of(n, k, dtype=torch.bfloat16, to=torch.int8):
    rows = quantize_rows.reference(torch.randn(n, k) * k**-0.5, dtype=to)
    return Quantized(rows.data, rows.scales.to(dtype))


def cast(norm, dtype):
    """The norm with its weights in this dtype."""
    return norm and Norm(*(t.to(dtype) if isinstance(t, torch.Tensor) else t for t in norm))


def sqnr(found, exact) -> float:
    """Signal to quantization noise, dB."""
    exact = exact.double()
    return float(10 * torch.log10(exact.square().sum() / (found.double() - exact).square().sum()))
