"""A language model's results as tables."""

from collections.abc import Iterator

from rich.table import Table

from accel.bench.llm.cases import case_name
from accel.bench.results import cell, new_table

# of bound: the least time of its bytes by its time. first s: the first call of this shape.
HEADINGS = {
    "ms_step": ("ms/token", "{:.2f}"),
    "tok_s": ("tok/s", "{:,.0f}"),
    "ms": ("ms", "{:.1f}"),
    "tflop_s": ("TFLOP/s", "{:.0f}"),
    "share_of_bandwidth": ("of bound", "{:.0%}"),
    "first_s": ("first s", "{:.2f}"),
}
READY = {"ready_s": "ready", "optimize_s": "optimize", "first_call_s": "first call", "steady_call_s": "a later call"}
QUANTIZED = {
    "quantize_s": ("s to quantize", "{:.1f}"),
    "mb": ("MiB of weights", "{:,.0f}"),
    "sqnr_db": ("SQNR dB", "{:.1f}"),
    "token_bytes": ("bytes a token", "{:,d}"),
    "kl": ("KL", "{:.1e}"),
    "top1": ("same top token", "{:.1%}"),
}


def generate_tables(result: dict) -> Iterator[Table]:
    """One table a part that was measured."""
    parts = result["parts"]
    for part in ("decode", "prefill", "modes", "long"):
        if parts.get(part):
            yield _in_turns(part, parts[part])
    if rows := parts.get("memory"):
        shown = new_table("peak memory of a call, MiB", "", "stock", "accel", "keys and values", "weights")
        for row in rows:
            peaks = [f"{row[name]['allocated']:,.0f}" if row[name] else "-" for name in ("stock", "accel")]
            label = f"batch {row['batch']}, context {row['context']}, new tokens {row['new tokens']}"
            shown.add_row(label, *peaks, f"{row['kv_mb']:,.0f}", f"{row['weights_mb']:,.0f}")
        yield shown
    if rows := parts.get("stalls"):
        title = "the worst first or second call of a new shape"
        shown = new_table(title, "", "s beyond its steady time", "batch", "context")
        for row in rows:
            call = row["worst_call"]
            shown.add_row(row["variant"], f"{row['worst_s']:.3f}", str(call["batch"]), str(call["context"]))
        yield shown
    if ready := parts.get("ready"):
        shown = new_table("time to ready in a fresh process, s", "", *READY.values())
        for name, row in ready.items():
            shown.add_row(name, *(f"{row[key]:.2f}" for key in READY))
        yield shown
    if quantized := result.get("quantized"):
        shown = new_table("quantized", "", *(heading for heading, _ in QUANTIZED.values()))
        for name, row in quantized.items():
            shown.add_row(name, *(cell(row.get(key), form) for key, (_, form) in QUANTIZED.items()))
        yield shown


def _in_turns(part: str, rows: list[dict]) -> Table:
    present = [key for key in HEADINGS if any(key in row[name] for row in rows for name in _names(row))]
    shown = new_table(part, "", "variant", *(HEADINGS[key][0] for key in present), "speed-up", left=2)
    main = "ms" if part == "prefill" else "ms_step"
    for row in rows:
        names = _names(row)
        about = {key: value for key, value in row.items() if key not in (*names, "new tokens")}
        about = {"mode": about["mode"]} if "mode" in about else about
        for name in names:
            cells = [cell(row[name].get(key), HEADINGS[key][1]) for key in present]
            ratio = f"{row['stock'][main] / row[name][main]:.2f}x" if "stock" in row else "-"
            label = case_name(about) if name == names[0] else ""
            style = "bold" if name.startswith("accel") else None
            shown.add_row(label, name, *cells, ratio, style=style, end_section=name == names[-1])
    return shown


def _names(row: dict) -> list[str]:
    """Of the variants that were measured, the compiler behind stock."""
    names = [name for name, value in row.items() if isinstance(value, dict)]
    return sorted(names, key=lambda name: ("stock", "compile").index(name) if name in ("stock", "compile") else 2)


def batch_tables(result: dict) -> Iterator[Table]:
    """New tokens a second, a row a workload."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row if isinstance(row[name], dict)))
    shown = new_table(f"{result['about']}: new tokens a second", "workload", "requests", "prompt", "new", *names)
    for row in result["rows"]:
        about = [str(row[key]) for key in ("workload", "requests", "prompt tokens", "new tokens")]
        shown.add_row(*about, *(cell(row.get(name, {}).get("tok_s"), "{:,.0f}") for name in names))
    yield shown
