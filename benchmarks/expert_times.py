"""Microseconds of the experts of one layer inside a CUDA graph: every way to multiply them, beside stock's.

    python benchmarks/expert_times.py [OUT.json] [--models qwen3-30b-a3b,olmoe-7b] [--tokens 1,32,2048] [--wide]
                                      [--numbers int8]

Experts of published sizes in bf16, tokens that choose at random. `limit_us`: the weights of the experts that were
chosen, read once at 4.2 TB/s, or the products at 700 TFLOP/s, whichever takes longer. --wide tries tiles beyond the
named ones. --numbers has the weights rounded to int8, int4 (by 128 inputs) or fp8; stock then has what these stand for.
"written 128" writes these out in bf16 in every call, and multiplies by the tile of 128 rows then.
A way that disagrees with stock, or does not fit the card, is told and not timed.
"""

import argparse
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from accel_kernels.gemm.quantized_weight import quantize_weight
from accel_kernels.moe.chooser import likely_way
from accel_kernels.moe.experts import experts
from accel_kernels.moe.tiles import DEQUANTIZED, GEMV, TILES, Tile
from accel_kernels.moe.weights import ExpertWeights, Gating
from transformers.integrations.moe import grouped_mm_experts_forward

from accel.bench.machine import commit, machine, now

GPT_OSS = {"gating": Gating("silu", 1.702, 7.0, 1.0), "transposed": True}
MODELS = {  # experts, of which a token takes, hidden and inner channels
    "qwen3-30b-a3b": (128, 8, 2048, 768, {}),
    "mixtral-8x7b": (8, 2, 4096, 14336, {}),
    "olmoe-7b": (64, 8, 2048, 1024, {}),
    "gpt-oss-20b": (32, 4, 2880, 2880, GPT_OSS),
    "deepseek-v3": (256, 8, 7168, 2048, {}),
}
TOKENS = (1, 2, 4, 8, 16, 17, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BYTES, FLOPS = 4.2e12, 700e12
WIDE = {  # by what they are
    "x".join(map(str, sizes)): Tile(*sizes)
    for sizes in itertools.chain(
        itertools.product((16, 32), (32, 64), (64, 128), (64, 128), (4,), (3, 4, 5)),
        itertools.product((64,), (32, 64), (64, 128), (64, 128), (4, 8), (3, 4)),
        itertools.product((128,), (64, 128), (128, 256), (64,), (4, 8), (3, 4)),
    )
}


NUMBERS = {"int8": (torch.int8, 0), "int4": (torch.int32, 128), "fp8": (torch.float8_e4m3fn, 0)}


def rounded(weights: ExpertWeights, number: str) -> tuple[ExpertWeights, ExpertWeights]:
    """The weights in fewer bits, and in bf16 what these stand for."""
    up, down = (quantize_weight(stack.contiguous().flatten(0, 1), *NUMBERS[number]) for stack in weights[:2])
    shapes = [stack.shape for stack in weights[:2]]
    wide = (one.dequantized(torch.bfloat16).view(shape) for one, shape in zip((up, down), shapes, strict=True))
    return weights._replace(gate_up=up, down=down), ExpertWeights(*wide, *weights[2:])


def weights_of(many: int, hidden: int, inner: int, gating: Gating, transposed: bool) -> ExpertWeights:
    def rand(*size, spread=1.0):
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * spread

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


def microseconds(run) -> float | None:
    """Median time of one call in a CUDA graph; None where none can hold it."""
    try:
        return 1000 * triton.testing.do_bench_cudagraph(run, rep=40, return_mode="median")
    except RuntimeError:
        torch.cuda.synchronize()
        return None


def rows_of(name: str, tokens: tuple[int, ...], wide: bool, number: str | None = None) -> list[dict]:
    many, chosen, hidden, inner, more = MODELS[name]
    transposed = more.get("transposed", False)
    weights = weights_of(many, hidden, inner, more.get("gating", Gating()), transposed)
    bytes_each = 2.0
    if number is not None:
        weights, stands_for = rounded(weights, number)
        stock, transposed = stock_experts(stands_for, False, bool(more)), False
        bytes_each = sum(one.nbytes for one in weights[:2]) / (many * 3 * hidden * inner)
    else:
        stock = stock_experts(weights, transposed, bool(more))
    found: list[dict] = []
    for count in tokens:
        x = torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16)
        index = torch.rand(count, many, device="cuda").topk(chosen).indices
        shares = torch.full((count, chosen), 1 / chosen, device="cuda", dtype=torch.bfloat16)
        wanted = grouped_mm_experts_forward(stock, x, index, shares)
        hit = int(index.unique().numel())
        read, products = hit * 3 * hidden * inner * bytes_each / BYTES, count * chosen * 6 * hidden * inner / FLOPS
        row: dict = {
            "model": name,
            "numbers": number,
            "tokens": count,
            "hit": hit,
            "limit_us": 1e6 * max(read, products),
            "ways": {},
        }
        row["stock_us"] = microseconds(lambda x=x, i=index, s=shares: grouped_mm_experts_forward(stock, x, i, s))
        names = (*([GEMV] if count <= 64 else []), *TILES, *(() if number is None else DEQUANTIZED))
        ways = {way: way for way in names} | (WIDE if wide else {})
        for way, tile in ways.items():
            run = lambda x=x, i=index, s=shares, tile=tile: experts.triton(x, i, s, weights, tile=tile)  # noqa: E731
            try:
                off = float((run() - wanted).abs().max() / wanted.abs().max())
            except Exception as error:  # more shared memory or registers than the card has
                row["ways"][way] = f"{type(error).__name__}: {error}"[:80]
                continue
            row["ways"][way] = microseconds(run) if off < 0.03 else f"off by {off:.1e}"
        timed = {way: us for way, us in row["ways"].items() if isinstance(us, float)}
        row["likely"] = likely_way(count, chosen, many, 2 if number is None else 1)
        row["best"] = min(timed, key=timed.__getitem__, default=None)
        found.append(row)
        told = ", ".join(f"{way} {us:.1f}" for way, us in sorted(timed.items(), key=lambda one: one[1])[:6])
        odd = {way: why for way, why in row["ways"].items() if isinstance(why, str)}
        before = f"limit {row['limit_us']:.1f}, stock {row['stock_us']}, likely {row['likely']}"
        print(f"{name} {count:5d} tokens: {before}; {told}{f'; {odd}' if odd else ''}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--numbers", choices=NUMBERS)
    given = parser.parse_args()
    tokens = tuple(map(int, given.tokens.split(",")))
    rows: list[dict] = []
    for name in given.models.split(","):
        rows += rows_of(name, tokens, given.wide, given.numbers)
        torch.cuda.empty_cache()
        if given.out:  # what there is, should the next one not fit
            facts = {"machine": machine(torch.device("cuda")), "commit": commit(), "date": now()}
            Path(given.out).write_text(json.dumps(facts | {"experts": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
