"""Microseconds of one router inside a CUDA graph: its product and the kernel `route`, beside stock's own forward.

    python benchmarks/router_times.py [OUT.json] [--tokens 1,8,32,128,512,2048]

Routers of transformers at published sizes in bf16, with random weights; what they choose is compared first, but where
rounding makes scores equal.
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from accel_kernels.attention.backends import AttentionChooser
from accel_kernels.gemm.linear import torch_linear
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from accel.bench.machine import commit, machine, now
from accel.llm.analysis.router import INDEX, router_formulas
from accel.llm.runtime.router import RouterForward
from accel.patching.fast_forward import Kernels
from accel.patching.ledger import Ledger

GROUPED: dict[str, Any] = {
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "num_local_experts": 256
}  # fmt: skip
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        Qwen3MoeTopKRouter,
        {"hidden_size": 2048, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "gpt-oss-20b": (GptOssTopKRouter, {"hidden_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4}),
    "deepseek-v3": (DeepseekV3TopkRouter, {"hidden_size": 7168, "num_experts_per_tok": 8, **GROUPED}),
}


def microseconds(run) -> float:
    """Median time of one call, many calls in one CUDA graph."""
    return 1000 * triton.testing.do_bench_cudagraph(run, rep=40, return_mode="median")


def rows_of(name: str, tokens: list[int]) -> list[dict]:
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    router = kind(SimpleNamespace(n_routed_experts=GROUPED["num_local_experts"], **sizes)).eval()
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, std=sizes["hidden_size"] ** -0.5)
    router = router.to("cuda", torch.bfloat16)
    formulas = router_formulas(router)
    if isinstance(formulas, str):
        raise SystemExit(f"{name}: {formulas}")
    fused = RouterForward(router, "", Kernels(AttentionChooser("sdpa"), torch_linear), Ledger(), formulas)
    found = []
    for count in tokens:
        x = torch.randn(count, sizes["hidden_size"], device="cuda", dtype=torch.bfloat16)
        formula = fused.formula(x)
        if formula is None or (reason := fused.unfit(x)) is not None:
            raise SystemExit(f"{name}: {reason if formula else 'another dtype'}")
        place = formula.outputs.index(INDEX)
        same = fused.fast(x)[place].sort().values == router(x)[place].sort().values
        row = {"model": name, "tokens": count, "same": float(same.all(1).float().mean())}
        row["us"], row["stock_us"] = microseconds(lambda x=x: fused.fast(x)), microseconds(lambda x=x: router(x))
        found.append(row)
        told = f"{row['us']:.1f} us, stock {row['stock_us']:.1f}"
        print(f"{name} {count:5d} tokens: {told}, {row['same']:.1%} choose the same", flush=True)
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?")
    parser.add_argument("--tokens", default="1,8,32,128,512,2048")
    given = parser.parse_args()
    rows = [row for name in MODELS for row in rows_of(name, list(map(int, given.tokens.split(","))))]
    if given.out:
        facts = {"machine": machine(torch.device("cuda")), "commit": commit(), "date": now()}
        Path(given.out).write_text(json.dumps(facts | {"routers": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
