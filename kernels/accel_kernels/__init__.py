"""Fused GPU operations for diffusion and language models; plain torch everywhere else.

Each lower-case name below is an `Op`: call it like a function. On a CUDA tensor that it supports it runs a Triton
kernel, on anything else its plain-torch reference, with the same result up to rounding.
"""

from accel_kernels.attention.flash_attention import attention
from accel_kernels.attention.latent.latent_attention import latent_attention
from accel_kernels.attention.packed.packed_attention import packed_attention
from accel_kernels.attention.packed.packed_rows import packed_rows
from accel_kernels.attention.packed.rotated_heads import rotated_heads
from accel_kernels.attention.paged.kv import KV
from accel_kernels.attention.paged.paged_attention import paged_attention
from accel_kernels.beams.beam_step import BeamRules, BeamTexts, beam_step
from accel_kernels.beams.reorder_beams import reorder_beams
from accel_kernels.elementwise.gated import gated, geglu
from accel_kernels.elementwise.softmax import softmax
from accel_kernels.gemm.adapters.copy_matrices import copy_matrices
from accel_kernels.gemm.adapters.low_rank import LowRank
from accel_kernels.gemm.adapters.low_rank_addend import low_rank_addend
from accel_kernels.gemm.blocks.block_weight import BlockWeight
from accel_kernels.gemm.fp8_linear import fp8_linear
from accel_kernels.gemm.fused_linear import fused_linear
from accel_kernels.gemm.hopper.hopper_gemm import hopper_gemm
from accel_kernels.gemm.int8_linear import int8_linear
from accel_kernels.gemm.linear_geglu import linear_geglu
from accel_kernels.gemm.quantize_rows import QuantizedRows, quantize_rows
from accel_kernels.gemm.quantized.dequantize import dequantize
from accel_kernels.gemm.quantized.quantized_linear import quantized_linear
from accel_kernels.gemm.quantized_weight import Quantized
from accel_kernels.image.frames import FrameGroups, FramePadding, convolution_frames
from accel_kernels.image.image_sum import image_concat, image_sum
from accel_kernels.image.upsample import upsample
from accel_kernels.image.upsample_convolve import upsample_convolve
from accel_kernels.moe.experts import experts
from accel_kernels.moe.mixture import SharedExpert, mixture
from accel_kernels.moe.route import Routing, route
from accel_kernels.norm.group_norm import group_norm
from accel_kernels.norm.layer_norm import layer_norm
from accel_kernels.norm.norm import Norm
from accel_kernels.norm.norm_add import norm_add
from accel_kernels.norm.rms_norm import rms_norm
from accel_kernels.op import Case, Op
from accel_kernels.recurrent.causal_convolution import causal_convolution
from accel_kernels.recurrent.linear_attention_prompt import linear_attention_prompt
from accel_kernels.recurrent.linear_attention_step import Convolution, GatedNorm, linear_attention_step
from accel_kernels.recurrent.recurrence import Decay, RowStates, Sequences
from accel_kernels.recurrent.selective_scan import Widening, selective_scan
from accel_kernels.rowwise.program import RowOp, RowProgram
from accel_kernels.rowwise.rowwise import rowwise
from accel_kernels.sampling.argmax import argmax
from accel_kernels.sampling.ended_tokens import ended_tokens
from accel_kernels.sampling.sample import sample
from accel_kernels.sampling.table import SamplingTable
from accel_kernels.sampling.timestamp_rule import timestamp_rule

OPS = tuple(one for one in list(globals().values()) if isinstance(one, Op))

__all__ = [
    "KV",
    "OPS",
    "BeamRules",
    "BeamTexts",
    "BlockWeight",
    "Case",
    "Convolution",
    "Decay",
    "FrameGroups",
    "FramePadding",
    "GatedNorm",
    "LowRank",
    "Norm",
    "Op",
    "Quantized",
    "QuantizedRows",
    "Routing",
    "RowOp",
    "RowProgram",
    "RowStates",
    "SamplingTable",
    "Sequences",
    "SharedExpert",
    "Widening",
    "argmax",
    "attention",
    "beam_step",
    "causal_convolution",
    "convolution_frames",
    "copy_matrices",
    "dequantize",
    "ended_tokens",
    "experts",
    "fp8_linear",
    "fused_linear",
    "gated",
    "geglu",
    "group_norm",
    "hopper_gemm",
    "image_concat",
    "image_sum",
    "int8_linear",
    "latent_attention",
    "layer_norm",
    "linear_attention_prompt",
    "linear_attention_step",
    "linear_geglu",
    "low_rank_addend",
    "mixture",
    "norm_add",
    "packed_attention",
    "packed_rows",
    "paged_attention",
    "quantize_rows",
    "quantized_linear",
    "reorder_beams",
    "rms_norm",
    "rotated_heads",
    "route",
    "rowwise",
    "sample",
    "selective_scan",
    "softmax",
    "timestamp_rule",
    "upsample",
    "upsample_convolve",
]
