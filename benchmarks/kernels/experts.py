"""Experts of one layer in a CUDA graph: every way to multiply them, beside stock's grouped product.

Experts of published sizes in bf16, tokens that choose at random. `limit_us`: the weights of the experts that were
chosen, read once at 4.2 TB/s, or the products at 700 TFLOP/s, whichever takes longer. "written 128" writes weights in
fewer bits out in bf16 in every call, and multiplies by the tile of 128 rows then. A way that disagrees with stock, or
does not fit the card, is told and not timed.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from accel_kernels.gemm.quantized_weight import mxfp4_weight, quantize_weight
from accel_kernels.moe.chooser import likely_way
from accel_kernels.moe.experts import experts
from accel_kernels.moe.tiles import DEQUANTIZED, GEMV, TILES
from accel_kernels.moe.weights import ExpertWeights, Gating
from transformers.integrations.moe import grouped_mm_experts_forward

from benchmarks.kernels.timer import rand, times_us
from benchmarks.study import DEVICE, TOY, Study, numbers, words

GATING = Gating()
GPT_OSS = {"gating": Gating("silu", 1.702, 7.0, 1.0), "transposed": True}
MODELS = {  # experts, of which a token takes, hidden and inner channels
    "qwen3-30b-a3b": (128, 8, 2048, 768, {}),
    "mixtral-8x7b": (8, 2, 4096, 14336, {}),
    "olmoe-7b": (64, 8, 2048, 1024, {}),
    "gpt-oss-20b": (32, 4, 2880, 2880, GPT_OSS),
    "deepseek-v3": (256, 8, 7168, 2048, {}),
    "toy": (4, 2, 64, 48, {}),
}
BYTES, FLOPS = 4.2e12, 700e12
OFF = 0.03  # of the largest number
NUMBERS = {
    "int8": partial(quantize_weight, dtype=torch.int8),
    "int4": partial(quantize_weight, dtype=torch.int32, group=128),
    "fp8": partial(quantize_weight, dtype=torch.float8_e4m3fn),
    "mxfp4": mxfp4_weight,
}


def rounded(weights: ExpertWeights, number: str) -> tuple[ExpertWeights, ExpertWeights]:
    """The weights in fewer bits, and in bf16 what these stand for."""
    up, down = (NUMBERS[number](stack.contiguous().flatten(0, 1)) for stack in weights[:2])
    shapes = [stack.shape for stack in weights[:2]]
    wide = (one.dequantized(torch.bfloat16).view(shape) for one, shape in zip((up, down), shapes, strict=True))
    return weights._replace(gate_up=up, down=down), ExpertWeights(*wide, *weights[2:])


def weights_of(many: int, hidden: int, inner: int, gating: Gating = GATING, transposed: bool = False) -> ExpertWeights:
    if not transposed:
        up, down = rand(many, 2 * inner, hidden, spread=hidden**-0.5), rand(many, hidden, inner, spread=inner**-0.5)
        return ExpertWeights(up, down, gating)
    up, down = rand(many, hidden, 2 * inner, spread=hidden**-0.5), rand(many, inner, hidden, spread=inner**-0.5)
    biases = rand(many, 2 * inner), rand(many, hidden)
    return ExpertWeights(up.transpose(1, 2), down.transpose(1, 2), gating, True, *biases)


def stock_experts(weights: ExpertWeights, transposed: bool, biased: bool) -> SimpleNamespace:
    """What transformers' own function reads of a module."""
    up, down = (stack.transpose(1, 2) if transposed else stack for stack in (weights.gate_up, weights.down))
    return SimpleNamespace(
        num_experts=weights.experts, gate_up_proj=up, down_proj=down, gate_up_proj_bias=weights.gate_up_bias,
        down_proj_bias=weights.down_bias, has_gate=True, has_bias=biased, has_post_expert_norm=False,
        is_transposed=transposed, is_concatenated=not weights.interleaved, _is_expert_parallel=False,
        _apply_gate=lambda y: weights.gating(*weights.split(y)),
    )  # fmt: skip


class Layer:
    """Experts of one model, as ours and as stock has them. number: of what the weights are rounded to, or ""."""

    def __init__(self, name: str, number: str):
        self.many, self.chosen, self.hidden, self.inner, more = MODELS[name]
        transposed, self.number = more.get("transposed", False), number
        self.weights, stands_for = weights_of(self.many, self.hidden, self.inner, **more), None
        self.bytes_each = 2.0
        if number:
            self.weights, stands_for = rounded(self.weights, number)
            each = sum(one.nbytes for one in self.weights[:2])
            self.bytes_each, transposed = each / (self.many * 3 * self.hidden * self.inner), False
        self.stock = stock_experts(stands_for or self.weights, transposed, bool(more))

    def row(self, count: int) -> dict:
        x = torch.randn(count, self.hidden, device=DEVICE, dtype=torch.bfloat16)
        index = torch.rand(count, self.many, device=DEVICE).topk(self.chosen).indices
        given = x, index, torch.full((count, self.chosen), 1 / self.chosen, device=DEVICE, dtype=torch.bfloat16)
        stock = partial(grouped_mm_experts_forward, self.stock, *given)
        wanted, hit, each = stock(), int(index.unique().numel()), self.hidden * self.inner
        read, products = hit * 3 * each * self.bytes_each / BYTES, count * self.chosen * 6 * each / FLOPS
        names = (*([GEMV] if count <= 64 else []), *TILES, *(DEQUANTIZED if self.number else ()))
        failed: dict[str, str] = {}
        runs = {"stock": stock}
        for way in names:
            run = partial(experts.triton, *given, self.weights, tile=way)
            try:
                off = float((run() - wanted).abs().max() / wanted.abs().max())
            except Exception as error:  # more shared memory or registers than the card has
                failed[way] = f"{type(error).__name__}: {error}"[:80]
                continue
            if off < OFF:
                runs[way] = run
            else:
                failed[way] = f"off by {off:.1e}"
        us = times_us(runs, lambda way, error: failed.update({way: str(error)[:80]}))
        row = {"tokens": count, "hit": hit, "limit_us": 1e6 * max(read, products), "stock_us": us.pop("stock", None)}
        row |= {"ways": us | failed, "likely": likely_way(count, self.chosen, self.many, 1 if self.number else 2)}
        return row | {"best": min(us, key=us.__getitem__, default=None)}


def main(
    out: Path, models: str = "", tokens: str = "1,2,4,8,16,17,32,64,128,256,512,1024,2048,4096",
    number: str = "",
):  # fmt: skip
    """number: int8, int4 (by 128 inputs) or fp8, which weights are rounded to."""
    record = Study("experts", out, "experts of one layer, microseconds", experts=[])
    for name in words(models) or (["toy"] if TOY else [one for one in MODELS if one != "toy"]):
        layer = Layer(name, number)
        for count in numbers(tokens)[: 2 if TOY else None]:
            record.add("experts", {"model": name, "number": number or None} | layer.row(count))
        del layer
        if not TOY:
            torch.cuda.empty_cache()
