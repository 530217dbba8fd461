"""Pictures of image models: the time of a pass, and what each mechanism gives."""

from pathlib import Path

from matplotlib import pyplot as plt

from accel.bench.diffusion.cases import CASES
from benchmarks.plots.style import BAR, COLORS, as_bars, grouped, results, save, save_panels

LABELS = {"stock": "diffusers", "compile": "torch.compile", "accel": "accel"}
ORDER = list(CASES)
LEAST_SHOWN, MOST_SHOWN = 0.005, 1.0  # of the whole time: bars of an ablation below and above


def passes(folder: Path) -> list[dict]:
    """What `accel bench` measured of a forward pass, in the order of ORDER, new cases last; of plain weights alone."""
    found = [one for stem, one in results(folder).items() if _one_pass(one) and stem.endswith(f"-{one['case']}")]
    rank = {name: number for number, name in enumerate(ORDER)}
    found = [one for one in found if not one.get("weights")]
    return sorted(found, key=lambda result: (result["machine"]["gpu"], rank.get(result["case"], len(rank))))


def _one_pass(result: dict) -> bool:
    """Other studies write `stock` too."""
    stock = result.get("stock")
    return isinstance(stock, dict) and "median_ms" in stock


def draw(found: list[dict], gpu: str, axes) -> None:
    """One group of bars a case, all scaled to stock, so that a case of 5 ms and one of 90 ms are both readable."""
    for place, result in enumerate(found):
        stock = result["stock"]["median_ms"]
        present = [name for name in LABELS if name in result]
        times = [result[name]["median_ms"] for name in present]
        texts = [f"{ms:.1f} ms" + f"   {stock / ms:.2f}x" * (name != "stock")
                 for name, ms in zip(present, times, strict=True)]  # fmt: skip
        grouped(axes, place, present, [ms / stock for ms in times], texts)
    as_bars(axes, [_label(result) for result in found], 1.22, 10)
    axes.set_ylim(len(found) - 0.45, -0.55)
    axes.set_title(f"One pass, shorter is better ({gpu})", loc="left", fontsize=12)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in LABELS]
    place = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.01)}
    axes.legend(handles, LABELS.values(), **place, ncols=3, frameon=False, fontsize=10)


def _label(result: dict) -> str:
    model, *size = result["about"].split(", ")
    dtype = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[result["dtype"]]
    return f"{model}\n{', '.join(size)}, {dtype}"


def save_speed(folder: Path, path: Path) -> bool:
    """Whether there was something to draw; so of all pictures."""
    found = passes(folder)
    gpus = list(dict.fromkeys(result["machine"]["gpu"] for result in found))
    if not gpus:
        return False
    groups = [[result for result in found if result["machine"]["gpu"] == gpu] for gpu in gpus]
    counts = [len(group) for group in groups]
    figure, panels = plt.subplots(
        len(gpus), figsize=(9, sum(counts) * 0.85 + 0.9 * len(gpus)), squeeze=False, height_ratios=counts
    )
    for gpu, group, axes in zip(gpus, groups, panels[:, 0], strict=True):
        draw(group, gpu, axes)
    figure.tight_layout()
    save(figure, path, 160)
    return True


def draw_ablation(result: dict, axes) -> None:
    """A bar a mechanism: time without it as a multiple of the time with everything; long ones are cut off."""
    _, whole, *rows = result["rows"]
    noise = max(LEAST_SHOWN * whole["ms"], *(-2 * row["gain_ms"] for row in rows))  # nothing can cost less than none
    shown = [row for row in rows if row["gain_ms"] > noise]
    shown.sort(key=lambda row: -row["gain_ms"])
    for place, row in enumerate(shown):
        share = row["gain_ms"] / whole["ms"]
        axes.barh(place, min(share, MOST_SHOWN), BAR, color=COLORS["accel"])
        text = f"+{row['gain_ms']:.2f} ms" + (f"  (x{1 + share:.1f})" if share > MOST_SHOWN else "")
        axes.text(min(share, MOST_SHOWN) + 0.01, place, text, va="center", fontsize=9)
    as_bars(axes, [row["without"] for row in shown], 1.4 * MOST_SHOWN)
    about = f"{result['about']}: {whole['ms']:.2f} ms; what leaving one mechanism out costs"
    place = {"xycoords": ("figure fraction", "axes fraction"), "xytext": (8, 0), "textcoords": "offset points"}
    axes.annotate(f"{about} ({result['machine']['gpu']})", (0, 1.04), **place)


def save_ablations(folder: Path, path: Path) -> bool:
    found = sorted(results(folder, "*-ablation.json").values(), key=lambda result: ORDER.index(result["case"]))
    return save_panels([(draw_ablation, result) for result in found], path, 1, (9, 2.9))


def draw_adapters(found: list[tuple[str, dict]], axes) -> None:
    """A bar a number of adapters and rank: the time of a call as a multiple of that without any."""
    for place, (_, one) in enumerate(found):
        axes.barh(place, one["ratio"], BAR, color=COLORS["accel"])
        axes.text(
            one["ratio"] + 0.01, place, f"{one['ratio']:.2f}   {one['median_ms']:.1f} ms", va="center", fontsize=9
        )
    as_bars(axes, [label for label, _ in found], 1.2 * max(one["ratio"] for _, one in found))
    axes.axvline(1, color="black", linewidth=1)
    axes.set_title("A call with LoRAs that are not merged; 1 is the same without", loc="left", fontsize=10)


def save_adapters(folder: Path, path: Path) -> bool:
    found = []
    for result in results(folder, "*-adapters.json").values():
        where = f"{result['machine']['gpu'].split(' ')[1]}, {result['commit'][:8]}"
        for row in result["rows"]:
            variants = ((key, one) for key, one in row.get("variants", {}).items() if "plain" not in key)
            found += [(f"{row['name']}, {key} ({where})", one) for key, one in variants]
    found.sort(key=lambda pair: pair[0])
    return bool(found) and save_panels([(draw_adapters, found)], path, 1, (9, 0.4 * len(found) + 0.6))
