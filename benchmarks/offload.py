"""Whole calls of SDXL under the library's own switches for memory, stock and accel in turns: offload, 8-bit storage.

    python benchmarks/offload.py [ROW...] [--repeats 2] [--steps 10] [--dtype bfloat16] [--before] [--out FILE]

Rows: plain, model, sequential, leaf, leaf-stream, block, block-stream, casting; all of them without a name. Random
weights at the published size, 1024 px. Images are compared first. Memory is that of the whole device, above what was
taken before the pipeline was made: weights that accel maps by itself are in it, which torch's own figures leave out.
In float16 the autoencoder is cast to float32 in every call, which stock's own group offload does not survive.
"""

import argparse
import copy
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from call_pipelines import build

import accel
from accel.bench.machine import commit, machine, now
from accel.bench.memory import release
from accel.bench.timing import seconds
from accel.verification.metrics import compare

CALLS = 3  # before any is timed: addresses settle in the first, weights are pinned in the second
SLOW_S = 6.0  # of what takes so long, two are enough


def groups(kind: str, stream: bool) -> Callable:
    def enable(pipe, device):
        blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        pipe.enable_group_offload(device, offload_type=kind, use_stream=stream, **blocks)

    return enable


def casting(pipe, device):
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=pipe.unet.dtype)


ROWS: dict[str, Callable] = {
    "plain": lambda pipe, device: None,
    "model": lambda pipe, device: pipe.enable_model_cpu_offload(device=device),
    "sequential": lambda pipe, device: pipe.enable_sequential_cpu_offload(device=device),
    "leaf": groups("leaf_level", False),
    "leaf-stream": groups("leaf_level", True),
    "block": groups("block_level", False),
    "block-stream": groups("block_level", True),
    "casting": casting,
}


def used(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


@contextmanager
def peak(device: torch.device) -> Iterator[list[int]]:
    """Inside, the largest of what the device has in use, looked at every two milliseconds."""
    found, done = [used(device)], threading.Event()

    def look():
        while not done.is_set():
            found[0] = max(found[0], used(device))
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


class Variant:
    """One pipeline, and what calls of it took."""

    def __init__(self, base, given: dict, row: str, device: torch.device, steps: int, ours: bool, before: bool):
        self.given = given
        release(device)
        self.device, self.steps, self.taken = device, steps, used(device)
        self.pipe = copy.deepcopy(base)
        self.pipe.set_progress_bar_config(disable=True)
        if ours and not before:
            accel.optimize(self.pipe)
        ROWS[row](self.pipe, device)
        if ours and before:
            accel.optimize(self.pipe)
        release(device)
        self.first = [self.call()]
        self.first += [self.call() for _ in range(CALLS - 2) if self.first[0] < SLOW_S or ours]
        with peak(device) as found:
            self.first.append(self.call())
        self.peak_mb = (found[0] - self.taken) / 2**20
        self.times: list[float] = []

    def call(self) -> float:
        def draw():
            generator = torch.Generator(self.device).manual_seed(0)
            self.image = self.pipe(**self.given, num_inference_steps=self.steps, generator=generator).images[0]

        return seconds(draw, self.device)

    def figures(self) -> dict:
        found = {"s": round(statistics.median(self.times), 4), "first_s": [round(one, 3) for one in self.first]}
        return found | {"calls": len(self.times), "peak_memory_mb": round(self.peak_mb, 1)}


def measured(base, given: dict, row: str, device: torch.device, options: argparse.Namespace) -> dict:
    stock = Variant(base, given, row, device, options.steps, ours=False, before=options.before)
    ours = Variant(base, given, row, device, options.steps, ours=True, before=options.before)
    quality = compare(stock.image, ours.image)
    for _ in range(options.repeats):
        for one in (stock, ours):
            one.times.append(one.call())
    report = accel.report(ours.pipe).to_dict()
    result = {"stock": stock.figures(), "accel": ours.figures(), "psnr_db": quality.psnr_db}
    result["speedup"] = round(result["stock"]["s"] / result["accel"]["s"], 3)
    result["memory"] = round(ours.peak_mb / stock.peak_mb, 3)
    result["graphs"] = [
        {key: one[key] for key in ("path", "inputs", "status", "reason", "memory_mb")} for one in report["graphs"]
    ]
    result["fallbacks"] = report["fallbacks"][:12]
    result["offload"] = [
        {"model": type(one.model).__name__, "reason": one.reason, "visits": one.visits}
        for one in vars(ours.pipe)["enable_model_cpu_offload"].placed()
    ]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--case", default="sdxl")
    parser.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16"))
    parser.add_argument("--before", action="store_true", help="throw the switch before accel.optimize, not after")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/offload.json"))
    options = parser.parse_args()
    unknown = set(options.rows) - ROWS.keys()
    if unknown:
        parser.error(f"unknown rows {sorted(unknown)}; there are {list(ROWS)}")
    device = torch.device("cuda", 0)
    base, given = build(options.case, device, getattr(torch, options.dtype))
    about = f"{options.case}: {options.steps} steps, {options.dtype}, random weights, switch "
    about += "before accel.optimize" if options.before else "after accel.optimize"
    result = {"about": about, "date": now(), "commit": commit(), "machine": machine(device), "rows": {}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for row in options.rows:
        try:
            result["rows"][row] = measured(base, given, row, device, options)
        except Exception as error:  # the other rows are still worth their time
            result["rows"][row] = {"failed": f"{type(error).__name__}: {error}"}
        release(device)
        print(row, json.dumps(result["rows"][row]), flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
