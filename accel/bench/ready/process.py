"""One state of one model, measured in a process of its own.

Run as `python -m accel.bench.ready.process NAME STATE DEVICE DTYPE [--tokens N] [--images] [--profile]`.
It prints a line of JSON.
"""

import argparse
import cProfile
import io
import json
import os
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch

import accel
from accel.bench.diffusion.cases import CASES
from accel.bench.ready.parts import PartTimes
from accel.bench.ready.states import SCRIPT, of_images
from accel.bench.scripts.registry import SCRIPTS
from accel.bench.scripts.script import Size
from accel.bench.timing import seconds

NEW, TOKENS, LATER = 16, 128, 3
REQUESTS, ANSWER = 128, 64
BATCH = "batch"  # in place of weights=


def measure(
    asked: str,
    state: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int = TOKENS,
    images: bool = False,
    profile: bool = False,
) -> dict[str, Any]:
    """A row: what `accel.optimize` and the first call took, by part, and what later calls take. asked: as the command
    takes names, or a folder with a language model. state: "stock", or anything else for accel. tokens: of a language
    model's prompt. images: the name is that of a case of `accel bench`, where a language model has it too.
    """
    name, _, way = asked.partition("+")
    images = images or of_images(asked)
    begun = time.perf_counter()
    if way == SCRIPT:
        model, call = SCRIPTS[name].build(Size(device, tiny=device.type != "cuda"))
    else:
        model, call = _images(name, device, dtype) if images else _text(name, way, device, dtype, tokens)
    row: dict[str, Any] = {"name": asked, "state": state, "built_s": round(time.perf_counter() - begun, 1)}
    parts, first, fast = PartTimes(), 0.0, state != "stock"
    with torch.no_grad(), _profiled(profile, row):
        if fast:
            options: dict[str, Any] = {"weights": way} if way not in ("", BATCH, SCRIPT) else {}
            world = "accel.diffusion.stages" if images else "accel.llm.stages"
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
    if way == BATCH:
        row["tokens_per_s"] = [round(REQUESTS * ANSWER / one) for one in (took, *later)]
    with suppress(ImportError):
        if fast and device.type == "cuda":
            compilers = import_module("accel_kernels.compiling.compilers_triton").compilers_of(os.getpid())
            row["kernels"] = {"compiled_beside": compilers.compiled, "at_once": compilers.most}
    if fast:
        row["fallbacks"] = len(accel.report(model).fallbacks)
    return row


def _images(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Callable]:
    case = CASES[name]
    module, inputs = case.build(device, dtype), case.inputs(device, dtype)
    return module, partial(case.call, module, inputs[0])


def _text(name: str, way: str, device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Any, Callable]:
    """A language model, and what is called of it."""
    from accel.bench.llm.batch import answers
    from accel.bench.llm.models import build, prompt

    model = build(name, device, dtype)
    if way == BATCH:
        vocabulary = model.config.get_text_config().vocab_size
        lengths = torch.randint(32, 161, (REQUESTS,), generator=torch.Generator().manual_seed(0)).tolist()
        prompts = [torch.randint(0, vocabulary, (length,)).tolist() for length in lengths]
        return model, partial(answers, model, prompts, ANSWER)
    return model, partial(model.generate, **prompt(model, 1, tokens), max_new_tokens=NEW, do_sample=False)


@contextmanager
def _profiled(wanted: bool, row: dict) -> Iterator[None]:
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


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("name", "state", "device", "dtype"):
        parser.add_argument(name)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    for flag in ("--images", "--profile"):
        parser.add_argument(flag, action="store_true")
    given = vars(parser.parse_args(words))
    where = torch.device(given.pop("device")), getattr(torch, given.pop("dtype"))
    print(json.dumps(measure(given.pop("name"), given.pop("state"), *where, **given)))


if __name__ == "__main__":
    main(sys.argv[1:])
