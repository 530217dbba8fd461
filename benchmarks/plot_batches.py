"""docs/images/batches.png: new tokens a second of generate_batch() against the requests in flight."""

import json
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator
from plot_quantized import color

LAST = " in flight"  # of the names of the workloads that are drawn


def results(folder: Path) -> list[dict]:
    """Those of a GPU that have such workloads."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*-batch-*.json"))]
    found = [one for one in found if one["case"].startswith("batch-") and one["machine"]["gpu"]]
    return [one for one in found if drawn(one)]


def drawn(result: dict) -> list[dict]:
    rows = [row for row in result["rows"] if row["workload"].endswith(LAST)]
    return sorted(rows, key=lambda row: row["requests"])


def draw(result: dict, axes) -> None:
    """A line a variant, a point where it was timed once."""
    rows = drawn(result)
    for name in dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, dict)):
        points = [(row[name].get("requests", row["requests"]), row[name]["tok_s"]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), "o-", color=color(name), label=name, linewidth=1.5, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8, which="both")
    ticks = [row["requests"] for row in rows]
    axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
    axes.set_xlabel("requests in flight", fontsize=9)
    first = rows[0]
    about = f"{first['prompt tokens']} tokens in, {first['new tokens']} out, {result['machine']['gpu']}"
    title = f"{result['case'].removeprefix('batch-')}: new tokens a second\n{about}"
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def save(folder: Path, path: Path) -> bool:
    """Whether there was something to draw."""
    found = results(folder)
    if not found:
        return False
    figure, panels = plt.subplots(1, len(found), figsize=(6 * len(found), 4), squeeze=False)
    for result, axes in zip(found, panels[0], strict=True):
        draw(result, axes)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(f"wrote {path}")
    return True
