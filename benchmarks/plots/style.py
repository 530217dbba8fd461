"""Colors and axes that all pictures share, and the results they are drawn from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BAR = 0.8  # of the height of a case, shared by its bars
COLORS = {
    "stock": "#b8bec6", "compile": "#6f9bd1", "accel": "#e4572e", "int8": "#2e86ab", "int8-asym": "#5ba3c1",
    "fp8": "#f2a541", "int8-head": "#17526b", "int8 x int8": "#8cc5dd", "fp8 x fp8": "#f2a541", "int4-head": "#1f5134",
    "int4": "#3b8e5a", "int4-g64": "#62ad7d", "int4-g32": "#92c9a5",
}  # fmt: skip
OTHERS = "#8d6a9f"


def results(folder: Path, pattern: str = "*.json") -> dict[str, dict]:
    """Those that were measured on a GPU, by the names of their files."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob(pattern))}
    return {stem: one for stem, one in found.items() if isinstance(one.get("machine"), dict) and one["machine"]["gpu"]}


def of_kind(folder: Path, kind: str) -> list[dict]:
    """Those whose case is of this kind, such as "quantized" or "batch"."""
    return [one for one in results(folder, f"*-{kind}-*.json").values() if one["case"].startswith(f"{kind}-")]


def color(variant: str) -> str:
    """Of a variant such as "accel int4, kv int8" or "torchao int8"."""
    return COLORS.get(variant.removeprefix("accel ").partition(",")[0], OTHERS)


def variants(row: dict) -> list[str]:
    return [name for name, value in row.items() if isinstance(value, dict)]


def draw_line(axes, x: list, y: list, name: str, label: str, **style) -> None:
    if x:
        axes.plot(x, y, style.pop("marker", "o-"), color=color(name), label=label, markersize=4, **style)


def as_powers(axes, values: list[int], title: str, label: str) -> None:
    """The x axis by powers of two, with the values that there are."""
    axes.set_xscale("log", base=2)
    values = sorted(set(values))
    axes.set_xticks(values, [f"{value // 1024}k" if value >= 1024 else str(value) for value in values], fontsize=8)
    axes.set_xlabel(label, fontsize=9)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def as_bars(axes, labels: list[str], most: float, size: int = 9) -> None:
    """Bars beside their names, and no other axis; the first on top."""
    axes.set_yticks(range(len(labels)), labels, fontsize=size)
    axes.invert_yaxis()
    axes.set_xlim(0, most)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)


def grouped(axes, place: int, present: list[str], values: list[float], texts: list[str], size: int = 9) -> None:
    """The bars of one case, accel's name in bold."""
    height = BAR / 3
    for number, (name, value, text) in enumerate(zip(present, values, texts, strict=True)):
        y = place + (number - (len(present) - 1) / 2) * height
        axes.barh(y, value, height * 0.92, color=COLORS[name])
        weight = "bold" if name == "accel" else "normal"
        axes.text(value + 0.01, y, text, va="center", fontsize=size, weight=weight)


def save_panels(
    panels: list[tuple[Callable, Any]], path: Path, columns: int, size: tuple[float, float], title: str = ""
) -> bool:
    """Draws a panel by each function of (result, axes), rows of so many; whether there was something to draw."""
    if not panels:
        return False
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for (draw, result), axes in zip(panels, grid.flat, strict=False):
        draw(result, axes)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.tight_layout()
    save(figure, path)
    return True


def save(figure, path: Path, dpi: int = 130) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
    print(f"wrote {path}")
