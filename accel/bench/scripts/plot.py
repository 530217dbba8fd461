"""How much faster each script is, as bars."""

from pathlib import Path
from typing import Any

from accel.bench.scripts.results import LEAST_RATIO

FASTER, SAME, SLOWER = "#e4572e", "#b8bec6", "#1f2a44"
TICKS = (0.5, 1, 2, 3, 5, 10, 20, 50)


def draw_ratios(result: dict, axes: Any) -> None:
    """A bar a script from 1, where it is as fast as stock, on a logarithmic scale; the fastest on top."""
    rows = sorted((row for row in result["rows"] if "ratio" in row), key=lambda row: row["ratio"])
    ratios = [row["ratio"] for row in rows]
    for place, ratio in enumerate(ratios):
        color = SLOWER if ratio < LEAST_RATIO else FASTER if ratio > 1.03 else SAME
        axes.barh(place, ratio - 1, left=1, height=0.75, color=color)
        axes.text(max(ratio, 1) * 1.02, place, f"{ratio:.2f}x", va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    shown = [tick for tick in TICKS if min([1, *ratios]) * 0.9 <= tick <= max([1, *ratios]) * 1.3]
    axes.set_xticks(shown, [f"{tick:g}x" for tick in shown], fontsize=8)
    axes.minorticks_off()
    axes.set_xlim(min([1, *ratios]) * 0.9, max([1, *ratios]) * 1.35)
    axes.set_yticks(range(len(rows)), [row["script"] for row in rows], fontsize=8)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    where = result["machine"]["gpu"] or "CPU, tiny sizes"
    axes.set_title(f"Whole scripts, times as fast as stock ({where})", loc="left", fontsize=11)


def save_ratios(result: dict, path: Path) -> None:
    """Draws into this file. Raises ImportError where matplotlib is not installed."""
    from matplotlib.figure import Figure

    count = sum("ratio" in row for row in result["rows"])
    figure = Figure(figsize=(9, 1 + 0.24 * max(1, count)))
    draw_ratios(result, figure.subplots())
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
