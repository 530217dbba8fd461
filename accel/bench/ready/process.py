"""One state of one model, measured in a process of its own.

Run as `python -m accel.bench.ready.process NAME STATE DEVICE DTYPE [--profile]`. It prints a line of JSON.
"""

import argparse
import cProfile
import io
import json
import os
import pstats
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import torch

import accel
from accel.bench.ready.names import ANSWER, BATCH, REQUESTS, NamedModel, rules_of
from accel.bench.ready.parts import PartTimes
from accel.bench.timing import seconds

LATER = 3


def measure(name: str, state: str, device: torch.device, dtype: torch.dtype, profile: bool = False) -> dict[str, Any]:
    """A row: what `accel.optimize`, the first call (by part) and later calls take. state: "stock", or of accel."""
    asked = NamedModel(*name.partition("+")[::2])
    begun = time.perf_counter()
    model, call = asked.build(device, dtype)
    row: dict[str, Any] = {"name": name, "state": state, "built_s": round(time.perf_counter() - begun, 1)}
    parts, first, fast = PartTimes(), 0.0, state != "stock"
    with torch.no_grad(), _profiled(profile, row):
        if fast:
            rules = rules_of(model)
            row["imports_s"] = round(seconds(lambda: (accel.optimize, import_module(rules)), device), 3)
            parts.watch()
            row["optimize_s"] = round(seconds(lambda: accel.optimize(model, **asked.options), device), 3)
            first = row["imports_s"] + row["optimize_s"]
            row["parts_of_optimize"] = parts.told(row["optimize_s"])
            parts.seconds = {}
        took = seconds(call, device)
        row["first_call_s"], row["ready_s"] = round(took, 3), round(first + took, 3)
        row["parts_of_first_call"] = parts.told(took)
    with torch.no_grad():
        later = [round(seconds(call, device), 4) for _ in range(LATER)]
    row["later_calls_s"] = later
    if asked.way == BATCH:
        row["tokens_per_s"] = [round(REQUESTS * ANSWER / one) for one in (took, *later)]
    if fast:
        row["fallbacks"] = len(accel.report(model).fallbacks)
        with suppress(ImportError):
            if device.type == "cuda":
                compilers = import_module("accel_kernels.compiling.compilers_triton").compilers_of(os.getpid())
                row["kernels"] = {"compiled_beside": compilers.compiled, "at_once": compilers.most}
    return row


@contextmanager
def _profiled(wanted: bool, row: dict) -> Iterator[None]:
    if not wanted:
        yield
        return
    with cProfile.Profile() as profile:
        yield
    for order in ("cumulative", "tottime"):
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats(order).print_stats(70)
        row[f"profile_{order}"] = text.getvalue().splitlines()


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("name", "state", "device", "dtype"):
        parser.add_argument(name)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args(words)
    where = torch.device(given.device), getattr(torch, given.dtype)
    print(json.dumps(measure(given.name, given.state, *where, given.profile)))


if __name__ == "__main__":
    main(sys.argv[1:])
