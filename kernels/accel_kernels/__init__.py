"""Fused GPU operations for diffusion and language models; plain torch everywhere else.

Each name below is an `Op`: call it like a function. On a CUDA tensor it supports it runs a Triton kernel, on anything
else its plain-torch reference, with the same result up to rounding. Knows nothing of diffusers or transformers.
"""

from accel_kernels.attend import attend
from accel_kernels.attention import attention
from accel_kernels.dequantise import dequantise
from accel_kernels.experts import experts
from accel_kernels.fp8_linear import fp8_linear
from accel_kernels.gated import gated
from accel_kernels.geglu import geglu
from accel_kernels.group_norm import group_norm
from accel_kernels.image_sum import image_concat, image_sum
from accel_kernels.int8_linear import int8_linear
from accel_kernels.kv import KV
from accel_kernels.layer_norm import layer_norm
from accel_kernels.linear_geglu import linear_geglu
from accel_kernels.norm import Norm
from accel_kernels.op import Case, Op
from accel_kernels.projection import projection
from accel_kernels.quantise_rows import QuantisedRows, quantise_rows
from accel_kernels.quantised import Quantised
from accel_kernels.quantised_projection import quantised_projection
from accel_kernels.rms_norm import rms_norm
from accel_kernels.softmax import softmax
from accel_kernels.upsample import upsample
from accel_kernels.upsample_convolve import upsample_convolve

OPS = (
    attend,
    attention,
    dequantise,
    experts,
    fp8_linear,
    gated,
    geglu,
    group_norm,
    image_concat,
    image_sum,
    int8_linear,
    layer_norm,
    linear_geglu,
    projection,
    quantise_rows,
    quantised_projection,
    rms_norm,
    softmax,
    upsample,
    upsample_convolve,
)

__all__ = [
    "KV",
    "OPS",
    "Case",
    "Norm",
    "Op",
    "Quantised",
    "QuantisedRows",
    "attend",
    "attention",
    "dequantise",
    "experts",
    "fp8_linear",
    "gated",
    "geglu",
    "group_norm",
    "image_concat",
    "image_sum",
    "int8_linear",
    "layer_norm",
    "linear_geglu",
    "projection",
    "quantise_rows",
    "quantised_projection",
    "rms_norm",
    "softmax",
    "upsample",
    "upsample_convolve",
]
