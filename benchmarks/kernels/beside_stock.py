"""Kernels beside what transformers runs in their place: routers of mixtures, and drawing the next token.

Routers: the product and the kernel `route` beside stock's own forward, at published sizes in bf16, both in a CUDA
graph; `same`: the share of tokens whose choice is stock's. Drawing: `sample` in a CUDA graph, beside transformers'
processors and torch.multinomial launched one by one; logits in bf16 of a vocabulary of 128256. `gb_s` counts the
logits once.
"""

import statistics
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accel_kernels import SamplingTable, sample
from accel_kernels.attention.backends import AttentionChooser
from accel_kernels.gemm.linear import torch_linear
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from accel.bench.timing import burst
from accel.llm.moe.router import RouterForward
from accel.llm.moe.router_formula import INDEX, router_formulas
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import Kernels
from benchmarks.kernels.timer import time_us, times_us
from benchmarks.study import DEVICE, TOY, Study, numbers

GROUPED: dict[str, Any] = {
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "num_local_experts": 256
}  # fmt: skip
ROUTERS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        Qwen3MoeTopKRouter,
        {"hidden_size": 2048, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "gpt-oss-20b": (GptOssTopKRouter, {"hidden_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4}),
    "deepseek-v3": (DeepseekV3TopkRouter, {"hidden_size": 7168, "num_experts_per_tok": 8, **GROUPED}),
}
VOCABULARY = 512 if TOY else 128256
SETTINGS = {  # temperature, top_k, top_p
    "greedy": (0.0, 0, 1.0),
    "temperature": (0.7, 0, 1.0),
    "top-k 50": (0.7, 50, 1.0),
    "top-k 50, top-p 0.9": (0.7, 50, 0.9),
    "top-p 0.9": (0.7, 0, 0.9),
    "top-p 0.95, flat": (3.0, 0, 0.95),  # most of the vocabulary is kept: the longest list of candidates
    "top-k 1000": (1.0, 1000, 1.0),
}


def router_row(name: str, tokens: int) -> dict:
    """Raises ValueError where the router is not understood."""
    kind, sizes = ROUTERS[name]
    torch.manual_seed(0)
    router = kind(SimpleNamespace(n_routed_experts=GROUPED["num_local_experts"], **sizes)).eval()
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, std=sizes["hidden_size"] ** -0.5)
    router = router.to(DEVICE, torch.bfloat16)
    formulas = router_formulas(router)
    if isinstance(formulas, str):
        raise ValueError(formulas)
    fused = RouterForward(router, "", Kernels(AttentionChooser("sdpa"), torch_linear), FallbackLog(), formulas)
    x = torch.randn(tokens, sizes["hidden_size"], device=DEVICE, dtype=torch.bfloat16)
    formula = fused.formula(x)
    if formula is None or (reason := fused.unfit(x)) is not None:
        raise ValueError(reason if formula else "another dtype")
    place = formula.outputs.index(INDEX)
    same = fused.fast(x)[place].sort().values == router(x)[place].sort().values
    times = times_us({"us": partial(fused.fast, x), "stock_us": partial(router, x)})
    return {"same": float(same.all(1).float().mean())} | times


def table_of(rows: int, temperature: float, top_k: int, top_p: float) -> SamplingTable:
    def column(value, dtype=torch.float32):
        return torch.full((rows,), value, device=DEVICE, dtype=dtype)

    zeros = column(0, torch.int64)
    return SamplingTable(
        column(temperature), column(top_k, torch.int32), column(top_p), column(0.0), column(1.0),
        torch.arange(rows, device=DEVICE), zeros, column(0, torch.int32),
    )  # fmt: skip


def stock(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """What stock's continuous batching runs for the same settings."""
    scores = logits.float()
    if temperature == 0.0:
        return scores.argmax(-1)
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p))
    return torch.multinomial(chain(None, scores).softmax(-1), 1)


def drawing_row(settings: tuple[float, int, float], rows: int) -> dict:
    logits = torch.randn(rows, VOCABULARY, device=DEVICE).mul(3).bfloat16()
    filters = settings[1] > 0 or settings[2] < 1.0
    told = {"filters": filters, "nucleus": filters and not settings[1]}
    us = time_us(partial(sample, logits, table_of(rows, *settings), torch.arange(rows, device=DEVICE), **told))
    theirs = 1e3 * statistics.median(burst(lambda _: stock(logits, *settings), 3 if TOY else 100, DEVICE))
    return {"us": us, "torch_us": round(theirs, 3), "gb_s": logits.nbytes / us / 1e3}


def main(out: Path, tokens: str = "1,8,32,128,512,2048", rows: str = "1,8,64,512") -> None:
    """tokens: of routers. rows: to draw for."""
    record = Study("beside-stock", out, "routers and drawing, beside transformers' own", routers=[], sampling=[])
    for name in ROUTERS:
        for count in numbers(tokens):
            with record.attempt(model=name, tokens=count):
                record.add("routers", {"model": name, "tokens": count} | router_row(name, count))
    for name, settings in SETTINGS.items():
        for count in numbers(rows):
            record.add("sampling", {"settings": name, "rows": count} | drawing_row(settings, count))
