"""Draws speed, ablation, decode, quantized, batches and scripts.png in docs/images from results: `make plots`."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import plot_batches
import plot_quantized
from matplotlib import pyplot as plt

from accel.bench.scripts import plot as plot_scripts

ROOT = Path(__file__).parents[1]
VARIANTS = {"stock": ("#b8bec6", "diffusers"), "compile": ("#6f9bd1", "torch.compile"), "accel": ("#e4572e", "accel")}
LABELS = {"stock": "transformers", "compile": "static cache, compiled", "accel": "accel"}
GENERATING = {name: (color, LABELS[name]) for name, (color, _) in VARIANTS.items()}
ORDER = (
    "sd15", "sd15-b16", "sd21", "sdxl", "vae512", "vae1024", "vae-sdxl", "flux", "flux512", "flux2", "sd3", "zimage",
    "qwen-image", "qwen-image-masked", "wan", "wan-14b", "ltx", "pixart", "hunyuan-video", "vae-wan",
    "vae-ltx", "vae-hunyuan",
)  # fmt: skip
LEAST_SHOWN, MOST_SHOWN = 0.005, 1.0  # of the whole time: bars of an ablation below and above
BAR = 0.8  # of the height of a case, shared by its bars


def load(folder: Path) -> list[dict]:
    """The results of real cases on a GPU, in the order of ORDER, new cases last; of plain weights alone."""
    found = [(path.stem, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    results = [one for stem, one in found if _one_pass(one) and stem.endswith(f"-{one['case']}")]  # not earlier ones
    results = [one for one in results if one["machine"]["gpu"] and not one.get("weights")]
    rank = {name: number for number, name in enumerate(ORDER)}
    return sorted(results, key=lambda result: (result["machine"]["gpu"], rank.get(result["case"], len(rank))))


def _one_pass(result: dict) -> bool:
    """Whether it is what `accel bench` measured of a forward pass; other scripts write `stock` too."""
    stock = result.get("stock")
    return isinstance(stock, dict) and "median_ms" in stock


def draw(results: list[dict], gpu: str, axes) -> None:
    """One group of bars a case, all scaled to stock, so that a case of 5 ms and one of 90 ms are both readable."""
    height = BAR / len(VARIANTS)
    for row, result in enumerate(results):
        stock = result["stock"]["median_ms"]
        present = [name for name in VARIANTS if name in result]
        for number, name in enumerate(present):
            ms = result[name]["median_ms"]
            y = row + (number - (len(present) - 1) / 2) * height
            axes.barh(y, ms / stock, height * 0.92, color=VARIANTS[name][0])
            ratio = "" if name == "stock" else f"   {stock / ms:.2f}x"
            weight = "bold" if name == "accel" else "normal"
            axes.text(ms / stock + 0.01, y, f"{ms:.1f} ms{ratio}", va="center", fontsize=9, weight=weight)
    axes.set_yticks(range(len(results)), [_label(result) for result in results], fontsize=10)
    axes.set_ylim(len(results) - 0.45, -0.55)
    axes.set_xlim(0, 1.22)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)
    axes.set_title(f"One pass, shorter is better ({gpu})", loc="left", fontsize=12)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color, _ in VARIANTS.values()]
    names = [name for _, name in VARIANTS.values()]
    axes.legend(handles, names, loc="upper center", bbox_to_anchor=(0.45, -0.01), ncols=3, frameon=False, fontsize=10)


def _label(result: dict) -> str:
    model, *size = result["about"].split(", ")
    dtype = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[result["dtype"]]
    return f"{model}\n{', '.join(size)}, {dtype}"


def ablations(folder: Path) -> list[dict]:
    """What leaving each mechanism out costs, one result a case, in the order of ORDER."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*-ablation.json"))]
    return sorted((r for r in results if r["machine"]["gpu"]), key=lambda r: ORDER.index(r["case"]))


def draw_ablation(result: dict, axes) -> None:
    """A bar a mechanism: time without it as a multiple of the time with everything; long ones are cut off."""
    _, whole, *rows = result["rows"]
    noise = max(LEAST_SHOWN * whole["ms"], *(-2 * row["gain_ms"] for row in rows))  # nothing can cost less than none
    shown = [row for row in rows if row["gain_ms"] > noise]
    shown.sort(key=lambda row: row["gain_ms"])
    for place, row in enumerate(shown):
        share = row["gain_ms"] / whole["ms"]
        axes.barh(place, min(share, MOST_SHOWN), BAR, color=VARIANTS["accel"][0])
        text = f"+{row['gain_ms']:.2f} ms" + (f"  (x{1 + share:.1f})" if share > MOST_SHOWN else "")
        axes.text(min(share, MOST_SHOWN) + 0.01, place, text, va="center", fontsize=9)
    axes.set_yticks(range(len(shown)), [row["without"] for row in shown], fontsize=9)
    axes.set_xlim(0, 1.4 * MOST_SHOWN)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)
    title = (
        f"{result['about']}: {whole['ms']:.2f} ms; what leaving one mechanism out costs ({result['machine']['gpu']})"
    )
    axes.annotate(
        title, (0, 1.04), xycoords=("figure fraction", "axes fraction"), xytext=(8, 0), textcoords="offset points"
    )


def generations(folder: Path) -> list[dict]:
    """Results of `accel bench llm` on a GPU, the largest model first; of files named after their case, without -2."""
    files = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*-llm-*.json"))}
    results = [result for path, result in files.items() if path.stem.endswith(result["case"])]
    results = [result for result in results if result["machine"]["gpu"] and result["parts"].get("decode")]
    return sorted(results, key=lambda result: -result["sizes"]["parameters"])


