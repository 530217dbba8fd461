"""Time to ready, cold and warm, by part: `accel.optimize` and a first call, in fresh processes.

    python benchmarks/ready.py OUT.json qwen3-0.6b llama-8b llama-8b+int4 llama-8b+batch sd15 [--states cold warm stock]

A name is a language model's or a case's of `accel bench`; behind a plus stand weights=, or `batch` for the first three
calls of generate_batch. Random weights are made on the device, which does not count. Each is measured with empty caches
(cold), with those it left (warm), and stock. ready_s: optimize and the first call; over_stock_s: without what stock's
own first call took. parts: seconds of the calling thread, each without those that it encloses; other_s is the rest.
kernels: how many were compiled in other processes, and how many of those at once. --profile: the slowest functions.
"""

import argparse
import cProfile
import io
import json
import os
import pstats
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial, wraps
from importlib import import_module
from pathlib import Path

import torch

import accel
from accel.bench.cases import CASES
from accel.bench.llm.configs import CONFIGS
from accel.bench.machine import commit, machine, now
from accel.bench.ready import CACHES
from accel.bench.timing import seconds

NEW, TOKENS, LATER = 16, 128, 3
REQUESTS, ANSWER = 128, 64
# Functions by what they do, "module:function" each.
PARTS = {
    "analysis": ["accel.llm.analysis.analyze:analyze"],
    "self_test": ["accel.llm.generation.self_test:find_convention"],
    "relied": ["accel.llm.generation.surroundings:relied_on"],
    "quantize": ["accel.llm.ptq.model:LanguageModelQuantization.__init__"],
    "dry_runs": [
        "accel.llm.generation.trial_warmup:_run_through",
        "accel.llm.batching.step:StepRunner.logits",
        "accel.cuda_graphs.runner:GraphRunner._warm_up",
    ],
    "compile": ["accel_kernels.compiling.compilers_triton:CompileBeside.__exit__"],
    "load": ["accel_kernels.warmup:_load_all"],
    "autotune": ["accel_kernels.trials:Trials.work", "accel_kernels.autotune:race"],
    "capture": ["accel.cuda_graphs.runner:GraphRunner._capture"],
    "stacking": ["accel.fusion.stacked_weights:Stacked.apply"],
    "fingerprint": ["accel.cuda_graphs.runner:GraphRunner._taken"],
}


