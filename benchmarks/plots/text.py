"""Pictures of language models: decode steps, requests in flight, and weights in fewer bits."""

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.plots import style
from benchmarks.plots.style import COLORS, as_bars, as_powers, draw_line, of_kind, results, save_panels, variants

LABELS = {"stock": "transformers", "compile": "static cache, compiled", "accel": "accel"}
MARKERS = {"rtn": "o", "gptq": "s", "awq": "^"}
IN_FLIGHT = " in flight"  # how the names of the workloads end that are drawn


def generations(folder: Path) -> list[dict]:
    """Results of `accel bench llm`, the largest model first; of files named after their case, without -2."""
    found = [one for stem, one in results(folder, "*-llm-*.json").items() if stem.endswith(one["case"])]
    found = [result for result in found if result["parts"].get("decode")]
    return sorted(found, key=lambda result: -result["sizes"]["parameters"])


def draw_decode(result: dict, panels) -> None:
    """Tokens a second against batch and against context, and the share of the memory's speed."""
    rows = result["parts"]["decode"]
    first = rows[0]["context"]
    by_batch = sorted((row for row in rows if row["context"] == first), key=lambda row: row["batch"])
    alone = [row for row in (*rows, *result["parts"].get("long", [])) if row.get("batch", 1) == 1]
    by_context = sorted(alone, key=lambda row: row["context"])
    lines = (
        (panels[0], "batch", by_batch, f"tokens/s, context {first}"),
        (panels[1], "context", by_context, "tokens/s, batch 1"),
    )
    for axes, key, points, title in lines:
        for name, label in LABELS.items():
            draw_line(axes, *_line(points, name, key), name, label, linewidth=2.5 if name == "accel" else 1.5)
        as_powers(axes, [point[key] for point in points], title, key)
    panels[0].set_yscale("log")
    x, y = _line(by_context, "accel", "context")
    shares = _line(by_context, "accel", "context", "share_of_bandwidth")[1]
    panels[1].plot(x, [rate / share for rate, share in zip(y, shares, strict=True)], "k--", linewidth=1, label="bound")
    panels[1].set_ylim(bottom=0)
    panels[1].set_visible(len(by_context) > 1)
    for axes in panels[:2]:
        axes.legend(frameon=False, fontsize=8)
    _shares(by_batch + [row for row in by_context if row not in by_batch], panels[2])
    model, gpu = result["case"].removeprefix("llm-"), result["machine"]["gpu"]
    about = f"{model}, {result['dtype']}, generate() ({gpu})"
    title = panels[0].annotate(about, (0, 1.17), xycoords="axes fraction", fontsize=12)
    title.set_in_layout(False)  # it may lie over the next panel's head
    above = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 8, "weight": "bold"}
    for x, y in zip(*_line(by_batch, "accel", "batch"), strict=True):
        panels[0].annotate(f"{y:,.0f}", (x, y), **above)


def _line(rows: list[dict], variant: str, key: str, figure: str = "tok_s") -> tuple[list, list]:
    points = [(row[key], row[variant][figure]) for row in rows if variant in row]
    return [x for x, _ in points], [y for _, y in points]


def _shares(rows: list[dict], axes) -> None:
    """A group of bars a case: the least time of its bytes at the speed of a copy, by the time it took."""
    for place, row in enumerate(rows):
        present = [name for name in LABELS if name in row]
        shares = [row[name]["share_of_bandwidth"] for name in present]
        style.grouped(axes, place, present, shares, [f"{share:.0%}" for share in shares], 7)
    as_bars(axes, [f"batch {row.get('batch', 1)}, {row['context']} tokens" for row in rows], 1.12, 8)
    axes.set_title("share of the memory's speed", loc="left", fontsize=10)


def save_decode(folder: Path, path: Path) -> bool:
    found = generations(folder)
    if not found:
        return False
    height = 3.6 * len(found)
    figure, panels = plt.subplots(len(found), 3, figsize=(12, height), squeeze=False, width_ratios=(1, 1, 1.1))
    for result, row in zip(found, panels, strict=True):
        draw_decode(result, row)
    figure.tight_layout(h_pad=3.5, rect=(0, 0, 1, 1 - 0.3 / height))
    style.save(figure, path)
    return True


