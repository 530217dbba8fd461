"""Every op's kernel against torch's own on one GPU: error first, then microseconds inside a CUDA graph.

    python benchmarks/kernel_times.py [OUT.json]

Prints a table and writes it as JSON, with the machine. `gb_s` counts inputs and outputs once.
"""

import json
import sys
from pathlib import Path

import torch
import triton
from accel_kernels import OPS
from accel_kernels.attention.backends import BACKENDS

from accel.bench.machine import commit, machine, now

# below, in expert_times.py, in int8_linear.py, in router_times.py and in sampling_times.py
ELSEWHERE = ("attention", "experts", "fp8_linear", "int8_linear", "quantize_rows", "route", "sample")

ATTENTION_SHAPES = {  # batch, heads, queries, keys, head dimension
    "sd15-64-self": (2, 8, 4096, 4096, 40),
    "sd15-32-self": (2, 8, 1024, 1024, 80),
    "sd15-16-self": (2, 8, 256, 256, 160),
    "sd15-8-self": (2, 8, 64, 64, 160),
    "sd15-64-cross": (2, 8, 4096, 77, 40),
    "sd15-32-cross": (2, 8, 1024, 77, 80),
    "sd15-16-cross": (2, 8, 256, 77, 160),
    "sdxl-64-self": (2, 10, 4096, 4096, 64),
    "sdxl-32-self": (2, 20, 1024, 1024, 64),
    "sdxl-32-cross": (2, 20, 1024, 77, 64),
    "vae-512": (1, 1, 4096, 4096, 512),
    "vae-1024": (1, 1, 16384, 16384, 512),
}


def tensors(values):
    return [t for t in values if isinstance(t, torch.Tensor)]


def microseconds(run) -> float:
    """Median time of one call, many calls in one CUDA graph so that launches cost nothing."""
    return 1000 * triton.testing.do_bench_cudagraph(run, rep=40, return_mode="median")


def error(result, exact) -> float:
    results, exacts = (r if isinstance(r, tuple) else (r,) for r in (result, exact))
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(results, exacts, strict=True)
        if b is not None
    )


def op_row(op, case, dtype=torch.float16) -> dict:
    args, kwargs = case.make("cuda", dtype)

    def double(value):
        return value.double() if isinstance(value, torch.Tensor) else value

    exact = op.reference(*map(double, args), **{k: double(v) for k, v in kwargs.items()})
    ours, torchs = op.triton(*args, **kwargs), op.reference(*args, **kwargs)
    row = {"op": op.name, "case": case.name, "error": error(ours, exact), "torch_error": error(torchs, exact)}
    assert row["error"] <= 2 * row["torch_error"] + 1e-6, row
    moved = tensors(args) + tensors(kwargs.values()) + tensors(ours if isinstance(ours, tuple) else (ours,))
    row["us"] = microseconds(lambda: op.triton(*args, **kwargs))
    row["torch_us"] = microseconds(lambda: op.reference(*args, **kwargs))
    row["gb_s"] = sum(t.numel() * t.element_size() for t in moved) / row["us"] / 1e3
    return row


def attention_row(name, shape) -> dict:
    batch, heads, queries, keys, dim = shape
    packed = queries == keys
    q, k, v = (
        torch.randn(batch, s, 3 if packed else 1, heads, dim, device="cuda").half()[:, :, 0].transpose(1, 2)
        for s in (queries, keys, keys)
    )
    exact = BACKENDS["sdpa"].run(q[:, :1].float(), k[:, :1].float(), v[:, :1].float(), None)
    row = {"case": name, "shape": shape}
    for backend_name, backend in BACKENDS.items():
        reason = backend.refuses(q, k, v)
        if reason is None:
            try:
                row[backend_name + "_error"] = error(backend.run(q, k, v, None)[:, :1], exact)
                row[backend_name] = microseconds(lambda run=backend.run: run(q, k, v, None))
            except RuntimeError as problem:
                reason = str(problem).splitlines()[0][:80]
        if reason is not None:
            row[backend_name + "_reason"] = reason
    return row


def main() -> None:
    rows = []
    for op in OPS:
        if op.name in ELSEWHERE:
            continue
        for case in op.cases:
            rows.append(op_row(op, case))
            r = rows[-1]
            times = f"{r['us']:8.1f} us  torch {r['torch_us']:8.1f}  {r['gb_s']:6.0f} GB/s"
            print(f"{r['op']:17s} {r['case']:16s} {times}  error {r['error']:.1e} / {r['torch_error']:.1e}", flush=True)
    attention = []
    for name, shape in ATTENTION_SHAPES.items():
        attention.append(attention_row(name, shape))
        times = {k: f"{attention[-1][k]:.1f}" for k in BACKENDS if k in attention[-1]}
        errors = {k: f"{attention[-1][k + '_error']:.0e}" for k in BACKENDS if k + "_error" in attention[-1]}
        print(name, times, errors, flush=True)
    if len(sys.argv) > 1:
        facts = {"machine": machine(torch.device("cuda")), "commit": commit(), "date": now()}
        Path(sys.argv[1]).write_text(json.dumps(facts | {"ops": rows, "attention": attention}, indent=1) + "\n")


if __name__ == "__main__":
    main()
