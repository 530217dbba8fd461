"""Microseconds of row programs inside a CUDA graph, beside torch operation by operation and the time of their bytes.

    python benchmarks/rowwise_times.py [OUT.json] [--only flux,wan]

The large cases of `accel_kernels.rowwise` in bf16: what diffusion transformers compute between two products, at
published sizes. A graph goes through copies of the tensors that are larger together than the GPU's cache. The limit is
what is read and written once, at 4.2 TB/s. Results are compared with the reference first.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from accel_kernels import Case, rowwise

from accel.bench.machine import commit, machine, now

BANDWIDTH = 4.2e12  # bytes a second that an H200 was seen to read and write
CACHE = 200e6  # bytes of copies that one graph goes through, at least
OFF = 0.02  # of the largest number: three roundings of bf16


def moved(inputs: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...]) -> int:
    """Bytes that are read and written once; tables that are broadcast count as they are."""
    return sum(one.numel() * one.element_size() for one in (*inputs, *results))


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Median time of one call, of several in turn in one CUDA graph."""
    whole = triton.testing.do_bench_cudagraph(lambda: [call() for call in calls], rep=20, return_mode="median")
    return 1000 * whole / len(calls)


def measured(case: Case) -> dict:
    device, dtype = torch.device("cuda"), torch.bfloat16
    args, more = case.make(device, dtype)
    reason = rowwise.supports(*args, **more)
    if reason is not None:
        raise SystemExit(f"{case.name}: {reason}")
    theirs = [one.clone() for one in rowwise.reference(*args, **more)]
    start = time.perf_counter()
    mine = rowwise.triton(*args, **more)
    torch.cuda.synchronize()
    row: dict = {"case": case.name, "first_call_s": time.perf_counter() - start}
    off = [
        float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in zip(mine, theirs, strict=True)
    ]
    same = [float((a == b).float().mean()) for a, b in zip(mine, theirs, strict=True)]
    row |= {"largest_difference": max(off), "same_to_the_bit": min(same)}
    if not max(off) < OFF:
        raise SystemExit(f"{case.name}: off by {max(off):.1e} of the largest number")
    count = moved(args, mine)
    calls = [copy.deepcopy((args, more)) for _ in range(math.ceil(CACHE / count) + 1)]
    row["limit_us"] = 1e6 * count / BANDWIDTH
    row["us"] = microseconds([lambda a=a, m=m: rowwise.triton(*a, **m) for a, m in calls])
    row["torch_us"] = microseconds([lambda a=a, m=m: rowwise.reference(*a, **m) for a, m in calls])
    row["of_limit"] = row["limit_us"] / row["us"]
    return row


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?")
    parser.add_argument("--only", default="", help="beginnings of names, with commas between")
    given = parser.parse_args()
    rows = []
    for case in rowwise.cases:
        if case.small or not case.name.startswith(tuple(given.only.split(","))):
            continue
        row = measured(case)
        rows.append(row)
        print(
            f"{row['case']:20s} {row['us']:7.1f} us, limit {row['limit_us']:6.1f} ({row['of_limit']:.0%}), "
            f"torch {row['torch_us']:7.1f}, equal {row['same_to_the_bit']:.2%}, first call {row['first_call_s']:.2f} s",
            flush=True,
        )
        torch.cuda.empty_cache()
    if given.out:
        facts = {"machine": machine(torch.device("cuda")), "commit": commit(), "date": now()}
        Path(given.out).write_text(json.dumps(facts | {"programs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
