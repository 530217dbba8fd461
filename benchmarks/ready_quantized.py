"""How long `accel.optimize` takes to quantize a language model, in fresh processes, and what takes the time.

    python benchmarks/ready_quantized.py OUT.json [--model llama-8b] [--ways none int8 int4] [--states cold warm]

Random weights made on the device, the originals kept. Each way is measured with empty caches of compiled kernels
(cold), then with those it left (warm). ready_s: the call of `accel.optimize` and the first generate(), which is what a
user waits for; parts: seconds of the call's stages on the host, `copies_s` the wait for originals that are still on
their way to the CPU; first_touch: GB/s at which this machine gives memory that nobody used before, and the same again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

import accel
from accel.bench.llm.configs import CONFIGS
from accel.bench.llm.models import build, prompt
from accel.bench.machine import commit, machine, now
from accel.bench.ready import CACHES
from accel.bench.timing import seconds
from accel.llm import family
from accel.llm.ptq.formats.prequantized_import import PrequantizedImport
from accel.llm.ptq.model import LanguageModelQuantization
from accel.quantization.parking import Parking

NEW, TOKENS = 16, 128
STAGES = {
    "arrival_s": (PrequantizedImport, "__init__"),
    "understanding_s": (family, "_understand"),
    "choosing_s": (LanguageModelQuantization, "__init__"),
    "quantizing_s": (LanguageModelQuantization, "run"),
    "copies_s": (Parking, "__exit__"),  # part of quantizing_s
    "binding_s": (family, "_bind"),
}


@contextmanager
def timed(parts: dict[str, float]):
    """Inside, seconds of each stage are added up."""

    def wrapped(name, function):
        def inner(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                parts[name] = round(parts.get(name, 0.0) + time.perf_counter() - start, 3)

        return inner

    patches = [mock.patch.object(o, n, wrapped(name, getattr(o, n))) for name, (o, n) in STAGES.items()]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


@torch.no_grad()
def measure(name: str, way: str, device: torch.device) -> dict:
    """One way in this process."""
    start = time.perf_counter()
    model = build(name, device, torch.bfloat16)
    inputs, built = prompt(model, 1, TOKENS), time.perf_counter() - start
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    options = {} if way == "none" else {"weights": way}
    parts: dict[str, float] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with timed(parts):
        taken = seconds(lambda: accel.optimize(model, **options), device)
    row = {"way": way, "optimize_s": round(taken, 3), "parts": parts}
    if device.type == "cuda":
        row |= {"mb_before": before >> 20, "mb_after": torch.cuda.memory_allocated() >> 20}
        row["peak_mb"] = torch.cuda.max_memory_allocated() >> 20
    first, second = (
        seconds(lambda: model.generate(**inputs, max_new_tokens=NEW, do_sample=False), device) for _ in range(2)
    )
    row |= {"first_call_s": round(first, 3), "second_call_s": round(second, 3), "ready_s": round(taken + first, 3)}
    row["quantized"] = len(accel.report(model).weights)
    row["fallbacks"] = len(accel.report(model).fallbacks)
    row["restore_s"] = round(seconds(lambda: accel.restore(model), device), 3)
    return row | {"build_s": round(built, 1)}


def touch(gigabytes: int) -> dict[str, float]:
    """GB/s of writing memory that is new to this process, by all threads; twice, since a machine may grow by it."""
    rates = {}
    for name in ("first", "again"):
        memory = torch.empty(gigabytes << 30, dtype=torch.uint8)
        start = time.perf_counter()
        memory.fill_(1)
        rates[name] = round(gigabytes * 1.073741824 / (time.perf_counter() - start), 2)
        del memory
    return rates


def fresh(given: argparse.Namespace, way: str, caches: Path) -> dict:
    """`measure` in a process of its own, with its caches there."""
    environment = os.environ | {name: str(caches / name.lower()) for name in CACHES}
    command = [sys.executable, __file__, "--measure", way, "--model", given.model, "-"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=given.seconds)
    if done.returncode:
        raise RuntimeError(f"{way} failed with {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(given: argparse.Namespace) -> dict:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "case": f"ready-quantized-{given.model}",
        "about": f"accel.optimize(weights=...) of {given.model} in fresh processes, random weights",
        "date": now(),
        "commit": commit(),
        "machine": machine(device),
        "dtype": "bfloat16",
        "first_touch_gb_s": touch(given.touch) if given.touch else None,
        "rows": [],
    }
    with tempfile.TemporaryDirectory(prefix="accel-ready-") as folder:
        for way in given.ways:
            for state in given.states:
                row = {"state": state} | fresh(given, way, Path(folder) / way)
                result["rows"].append(row)
                print(row, flush=True)
                Path(given.out).write_text(json.dumps(result, indent=2) + "\n")
    return result


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--model", default="llama-8b", choices=list(CONFIGS))
    parser.add_argument("--ways", nargs="+", default=["none", "int8", "int4"], help="values of weights=, or none")
    parser.add_argument("--states", nargs="+", default=["cold", "warm"], choices=["cold", "warm"])
    parser.add_argument("--touch", type=int, default=4, help="GB of the memory touched first; 0 for not")
    parser.add_argument("--seconds", type=float, default=200.0, help="that one process may take")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args(given)


if __name__ == "__main__":
    chosen = arguments()
    if chosen.measure:
        on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        print(json.dumps(measure(chosen.model, chosen.measure, on)))
    else:
        main(chosen)