def in_flight(result: dict) -> list[dict]:
    rows = [row for row in result["rows"] if row["workload"].endswith(IN_FLIGHT)]
    return sorted(rows, key=lambda row: row["requests"])


def draw_batches(result: dict, axes) -> None:
    """New tokens a second against the requests in flight: a line a variant, a point where it was timed once."""
    rows = in_flight(result)
    for name in dict.fromkeys(name for row in rows for name in variants(row)):
        points = [(row[name].get("requests", row["requests"]), row[name]["tok_s"]) for row in rows if name in row]
        draw_line(axes, *zip(*points, strict=True), name, name, linewidth=1.5)
    first = rows[0]
    about = f"{first['prompt tokens']} tokens in, {first['new tokens']} out, {result['machine']['gpu']}"
    title = f"{result['case'].removeprefix('batch-')}: new tokens a second\n{about}"
    as_powers(axes, [row["requests"] for row in rows], title, "requests in flight")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.legend(frameon=False, fontsize=8)


def save_batches(folder: Path, path: Path) -> bool:
    found = [one for one in of_kind(folder, "batch") if in_flight(one)]
    return save_panels([(draw_batches, result) for result in found], path, len(found), (6, 4))


def decoded(result: dict) -> list[dict]:
    """Its decode steps, a row for each batch and context."""
    return result.get("parts", result).get("decode") or []


def draw_schemes(result: dict, axes) -> None:
    """Tokens a second against the batch, one line a variant; dashed where the cache is rounded too."""
    rows = decoded(result)
    rows = sorted((row for row in rows if row["context"] == rows[0]["context"]), key=lambda row: row["batch"])
    for name in variants(rows[0]):
        draw_line(axes, *_line(rows, name, "batch"), name, name, marker="o--" if "kv" in name else "o-", linewidth=1.5)
    as_powers(axes, [row["batch"] for row in rows], f"{result['case'].partition('-')[2]}: tokens/s", "batch")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=7)


def draw_peers(result: dict, axes) -> None:
    """A bar a variant: milliseconds a token of one row, compiled ones below the others."""
    first = min(result["decode"], key=lambda row: row["batch"])
    bars = {name: first[name]["ms_step"] for name in variants(first)}
    bars |= {f"{name}, compiled": row["ms_step"] for name, row in result.get("compiled", {}).items()}
    for place, (name, ms) in enumerate(bars.items()):
        axes.barh(place, ms, 0.75, color=COLORS["accel" if name.startswith("accel") else "stock"])
        axes.text(ms, place, f" {ms:.1f}", va="center", fontsize=8)
    as_bars(axes, list(bars), 1.15 * max(bars.values()), 8)
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
    handles += [plt.Line2D([], [], color=style.color(name), marker="o", linestyle="") for name in schemes]
    axes.legend(handles, [*methods, *schemes], frameon=False, fontsize=8)
    axes.axhline(0, color="k", linewidth=0.5)
    axes.set_xlabel("% of 16 bits' bytes", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    name, weights = result["case"].removeprefix("quality-"), result["parameters"] / 1e6
    axes.set_title(f"{name} ({weights:.0f}M weights): perplexity, %", loc="left", fontsize=10)


def _several(result: dict) -> bool:
    """Whether it is a matter of batches: of three or more, or of whichever where prompts and others were timed too."""
    return "parts" in result or len({row["batch"] for row in decoded(result)}) > 2


def save_quantized(folder: Path, path: Path) -> bool:
    speeds = [one for kind in ("quantized", "peers") for one in of_kind(folder, kind) if decoded(one)]
    panels = [(draw_schemes, one) for one in speeds if _several(one)]
    panels += [(draw_peers, one) for one in speeds if not _several(one)]
    panels += [(draw_quality, one) for one in of_kind(folder, "quality")]
    gpus = dict.fromkeys(one["machine"]["gpu"] for _, one in panels)
    return save_panels(panels, path, 3, (4.6, 3.6), ", ".join(gpus))
