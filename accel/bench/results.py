"""Results as files and as a table."""

import json
from pathlib import Path

from rich.table import Table

VARIANTS = ("stock", "compile", "accel")


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