def draw_decode(result: dict, panels) -> None:
    """Tokens a second against batch and against context, and the share of the memory's speed."""
    rows = result["parts"]["decode"]
    first = rows[0]["context"]
    by_batch = sorted((row for row in rows if row["context"] == first), key=lambda row: row["batch"])
    alone = [row for row in (*rows, *result["parts"].get("long", [])) if row.get("batch", 1) == 1]
    by_context = sorted(alone, key=lambda row: row["context"])
    lines = (
        (panels[0], "batch", by_batch, "tok_s", f"tokens/s, context {first}"),
        (panels[1], "context", by_context, "tok_s", "tokens/s, batch 1"),
    )
    for axes, key, points, figure, title in lines:
        for name, (color, label) in GENERATING.items():
            x, y = _line(points, name, key, figure)
            if not x:
                continue
            axes.plot(x, y, "o-", color=color, label=label, linewidth=2.5 if name == "accel" else 1.5, markersize=4)
        axes.set_xscale("log", base=2)
        values = sorted({point[key] for point in points})
        axes.set_xticks(values, [f"{value // 1024}k" if value >= 1024 else str(value) for value in values], fontsize=8)
        axes.set_xlabel(key, fontsize=9)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yscale("log")
    x, y = _line(by_context, "accel", "context", "tok_s")
    shares = _line(by_context, "accel", "context", "share_of_bandwidth")[1]
    panels[1].plot(x, [rate / share for rate, share in zip(y, shares, strict=True)], "k--", linewidth=1, label="bound")
    panels[1].set_ylim(bottom=0)
    panels[1].set_visible(len(by_context) > 1)
    panels[1].legend(frameon=False, fontsize=8)
    panels[0].legend(frameon=False, fontsize=8)
    _shares(by_batch + [row for row in by_context if row not in by_batch], panels[2])
    model, gpu = result["case"].removeprefix("llm-"), result["machine"]["gpu"]
    title = panels[0].annotate(
        f"{model}, {result['dtype']}, generate() ({gpu})", (0, 1.17), xycoords="axes fraction", fontsize=12
    )
    title.set_in_layout(False)  # it may lie over the next panel's head
    for x, y in zip(*_line(by_batch, "accel", "batch", "tok_s"), strict=True):
        panels[0].annotate(
            f"{y:,.0f}", (x, y), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8, weight="bold"
        )


def _line(rows: list[dict], variant: str, key: str, figure: str) -> tuple[list, list]:
    points = [(row[key], row[variant][figure]) for row in rows if variant in row]
    return [x for x, _ in points], [y for _, y in points]


def _shares(rows: list[dict], axes) -> None:
    """A group of bars a case: the least time of its bytes at the speed of a copy, by the time it took."""
    height = BAR / len(GENERATING)
    for place, row in enumerate(rows):
        present = [name for name in GENERATING if name in row]
        for number, name in enumerate(present):
            y = place + (number - (len(present) - 1) / 2) * height
            share = row[name]["share_of_bandwidth"]
            axes.barh(y, share, height * 0.9, color=GENERATING[name][0])
            axes.text(share + 0.01, y, f"{share:.0%}", va="center", fontsize=7)
    labels = [f"batch {row.get('batch', 1)}, {row['context']} tokens" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)
    axes.set_title("share of the memory's speed", loc="left", fontsize=10)


def save_decode(results: list[dict], path: Path) -> None:
    figure, panels = plt.subplots(
        len(results), 3, figsize=(12, 3.6 * len(results)), squeeze=False, width_ratios=(1, 1, 1.1)
    )
    for result, row in zip(results, panels, strict=True):
        draw_decode(result, row)
    figure.tight_layout(h_pad=3.5, rect=(0, 0, 1, 1 - 0.3 / (3.6 * len(results))))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "speed.png")
    options = parser.parse_args()
    results, generating = load(options.results), generations(options.results)
    quantized = plot_quantized.save(options.results, options.out.with_name("quantized.png"))
    quantized |= plot_batches.save(options.results, options.out.with_name("batches.png"))
    for path in sorted(options.results.glob("*-scripts.json")):
        result = json.loads(path.read_text())
        if result["machine"]["gpu"]:
            plot_scripts.save_ratios(result, options.out.with_name("scripts.png"))
    if generating:
        save_decode(generating, options.out.with_name("decode.png"))
    if not results:
        if generating or quantized:
            return
        raise SystemExit(f"no results of a GPU in {options.results}: run `make bench` on one first")
    gpus = list(dict.fromkeys(result["machine"]["gpu"] for result in results))
    groups = [[result for result in results if result["machine"]["gpu"] == gpu] for gpu in gpus]
    counts = [len(group) for group in groups]
    figure, panels = plt.subplots(
        len(gpus), figsize=(9, sum(counts) * 0.85 + 0.9 * len(gpus)), squeeze=False, height_ratios=counts
    )
    for gpu, group, axes in zip(gpus, groups, panels[:, 0], strict=True):
        draw(group, gpu, axes)
    figure.tight_layout()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=160)
    print(f"wrote {options.out}")
    left_out = ablations(options.results)
    if left_out:
        figure, panels = plt.subplots(len(left_out), figsize=(9, 2.9 * len(left_out)), squeeze=False)
        for result, axes in zip(left_out, panels[:, 0], strict=True):
            draw_ablation(result, axes)
        figure.tight_layout()
        path = options.out.with_name("ablation.png")
        figure.savefig(path, dpi=130)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
