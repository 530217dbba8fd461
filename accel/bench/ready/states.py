"""A model in each of three states, in fresh processes: with empty caches, with those that it left, and stock."""

import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from accel.bench.diffusion.cases import CASES
from accel.bench.llm.configs import CONFIGS
from accel.bench.processes import spawn
from accel.bench.scripts import images, placement
from accel.bench.scripts.registry import SCRIPTS

STATES = ("cold", "warm", "stock")
PROCESS = "accel.bench.ready.process"
SCRIPT = "script"
WAYS = ("", "batch", "int8", "int4", "fp8")  # behind a plus


def of_images(asked: str) -> bool:
    """Whether it is a case of `accel bench`, and no language model of `accel bench llm`; or a script of a pipeline."""
    name, _, way = asked.partition("+")
    if way == SCRIPT:
        return SCRIPTS[name].build.__module__ in (images.__name__, placement.__name__)
    return name in CASES and name not in CONFIGS


def check_name(asked: str) -> None:
    """Raises ValueError for what is no model of these benchmarks, or is asked for in a way that there is not."""
    name, _, way = asked.partition("+")
    if way == SCRIPT:
        if name not in SCRIPTS:
            raise ValueError(f"{name!r} is none of {', '.join(SCRIPTS)}")
        return
    if name not in CONFIGS and name not in CASES:
        raise ValueError(f"{name!r} is none of {', '.join([*CONFIGS, *CASES])}")
    if way not in (WAYS if name in CONFIGS else WAYS[:1]):
        raise ValueError(
            f"{asked!r}: behind a plus stands one of {', '.join(WAYS[1:])}, of a language model, or {SCRIPT}"
        )


def dtype_for(asked: str, device: torch.device) -> torch.dtype:
    """bfloat16 for language models and float16 or the case's own for images on a GPU; float32 elsewhere."""
    name, _, way = asked.partition("+")
    if device.type != "cuda":
        return torch.float32
    if way == SCRIPT:  # which has dtypes of its own
        return torch.bfloat16
    return CASES[name].dtype or torch.float16 if of_images(name) else torch.bfloat16


def measure_states(
    asked: str,
    device: torch.device,
    dtype: torch.dtype,
    states: Iterable[str] = STATES,
    more: tuple[str, ...] = (),
    left: Callable[[], float | None] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """A row of figures for each state, see `process.measure`; over_stock_s: ready_s beyond stock's own first call.

    more: further arguments of the process. left: seconds that the next process may take. Raises RuntimeError where one
    fails or takes longer.
    """
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="accel-ready-") as folder:
        for state in states:
            given = [asked, state, str(device), str(dtype).removeprefix("torch."), *more]
            rows[state] = spawn(PROCESS, given, Path(folder), left())
    if "stock" in rows:
        for state in rows.keys() - {"stock"}:
            rows[state]["over_stock_s"] = round(rows[state]["ready_s"] - rows["stock"]["first_call_s"], 3)
    return rows


def steady_s(row: dict[str, Any]) -> float:
    """Seconds of a later call."""
    return statistics.median(row["later_calls_s"])


def lost_s(row: dict[str, Any]) -> float:
    """Seconds that getting ready and the first calls took beyond as many later ones: a graph captured in the second
    call is in it, for one.
    """
    early = [row["ready_s"], *row["later_calls_s"]]
    return round(max(0.0, sum(early) - len(early) * steady_s(row)), 3)
