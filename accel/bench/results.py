"""Results as they grow, as files and as tables."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

import accel
from accel.bench.timing import Clock
from accel.errors import logged

VARIANTS = ("stock", "compile", "accel")
REASON = 300  # letters of an error that are kept


def reported(*models: Any) -> dict[str, list[str]]:
    """What the reports of optimized models tell, each once; sites of the first."""
    reports = [accel.report(model) for model in models]
    return {
        "fallbacks": sorted({reason for _, reason, _ in reports[0].fallbacks}),
        "graphs": sorted({one["reason"] or one["status"] for report in reports for one in report.graphs}),
        "sites": sorted({f"{rule}: {status} {reason}"[:120] for _, rule, status, reason in reports[0].sites}),
    }


class WrongResult(RuntimeError):
    """What is optimized is not as exact as it must be; no figure is reported."""


class BenchRecord:
    """A result as it grows: `keep` is given all of it whenever there is more, so an interrupted run leaves what it had.

    about: what it is of, and where it comes from. body: what is measured, in parts that rows are added to. failed,
    skipped: lines of what went wrong, and of what there was no time for.
    """

    def __init__(
        self, about: dict, body: dict, seconds: float = math.inf, keep: Callable[[dict], object] = lambda result: None
    ) -> None:
        self.about, self.body, self.clock, self.keep = about, body, Clock(seconds), keep
        self.failed: list[dict] = []
        self.skipped: list[dict] = []

    @property
    def trouble(self) -> dict:
        return {"failed": self.failed, "skipped": self.skipped, "took_s": round(self.clock.taken(), 1)}

    @property
    def result(self) -> dict:
        return self.about | self.body | self.trouble

    def save(self) -> None:
        self.keep(self.result)

    def add(self, part: str, row: dict) -> None:
        """A row of this part, which stays the same one: it may grow."""
        rows = self.body.setdefault(part, [])
        if all(row is not one for one in rows):
            rows.append(row)
        self.save()

    def in_time(self, **where: object) -> bool:
        """Whether something may still be begun; what may not is noted."""
        if self.clock.left() > 0:
            return True
        self.skipped.append({**where, "reason": f"{self.clock.total:g} seconds were over"})
        return False

    def fail(self, error: Exception, **where: object) -> None:
        """Of another process's traceback the last line is told."""
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[-1]}" if lines and "Error" in lines[-1] else logged(error)
        self.failed.append({**where, "reason": reason[:REASON]})


def save(result: dict, folder: Path, device_slug: str, usual: str = "float16") -> Path:
    """Writes `<device>-<case>.json`, with the dtype in the name where it is not the usual one of a GPU."""
    suffix = "" if result["dtype"] == usual or device_slug == "cpu" else f"-{result['dtype']}"
    return write(result, folder / f"{device_slug}-{result['case']}{suffix}.json")


def write(result: dict, path: Path, indent: int = 2) -> Path:
    """The result as JSON in this file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(jsonable(result), indent=indent, default=str) + "\n")
    return path


def jsonable(value: object) -> object:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {key: jsonable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def new_table(title: str, *headings: str, left: int = 1) -> Table:
    """An empty table; its first `left` columns are words, the others numbers."""
    shown = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if number < left else "right", no_wrap=number < left)
    return shown


def cell(value: float | None, form: str) -> str:
    """The value in this form, or a dash."""
    return "-" if value is None else form.format(value)


def trouble_lines(result: dict) -> Iterable[str]:
    """What failed and what was left out, a line each."""
    for word, rows in (("failed", result["failed"]), ("left out", result["skipped"])):
        for row in rows:
            about = " ".join(filter(None, (row.get("part"), row.get("case"), row.get("variant"))))
            yield f"{word}: {about}: {row['reason']}"


def table(results: list[dict]) -> Table:
    """One row for each variant of each case."""
    title = "ms a call (medians), seconds to ready, relative error against full precision"
    shown = new_table(title, "case", "variant", "ms", "speed-up", "cold / warm s", "peak", "error", left=2)
    for result in results:
        present = [name for name in VARIANTS if name in result]
        for variant in present:
            median, peak = result[variant]["median_ms"], result["peak_memory_mb"].get(variant)
            shown.add_row(
                result["case"] if variant == present[0] else "",
                variant,
                f"{median:.2f}",
                f"{result['stock']['median_ms'] / median:.2f}x" if "stock" in result else "-",
                _ready(result["ready"], variant),
                f"{peak['allocated']:,.0f} MiB" if peak else "-",
                cell(result.get("error", {}).get(f"{variant}_vs_fp32"), "{:.1e}"),
                style="bold" if variant == "accel" else None,
                end_section=variant == present[-1],
            )
    return shown


def _ready(ready: dict, variant: str) -> str:
    keys = {"stock": ("stock_first_call_s",), "compile": ("compile_s", "compile_warm_s"), "accel": ("in_process_s",)}
    found = [ready[key] for key in keys[variant] if key in ready]
    return " / ".join(f"{seconds:.1f}" for seconds in found) or "-"
