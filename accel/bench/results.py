"""Results as they grow, as files and as a table."""

import json
import math
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from accel.bench.timing import Clock
from accel.errors import logged

VARIANTS = ("stock", "compile", "accel")
REASON = 300  # letters of an error that are kept


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
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{device_slug}-{result['case']}{suffix}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def _memory(result: dict, variant: str) -> str:
    peak = result["peak_memory_mb"].get(variant)
    return f"{peak['allocated']:,.0f} MiB" if peak else "-"


def _ready(result: dict, variant: str) -> str:
    ready = result["ready"]
    if variant == "compile":
        warm = f" / {ready['compile_warm_s']:.1f}" if "compile_warm_s" in ready else ""
        return f"{ready['compile_s']:.1f}{warm}"
    if variant == "accel":
        return f"{ready['cold_s']:.1f} / {ready['warm_s']:.1f}" if "cold_s" in ready else f"{ready['in_process_s']:.1f}"
    return f"{ready['stock_first_call_s']:.1f}" if "stock_first_call_s" in ready else "-"


def table(results: list[dict]) -> Table:
    """One row for each variant of each case."""
    title = "ms a call (medians), seconds to ready, relative error against full precision"
    shown = Table(title=title, title_justify="left")
    shown.add_column("case", no_wrap=True)
    shown.add_column("variant", no_wrap=True)
    for name in ("ms", "speed-up", "cold / warm s", "peak", "error"):
        shown.add_column(name, justify="right", no_wrap=True)
    for result in results:
        present = [name for name in VARIANTS if name in result]
        for variant in present:
            median = result[variant]["median_ms"]
            error = result["error"].get(f"{variant}_vs_fp32")
            shown.add_row(
                result["case"] if variant == present[0] else "",
                variant,
                f"{median:.2f}",
                f"{result['stock']['median_ms'] / median:.2f}x" if "stock" in result else "-",
                _ready(result, variant),
                _memory(result, variant),
                f"{error:.1e}" if error is not None else "-",
                style="bold" if variant == "accel" else None,
                end_section=variant == present[-1],
            )
    return shown


def lost(result: dict) -> str:
    """One line: how far quantized weights put a case from stock."""
    told = result["lost"]
    psnr = "equal to stock" if told["psnr_db"] is None else f"PSNR {told['psnr_db']:.1f} dB from stock"
    sizes = " instead of ".join(f"{told['weights_mb'][name]:,.0f}" for name in ("accel", "stock"))
    rows = ", without rounding rows" if "activations" in result else ""
    return f"{result['case']}: {psnr}; {sizes} MiB of weights; errors are against the same rounded weights{rows}"
