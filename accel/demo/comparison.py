"""The parts of the demo: a model that ships, loaded twice as any user would, one copy given to `accel.optimize`.

The two take turns at the same work, so that nothing but the one line differs between them.
"""

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import accel
from accel.bench.memory import allocated_bytes
from accel.bench.results import new_table
from accel.bench.timing import seconds, take_turns
from accel.report import Report

CHECKOUT = Path(__file__).parents[2]
INDEX = {"model": "config.json", "pipeline": "model_index.json"}


def find_folder(given: Path | None, shipped: Path, kind: str) -> Path:
    """The given folder; without one, what a checkout ships. Raises FileNotFoundError where it holds no such kind."""
    candidates, index = [given] if given else [shipped, CHECKOUT / shipped], INDEX[kind]
    for candidate in candidates:
        if (candidate / index).is_file():
            return candidate
    if given:
        raise FileNotFoundError(f"{given} holds no {kind} (no {index} in it)")
    raise FileNotFoundError(f"{shipped} is not here; run this in a checkout of the repository, or name a {kind} folder")


@dataclass(frozen=True)
class Comparison(ABC):
    """What was made and measured: results and seconds of each turn, stock's and ours."""

    stock: list
    optimized: list
    stock_s: list[float]
    optimized_s: list[float]
    ready_s: float
    peak_mb: tuple[float, float] | None
    restored_equal: bool
    machine: str
    report: Report

    @property
    def medians(self) -> tuple[float, float]:
        return statistics.median(self.stock_s), statistics.median(self.optimized_s)

    def table(self, title: str, *rows: tuple[str, ...]) -> Table:
        """Rows of a part, each with what stands in the columns stock, accel and ratio; the first is given its ratio."""
        shown = new_table(f"{title}, on {self.machine}; medians", "", "stock", "accel", "ratio")
        shown.add_row(*rows[0], speed_ratio(self.stock_s, self.optimized_s, self.report))
        for row in rows[1:]:
            shown.add_row(*row)
        shown.add_row("time to ready", "", f"{self.ready_s:.2f} s")
        shown.add_row("undone by accel.restore", "", "bit-equal" if self.restored_equal else "[red]not equal[/red]")
        return shown

    @abstractmethod
    def shown(self) -> Table:
        """The table of this part."""

    def show(self, console: Console) -> None:
        console.print(self.shown())
        console.print(Text(self.report.summary()))


def run_both(
    load: Callable[[], Any],
    work: Callable[[Any, int], Any],
    exact: Callable[[Any], torch.Tensor],
    turns: int,
    device: torch.device,
    progress: Progress,
    what: str,
) -> dict[str, Any]:
    """The fields of a Comparison. work(obj, number): a turn; number 0 is done once before, to warm up.

    exact: what must be equal to the bit after `accel.restore`. what: is told of while it is at work.
    """
    task = progress.add_task(f"loading: {what}", total=2 * turns + 3)
    # A matrix product makes a workspace that stays for the whole process, and is nobody's peak memory.
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    made: dict[str, Any] = {}
    results: dict[str, list] = {"stock": [], "accel": []}
    peaks, ready_s = [], 0.0

    def begin(name: str) -> None:
        if name == "accel":
            accel.optimize(made[name])
        work(made[name], 0)

    def turn(name: str) -> float:
        took = seconds(lambda: results[name].append(work(made[name], len(results[name]))), device)
        progress.advance(task)
        return took

    for name in results:
        before = allocated_bytes(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        made[name] = load()
        progress.update(task, description=f"{name}: {what}", advance=1)
        ready_s = seconds(partial(begin, name), device)
        if device.type == "cuda":
            peaks.append((torch.cuda.max_memory_allocated(device) - before) / 2**20)
    times = take_turns({name: partial(turn, name) for name in results}, least=turns, most=turns)
    report = accel.report(made["accel"])
    progress.update(task, description=f"undoing: {what}", advance=1)
    accel.restore(made["accel"])
    return {
        "stock": results["stock"],
        "optimized": results["accel"],
        "stock_s": times["stock"],
        "optimized_s": times["accel"],
        "ready_s": max(0.0, ready_s - statistics.median(times["accel"])),
        "peak_mb": tuple(peaks) or None,
        "restored_equal": torch.equal(exact(made["accel"]), exact(made["stock"])),
        "machine": device_line(device),
        "report": report,
    }


def device_line(device: torch.device) -> str:
    """What the demo runs on, in a line."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"the CPU, {threads} thread{'s' * (threads != 1)}"


def speed_ratio(stock_s: list[float], optimized_s: list[float], report: Report) -> str:
    """Of medians. Where both ran stock's code, times that overlap are one time: what lies between them is noise."""
    if report.stock_on_cpu and min(optimized_s) <= max(stock_s):
        return "as stock"
    return f"{statistics.median(stock_s) / statistics.median(optimized_s):.2f}x"
