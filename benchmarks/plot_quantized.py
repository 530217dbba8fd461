"""The panels of docs/images/quantized.png: speed by scheme, other packages beside, and quality against bytes."""

import json
from pathlib import Path

from matplotlib import pyplot as plt

COLORS = {
    "stock": "#b8bec6", "accel": "#e4572e", "int8": "#2e86ab", "int8-asym": "#5ba3c1", "fp8": "#f2a541",
    "int8-head": "#17526b", "int8 x int8": "#8cc5dd", "fp8 x fp8": "#f2a541", "int4-head": "#1f5134",
    "int4": "#3b8e5a", "int4-g64": "#62ad7d", "int4-g32": "#92c9a5",
}  # fmt: skip
MARKERS = {"rtn": "o", "gptq": "s", "awq": "^"}
OTHERS = "#8d6a9f"


def results(folder: Path, kind: str) -> list[dict]:
    """Those of a GPU whose case is of this kind: "quantized", "peers" or "quality"."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"*-{kind}-*.json"))]
    return [one for one in found if one["case"].startswith(f"{kind}-") and one["machine"]["gpu"]]


def color(variant: str) -> str:
    """Of a variant such as "accel int4, kv int8" or "torchao int8"."""
    name = variant.removeprefix("accel ")
    return COLORS.get(name.partition(",")[0], OTHERS)


def decoded(result: dict) -> list[dict]:
    """Its decode steps, a row for each batch and context."""
    return result.get("parts", result).get("decode") or []


def draw_speed(result: dict, axes) -> None:
    """Tokens a second against the batch, one line a variant; dashed where the cache is rounded too."""
    rows = decoded(result)
    rows = sorted((row for row in rows if row["context"] == rows[0]["context"]), key=lambda row: row["batch"])
    for name in [name for name, value in rows[0].items() if isinstance(value, dict)]:
        points = [(row["batch"], row[name]["tok_s"]) for row in rows if name in row]
        style = "o--" if "kv" in name else "o-"
        axes.plot(*zip(*points, strict=True), style, color=color(name), label=name, linewidth=1.5, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([row["batch"] for row in rows], [str(row["batch"]) for row in rows], fontsize=8)
    axes.set_xlabel("batch", fontsize=9)
    axes.set_title(f"{result['case'].partition('-')[2]}: tokens/s", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=7)


def draw_peers(result: dict, axes) -> None:
    """A bar a variant: milliseconds a token of one row, compiled ones below the others."""
    first = min(result["decode"], key=lambda row: row["batch"])
    bars = {name: row["ms_step"] for name, row in first.items() if isinstance(row, dict)}
    bars |= {f"{name}, compiled": row["ms_step"] for name, row in result["compiled"].items()}
    for place, (name, ms) in enumerate(bars.items()):
        axes.barh(place, ms, 0.75, color=COLORS["accel"] if name.startswith("accel") else COLORS["stock"])
        axes.text(ms, place, f" {ms:.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.set_xlim(0, 1.15 * max(bars.values()))
    title = f"{result['case'].removeprefix('peers-')}, batch {first['batch']}: ms a token"
    axes.set_title(title, loc="left", fontsize=10)


def draw_quality(result: dict, axes) -> None:
    """What the perplexity grows by against the bytes of the linear layers; a color a scheme, a marker a method."""
    rows = [row for row in result["rows"] if row["model"] == "as trained" and row["weights"] is not None]
    rows = [row for row in rows if row["inputs"] is None and row["kv_cache"] is None]
    for row in rows:
        at = 100 * row["bytes_of_16_bits"], 100 * row["change"]
        axes.plot(*at, MARKERS[row["method"]], color=COLORS[row["weights"]], markersize=7)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    schemes = list(dict.fromkeys(row["weights"] for row in rows))
    handles = [plt.Line2D([], [], color="k", marker=MARKERS[name], linestyle="") for name in methods]
    handles += [plt.Line2D([], [], color=COLORS[name], marker="o", linestyle="") for name in schemes]
    axes.legend(handles, [*methods, *schemes], frameon=False, fontsize=8)
    axes.axhline(0, color="k", linewidth=0.5)
    axes.set_xlabel("% of 16 bits' bytes", fontsize=9)
    name, weights = result["case"].removeprefix("quality-"), result["parameters"] / 1e6
    axes.set_title(f"{name} ({weights:.0f}M weights): perplexity, %", loc="left", fontsize=10)


def _several(result: dict) -> bool:
    """Whether it is a matter of batches: of three or more, or of whichever where prompts and others were timed too."""
    return "parts" in result or len({row["batch"] for row in decoded(result)}) > 2


def save(folder: Path, path: Path) -> bool:
    """Draws what there are results of; False where there are none."""
    speeds = [one for kind in ("quantized", "peers") for one in results(folder, kind) if decoded(one)]
    speeds = sorted(
        ((draw_speed if _several(one) else draw_peers, one) for one in speeds), key=lambda it: it[0] is draw_peers
    )
    panels = [*speeds, *((draw_quality, one) for one in results(folder, "quality"))]
    if not panels:
        return False
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.6 * rows), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for (draw, result), axes in zip(panels, grid.flat, strict=False):
        draw(result, axes)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        ", ".join(dict.fromkeys(one["machine"]["gpu"] for _, one in panels)), x=0.01, ha="left", fontsize=10
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")
    return True