class Parts:
    """Seconds of the parts that this thread is in, each without those inside it."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.thread, self.inside = threading.get_ident(), []

    def timed(self, part: str, function: Callable) -> Callable:
        @wraps(function)
        def inner(*args, **kwargs):
            if threading.get_ident() != self.thread:
                return function(*args, **kwargs)
            start = time.perf_counter()
            self.inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.seconds[part] = self.seconds.get(part, 0.0) + took - self.inside.pop()
                if self.inside:
                    self.inside[-1] += took

        return inner

    def watch(self) -> None:
        """From here on; what a version does not have is left out."""
        for part, places in PARTS.items():
            for place in places:
                module, name = place.split(":")
                *owners, last = name.split(".")
                with suppress(ImportError, AttributeError):
                    owner = import_module(module)
                    for one in owners:
                        owner = getattr(owner, one)
                    stock = getattr(owner, last)
                    timed = self.timed(part, stock)
                    setattr(owner, last, timed)
                    for other in [] if owners else [*sys.modules.values()]:  # that imported it by name
                        if getattr(other, "__name__", "").startswith("accel") and vars(other).get(last) is stock:
                            setattr(other, last, timed)

    def told(self, whole: float) -> dict[str, float]:
        found = {f"{part}_s": round(took, 3) for part, took in self.seconds.items()}
        return found | {"other_s": round(whole - sum(self.seconds.values()), 3)}


@contextmanager
def profiled(wanted: bool, row: dict):
    profile = cProfile.Profile()
    if wanted:
        profile.enable()
    yield
    if wanted:
        profile.disable()
        for order in ("cumulative", "tottime"):
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats(order).print_stats(70)
            row[f"profile_{order}"] = text.getvalue().splitlines()


def prepared(name: str, way: str, device: torch.device) -> tuple:
    """The model, and what is called of it."""
    if name not in CONFIGS:
        case = CASES[name]
        dtype = case.dtype or torch.float16
        model, inputs = case.build(device, dtype), case.inputs(device, dtype)
        return model, partial(case.call, model, inputs[0])
    from accel.bench.llm.batch_runner import answers
    from accel.bench.llm.models import build, prompt

    model = build(name, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    if way == "batch":
        vocabulary = model.config.get_text_config().vocab_size
        lengths = torch.randint(32, 161, (REQUESTS,), generator=torch.Generator().manual_seed(0)).tolist()
        prompts = [torch.randint(0, vocabulary, (length,)).tolist() for length in lengths]
        return model, partial(answers, model, prompts, ANSWER)
    return model, partial(model.generate, **prompt(model, 1, TOKENS), max_new_tokens=NEW, do_sample=False)


def measure(asked: str, state: str, device: torch.device, profile: bool) -> dict:
    """One state in this process."""
    name, _, way = asked.partition("+")
    begun = time.perf_counter()
    model, call = prepared(name, way, device)
    row = {"name": asked, "state": state, "built_s": round(time.perf_counter() - begun, 1)}
    parts, first = Parts(), 0.0
    with torch.no_grad(), profiled(profile, row):
        if state != "stock":
            options = {"weights": way} if way not in ("", "batch") else {}
            world = "accel.llm.stages" if name in CONFIGS else "accel.diffusion.stages"
            row["imports_s"] = round(seconds(lambda: (accel.optimize, import_module(world)), device), 3)
            parts.watch()
            row["optimize_s"] = round(seconds(lambda: accel.optimize(model, **options), device), 3)
            first = row["imports_s"] + row["optimize_s"]
            row["parts_of_optimize"] = parts.told(row["optimize_s"])
            parts.seconds = {}
        took = seconds(call, device)
        row["first_call_s"], row["ready_s"] = round(took, 3), round(first + took, 3)
        row["parts_of_first_call"] = parts.told(took)
    with torch.no_grad():
        later = [round(seconds(call, device), 4) for _ in range(LATER)]
    row["later_calls_s"] = later
    if way == "batch":
        row["tokens_per_s"] = [round(REQUESTS * ANSWER / one) for one in (took, *later)]
    with suppress(ImportError):
        if state != "stock" and device.type == "cuda":
            compilers = import_module("accel_kernels.compiling.compilers_triton").compilers_of(os.getpid())
            row["kernels"] = {"compiled_beside": compilers.compiled, "at_once": compilers.most}
    if state != "stock":
        row["fallbacks"] = len(accel.report(model).fallbacks)
    return row


def fresh(asked: str, state: str, caches: Path, given: argparse.Namespace) -> dict:
    """`measure` in a process of its own, with its caches there."""
    environment = os.environ | {name: str(caches / name.lower()) for name in CACHES}
    command = [sys.executable, __file__, "--measure", state, "-", asked, *(["--profile"] if given.profile else [])]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=given.seconds)
    except subprocess.TimeoutExpired:
        return {"name": asked, "state": state, "failed": f"took more than {given.seconds:.0f} s"}
    if done.returncode:
        return {"name": asked, "state": state, "failed": done.stderr[-1500:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(given: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {"case": "ready", "about": __doc__.splitlines()[0], "date": now(), "commit": commit()}
    result = about | {"machine": machine(device), "rows": []}
    for asked in given.names:
        rows: dict[str, dict] = {}
        with tempfile.TemporaryDirectory(prefix="accel-ready-") as folder:
            for state in given.states:
                rows[state] = fresh(asked, state, Path(folder), given)
        stock = rows.get("stock", {}).get("first_call_s")
        for state, row in rows.items():
            if stock is not None and state != "stock" and "ready_s" in row:
                row["over_stock_s"] = round(row["ready_s"] - stock, 3)
            result["rows"].append(row)
            print({key: value for key, value in row.items() if not key.startswith("profile")}, flush=True)
        Path(given.out).write_text(json.dumps(result, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("names", nargs="+", help=f"{', '.join([*CONFIGS, *CASES])}; with +int8, +int4 or +batch behind")
    parser.add_argument("--states", nargs="+", default=["cold", "warm", "stock"], choices=["cold", "warm", "stock"])
    parser.add_argument("--seconds", type=float, default=120.0, help="that one process may take")
    parser.add_argument("--profile", action="store_true", help="of the calling thread; slower")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := [one for one in given.names if one.partition("+")[0] not in CONFIGS | CASES]:
        parser.error(f"{unknown[0]!r} is none of {', '.join([*CONFIGS, *CASES])}")
    return given


if __name__ == "__main__":
    chosen = arguments()
    if chosen.measure:
        on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        print(json.dumps(measure(chosen.names[0], chosen.measure, on, chosen.profile)))
    else:
        main(chosen)
