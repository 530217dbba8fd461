"""Microseconds of `sample` inside a CUDA graph, beside what transformers' processors and torch.multinomial take.

    python benchmarks/sampling_times.py [OUT.json]

Settings and numbers of rows that engines meet, logits in bf16 of a vocabulary of 128256.
`gb_s` counts the logits once.
"""

import json
import sys
from pathlib import Path

import torch
import triton
from accel_kernels import SamplingTable, sample
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from accel.bench.machine import commit, machine, now

VOCABULARY = 128256
SETTINGS = {  # temperature, top_k, top_p
    "greedy": (0.0, 0, 1.0),
    "temperature": (0.7, 0, 1.0),
    "top-k 50": (0.7, 50, 1.0),
    "top-k 50, top-p 0.9": (0.7, 50, 0.9),
    "top-p 0.9": (0.7, 0, 0.9),
    "top-p 0.95, flat": (3.0, 0, 0.95),  # most of the vocabulary is kept: the longest list of candidates
    "top-k 1000": (1.0, 1000, 1.0),
}


def microseconds(run) -> float:
    """Median time of one call, many calls in one CUDA graph so that launches cost nothing."""
    return 1000 * triton.testing.do_bench_cudagraph(run, rep=40, return_mode="median")


def table_of(rows: int, temperature: float, top_k: int, top_p: float) -> SamplingTable:
    def column(value, dtype=torch.float32):
        return torch.full((rows,), value, device="cuda", dtype=dtype)

    zeros = column(0, torch.int64)
    return SamplingTable(
        column(temperature), column(top_k, torch.int32), column(top_p), column(0.0), column(1.0),
        torch.arange(rows, device="cuda"), zeros, column(0, torch.int32),
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


def main() -> None:
    found = []
    for name, settings in SETTINGS.items():
        for rows in (1, 8, 64, 512):
            logits = torch.randn(rows, VOCABULARY, device="cuda").mul(3).bfloat16()
            table, at = table_of(rows, *settings), torch.arange(rows, device="cuda")
            filters = settings[1] > 0 or settings[2] < 1.0
            told = {"filters": filters, "nucleus": filters and not settings[1]}
            ours = microseconds(lambda t=logits, s=table, r=at, k=told: sample(t, s, r, **k))
            theirs = triton.testing.do_bench(lambda t=logits, s=settings: stock(t, *s), rep=40, return_mode="median")
            moved = logits.numel() * logits.element_size()
            found.append(
                {"settings": name, "rows": rows, "us": ours, "torch_us": 1000 * theirs, "gb_s": moved / ours / 1e3}
            )
            print(f"{name:20s} {rows:4d} rows {ours:8.1f} us  torch {1000 * theirs:9.1f} us", flush=True)
    if len(sys.argv) > 1:
        facts = {"machine": machine(torch.device("cuda")), "commit": commit(), "date": now()}
        Path(sys.argv[1]).write_text(json.dumps(facts | {"sampling": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
