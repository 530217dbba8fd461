"""Mixture of experts: every token through the experts that its router chose, straight from the stacked weights.

y = sum over the chosen e of share * down_e (gating(gate_e x, up_e x)); Shazeer et al., "Outrageously large neural
networks", 2017, as Mixtral and its kin store it. No loop over experts on a GPU, no copy of their weights, and nothing
that the host waits for, so that a CUDA graph can hold it.
"""

import torch
import torch.nn.functional as F

from accel_kernels.gemm.quantized_weight import Quantized, mxfp4_weight, quantize_weight
from accel_kernels.moe.weights import PLACES, ExpertWeights, Gating
from accel_kernels.op import contiguous_reason, dtype_reason, make_op, random_cases

# That are multiplied one by one where nothing was measured; more are grouped by their experts. Of Qwen3-30B-A3B three
# tokens read 24 experts one by one and 22.5 grouped, eight 64 and 52, for two launches more.
MOST_TOKENS = 3


def reference(x, index, shares, weights):
    """x: (T, H); index: (T, k) int64, the chosen experts; shares: (T, k), of each in the sum; weights: ExpertWeights.
    Returns (T, H). An expert that there is none of, such as one of another rank, adds nothing.

    On a GPU it waits for the index.
    """
    tokens, chosen = index.shape
    flat = index.reshape(-1)
    y = x.new_zeros(tokens * chosen, weights.hidden)
    for expert in flat.unique().tolist():
        if not 0 <= expert < weights.experts:
            continue
        pairs = (flat == expert).nonzero()[:, 0]
        up_bias, down_bias = (None if b is None else b[expert] for b in (weights.gate_up_bias, weights.down_bias))
        up_matrix, down_matrix = weights.matrices(expert, x.dtype)
        gate, up = weights.split(F.linear(x[pairs // chosen], up_matrix, up_bias))
        y[pairs] = F.linear(weights.gating(gate, up), down_matrix, down_bias)
    return (y.view(tokens, chosen, -1) * shares.unsqueeze(-1)).sum(1).to(x.dtype)


def supports(x, index, shares, weights) -> str | None:
    if x.numel() == 0 or index.numel() == 0:
        return "empty"
    if x.dim() != 2 or index.dim() != 2 or len(index) != len(x) or shares.shape != index.shape:
        return "tokens, choices and shares of other shapes than (T, H), (T, k) and (T, k)"
    if x.shape[1] != weights.hidden:
        return f"{x.shape[1]} channels, experts of {weights.hidden}"
    if (reason := weights.reason(x.dtype)) is not None:
        return reason
    if (reason := contiguous_reason(x=x, index=index, shares=shares)) is not None:
        return reason
    if index.dtype != torch.int64:
        return "an index that is not int64"
    stacks = [one.data if isinstance(one, Quantized) else one for one in (weights.gate_up, weights.down)]
    for tensor in (index, *stacks):
        if tensor.device != x.device:
            return f"tensors on {x.device} and {tensor.device}"
    scales = [one.float_scales for one in (weights.gate_up, weights.down) if isinstance(one, Quantized)]
    many = len(x) > MOST_TOKENS
    return dtype_reason(x, shares, *scales, weights.gate_up_bias, weights.down_bias, products=many)


CLAMPED = Gating("silu", 1.702, 1.5, 1.0)


@random_cases
def _case(rand, tokens, experts, chosen, hidden, inner, gating=None, *, transposed=False, interleaved=False, bias=False,
          quantized=None, placed=False):  # fmt: skip
    """quantized: what `quantize_weight` takes besides a weight, "mxfp4", or None. placed: as `places` say."""

    def stack(outputs, inputs):
        if quantized is not None:
            full = rand(experts * outputs, inputs, spread=inputs**-0.5)
            return mxfp4_weight(full) if quantized == "mxfp4" else quantize_weight(full, *quantized)
        if transposed:
            return rand(experts, inputs, outputs, spread=inputs**-0.5).transpose(1, 2)
        return rand(experts, outputs, inputs, spread=inputs**-0.5)

    index = rand.uniform(tokens, experts).topk(chosen).indices
    shares = rand.uniform(tokens, chosen).to(rand.dtype)
    gating = gating or Gating()
    wide = inner * (1 + gating.gated)
    biases = (rand(experts, wide), rand(experts, hidden)) if bias else (None, None)
    weights = ExpertWeights(stack(wide, hidden), stack(hidden, inner), gating, interleaved, *biases)
    if placed:
        weights = weights._replace(places=index.new_zeros(experts, PLACES))
    return (rand(tokens, hidden), index, shares, weights), {}


INT8, INT4, FP8 = {"quantized": (torch.int8,)}, {"quantized": (torch.int32, 32)}, {"quantized": (torch.float8_e4m3fn,)}
MXFP4 = {"gating": CLAMPED, "interleaved": True, "bias": True, "quantized": "mxfp4"}
INT8_ZEROS = {"quantized": (torch.int8, 0, True)}
GPT_OSS = {"gating": CLAMPED, "transposed": True, "interleaved": True, "bias": True}
UNGATED = Gating("relu2", gated=False)
CASES = (
    _case("ungated", 2, 4, 2, 72, 40, UNGATED, small=True),
    _case("ungated-transposed", 1, 3, 2, 72, 40, UNGATED, transposed=True, bias=True, small=True),
    _case("ungated-int8", 2, 4, 2, 72, 40, UNGATED, small=True, **INT8),
    _case("grouped-ungated", 19, 5, 2, 72, 40, UNGATED, bias=True, small=True),
    _case("grouped-ungated-transposed", 17, 3, 2, 72, 40, Gating("gelu", gated=False), transposed=True, small=True),
    _case("grouped-ungated-int4", 18, 3, 2, 96, 64, UNGATED, small=True, **INT4),
    _case("tiny", 1, 4, 2, 64, 48, small=True),
    _case("several", 3, 5, 2, 72, 40, Gating("gelu_tanh"), small=True),
    _case("all", 2, 3, 3, 40, 56, small=True),
    _case("gpt-oss", 3, 4, 2, 72, 40, **GPT_OSS, small=True),
    _case("transposed", 2, 3, 2, 72, 40, transposed=True, small=True),
    _case("interleaved", 2, 3, 2, 72, 40, Gating(limit=0.5), interleaved=True, bias=True, small=True),
    _case("grouped", 19, 5, 2, 72, 40, small=True),
    _case("grouped-gpt-oss", 21, 4, 2, 72, 40, **GPT_OSS, small=True),
    _case("grouped-transposed", 17, 3, 1, 72, 40, Gating("gelu"), transposed=True, small=True),
    _case("grouped-interleaved", 17, 3, 2, 72, 40, Gating(limit=0.5), interleaved=True, bias=True, small=True),
    _case("grouped-few-hit", 18, 40, 1, 72, 40, small=True),
    _case("int8", 2, 4, 2, 72, 40, small=True, **INT8),
    _case("int8-zeros", 2, 3, 2, 72, 40, CLAMPED, interleaved=True, bias=True, small=True, **INT8_ZEROS),
    _case("int4", 2, 3, 2, 96, 64, small=True, **INT4),
    _case("int4-zeros", 2, 3, 2, 96, 64, CLAMPED, bias=True, small=True, quantized=(torch.int32, 32, True)),
    _case("int4-rows", 1, 3, 2, 72, 40, small=True, quantized=(torch.int32,)),
    _case("fp8", 2, 4, 2, 72, 40, small=True, **FP8),
    _case("mxfp4", 1, 3, 1, 1056, 32, small=True, **MXFP4),
    _case("grouped-int8", 19, 4, 2, 72, 40, small=True, **INT8),
    _case("grouped-int8-zeros", 17, 3, 2, 72, 40, CLAMPED, interleaved=True, bias=True, small=True, **INT8_ZEROS),
    _case("grouped-int4", 18, 3, 2, 96, 64, small=True, **INT4),
    _case("grouped-int4-zeros", 17, 3, 1, 160, 32, CLAMPED, bias=True, small=True, quantized=(torch.int32, 32, True)),
    _case("grouped-int4-rows", 17, 3, 1, 72, 40, interleaved=True, small=True, quantized=(torch.int32,)),
    _case("grouped-fp8", 17, 4, 2, 72, 40, small=True, **FP8),
    _case("grouped-mxfp4", 17, 3, 1, 160, 32, small=True, **MXFP4),
    _case("placed", 2, 4, 2, 72, 40, transposed=True, bias=True, small=True, placed=True),
    _case("placed-rows", 2, 4, 2, 72, 40, small=True, placed=True),
    _case("placed-int4", 2, 4, 2, 96, 64, small=True, placed=True, quantized=(torch.int32, 32, True)),
    _case("placed-mxfp4", 1, 3, 1, 160, 32, small=True, placed=True, **MXFP4),
    _case("grouped-placed-int4", 18, 20, 1, 96, 64, small=True, placed=True, **INT4),
    _case("grouped-64", 300, 8, 2, 512, 384),
    _case("grouped-128", 1000, 8, 2, 384, 520),
    _case("grouped-64-gpt-oss", 300, 8, 2, 520, 360, **GPT_OSS),
    _case("grouped-128-gpt-oss", 1000, 8, 2, 360, 520, **GPT_OSS),
    _case("grouped-64-int4", 300, 8, 2, 512, 384, quantized=(torch.int32, 64, True)),
    _case("grouped-128-mxfp4", 1000, 8, 2, 384, 544, **MXFP4),
    _case("mixtral", 1, 8, 2, 4096, 14336),
    _case("qwen3-moe", 4, 128, 8, 2048, 768),
    _case("gpt-oss-20b", 1, 32, 4, 2880, 2880, **GPT_OSS),
    _case("qwen3-moe-32", 32, 128, 8, 2048, 768),
    _case("qwen3-moe-128", 128, 128, 8, 2048, 768),
    _case("qwen3-moe-2048", 2048, 128, 8, 2048, 768),
    _case("mixtral-512", 512, 8, 2, 4096, 14336),
    _case("nemotron-3", 1, 128, 6, 2688, 1856, UNGATED),
    _case("nemotron-3-128", 128, 128, 6, 2688, 1856, UNGATED),
    _case("qwen3-moe-int8", 1, 128, 8, 2048, 768, **INT8),
    _case("qwen3-moe-int4", 1, 128, 8, 2048, 768, quantized=(torch.int32, 128)),
    _case("qwen3-moe-2048-int8", 2048, 128, 8, 2048, 768, **INT8),
    _case("qwen3-moe-2048-int4", 2048, 128, 8, 2048, 768, quantized=(torch.int32, 128)),
    _case("qwen3-moe-32-int8", 32, 128, 8, 2048, 768, **INT8),
    _case("qwen3-moe-32-fp8", 32, 128, 8, 2048, 768, **FP8),
    _case("qwen3-moe-32-int4", 32, 128, 8, 2048, 768, quantized=(torch.int32, 128)),
    _case("gpt-oss-20b-mxfp4", 1, 32, 4, 2880, 2880, **MXFP4),
    _case("gpt-oss-20b-512-mxfp4", 512, 32, 4, 2880, 2880, **MXFP4),
    _case("gpt-oss-20b-64", 64, 32, 4, 2880, 2880, **GPT_OSS),
    _case("gpt-oss-20b-512", 512, 32, 4, 2880, 2880, **GPT_OSS),
)  # fmt: skip

experts = make_op("experts", reference, supports, CASES)
