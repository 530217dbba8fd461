"""Runs scripts one after the other: correctness first, then stock and accel in turns; one that fails is a row too."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

import accel
from accel.bench.machine import commit, now, provenance
from accel.bench.memory import allocated_bytes, device_bytes, device_peak, release
from accel.bench.processes import spawn
from accel.bench.results import WrongResult
from accel.bench.scripts.judging import dtype_of, judge_outputs
from accel.bench.scripts.results import least
from accel.bench.scripts.script import Script, Size
from accel.bench.timing import Clock, seconds, take_turns, within
from accel.bench.weights import SEED
from accel.errors import logged, out_of_memory
from accel.report import Report
from accel.verification.call import seeded

LEAST_ROUNDS, MOST_ROUNDS = 4, 30  # two were not enough for calls of seconds: 0.91x, and 1.06x in four
WARM_UP = 2  # calls before the turns: one that is eager, one in which graphs are captured
PATIENCE, LEAST_BUDGET = 6, 20.0  # a row that takes so many times its seconds is ended
FAMILIES = ("accel.diffusion.family", "accel.llm.stages", "diffusers.pipelines.pipeline_utils")
RANK = "accel.bench.scripts.rank"  # the module that each rank runs
REASONS = 4  # told, of those that calls or places run stock for


class Side:
    """One of the two: its object, its call, and what was measured of it.

    peak_mb, device_mb: of the calls that warm it up, beyond what was there before, by torch's allocator in all of them,
    and on the whole device in the last.
    """

    def __init__(self, script: Script, size: Size) -> None:
        self.device = size.device
        self.before = allocated_bytes(self.device), device_bytes(self.device)
        with seeded(SEED):
            self.obj, self.call = script.build(size)
        self.peak_mb: float | None = None
        self.device_mb: float | None = None
        self.optimize_s = 0.0

    def run(self) -> Any:
        with seeded(SEED):
            return self.call()

    def first(self, optimize: bool = False) -> Any:
        """The output of the calls that warm it up."""
        output: list[Any] = []
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        if optimize:
            self.optimize_s = seconds(lambda: accel.optimize(self.obj), self.device)
        self.first_s = seconds(lambda: output.append(self.run()), self.device)
        with device_peak(self.device) as found:
            for _ in range(WARM_UP - 1):
                output[:] = [self.run()]
        if on_gpu:
            allocated = torch.cuda.max_memory_allocated(self.device)
            self.peak_mb, self.device_mb = (
                round((now - before) / 2**20, 1) for now, before in zip((allocated, found[0]), self.before, strict=True)
            )
        return output[0]

    def turn(self) -> float:
        """Milliseconds."""
        return seconds(self.run, self.device) * 1e3

    def figures(self, times: list[float]) -> dict:
        found = {"least_ms": min(times), "median_ms": statistics.median(times), "first_s": self.first_s}
        found = {name: round(value, 4) for name, value in found.items()}
        return found | {"peak_mb": self.peak_mb, "device_mb": self.device_mb}


def run_scripts(
    scripts: Iterable[Script],
    size: Size,
    budget_s: float = 20.0,
    total_s: float = 600.0,
    stage: Callable[[str], None] = lambda name: None,
    keep: Callable[[dict], object] = lambda result: None,
) -> dict:
    """The result as one dict, ready for JSON: a row a script. keep: is given it after every row.

    budget_s: about how long a row takes; total_s: after so many seconds none is begun, those left are told as left out.
    """
    rows: list[dict] = []
    result = {
        "case": "scripts",
        "about": f"scripts as people write them, {'tiny' if size.tiny else 'published'} sizes, random weights",
        **provenance(size.device, size.bf16),
        "rows": rows,
    }
    for family in FAMILIES:  # loading them counts for no script
        import_module(family)
    clock = Clock(total_s)
    for one in scripts:
        stage(one.name)
        about = {"script": one.name, "about": one.about, "date": now(), "commit": commit()}
        reason = "no time was left" if clock.left() <= 0 else one.missing(size)
        rows.append(about | ({"left_out": reason} if reason else run_row(one, size, budget_s)))
        result |= {"least": least(rows), "took_s": round(clock.taken(), 1)}
        keep(result)
    return result


def run_row(script: Script, size: Size, budget_s: float) -> dict:
    """Figures of one script; of one that fails, what was known before and `failed`."""
    row: dict[str, Any] = {}
    try:
        limit_s = PATIENCE * max(budget_s, LEAST_BUDGET)
        if script.ranks and not dist.is_initialized():
            given = ["--standalone", f"--nproc-per-node={script.ranks}", "-m", RANK, script.name, str(int(size.tiny))]
            return spawn("torch.distributed.run", given, None, limit_s)
        with within(limit_s):
            _measure(script, size, Clock(budget_s), row)
    except Exception as error:  # whatever it raises, the next script has figures of its own
        name = "wrong result" if isinstance(error, WrongResult) else row.get("at", "building")
        short = "out of memory: " if out_of_memory(error) else ""
        row["failed"] = f"{name}: {short}{logged(error)}"[:300]
    row.pop("at", None)
    try:
        release(size.device)
    except RuntimeError as error:  # what a failed script left behind
        row.setdefault("failed", logged(error))
    return row


def _measure(script: Script, size: Size, clock: Clock, row: dict) -> None:
    """Fills the row; `at` says how far it came."""
    row["at"] = "stock"
    stock = Side(script, size)
    wanted = stock.first()
    row["at"] = "building"
    ours = Side(script, size)
    row["at"] = "accel"
    got = ours.first(optimize=True)
    row["took"] = {"ready_s": round(clock.taken(), 2)}
    row["at"] = "correctness"

    def again() -> Any:
        with seeded(SEED):
            return stock.call() if script.greedy is None else script.greedy(stock.obj, size)

    row["error"] = judge_outputs(wanted, got, dtype_of(stock.obj), stock.obj, again)
    del wanted, got
    row["at"] = "timing"
    turns = {"stock": stock.turn, "accel": ours.turn}
    times = take_turns(turns, least=LEAST_ROUNDS, most=MOST_ROUNDS, clock=clock)
    row["stock"] = stock.figures(times["stock"])
    row["accel"] = ours.figures(times["accel"]) | {"optimize_s": round(ours.optimize_s, 3)}
    row["ratio"], row["ratio_of_medians"] = (
        round(row["stock"][figure] / row["accel"][figure], 3) for figure in ("least_ms", "median_ms")
    )
    row["rounds"] = len(times["stock"])
    row["ready_s"] = round(ours.optimize_s + ours.first_s - stock.first_s, 3)
    row |= path(accel.report(ours.obj))
    row["took"]["all_s"] = round(clock.taken(), 2)


def path(report: Report) -> dict:
    """Whether a fast path ran, and why the rest ran stock.

    path: "graphs" where any were captured, "patched" where calls went through patches, else "stock".
    """
    patched = sum(status == "patched" for _, _, status, _ in report.sites)
    graphs = sum(row["status"] == "graph" for row in report.graphs)
    skipped = Counter(reason for _, _, status, reason in report.sites if status == "skipped")
    stock: Counter[str] = Counter()
    for _, reason, calls in report.fallbacks:
        stock[reason] += calls
    refused = [row["reason"] for row in report.graphs if row["status"] != "graph"]
    return {
        "path": "graphs" if graphs else "patched" if patched and not report.stock_on_cpu else "stock",
        "patched": patched,
        "graphs": graphs,
        "ran_stock": [{"reason": reason, "calls": calls} for reason, calls in stock.most_common(REASONS)],
        "skipped": [{"reason": reason, "sites": sites} for reason, sites in skipped.most_common(REASONS)],
        "no_graph": list(dict.fromkeys(filter(None, refused)))[:REASONS],
    }
