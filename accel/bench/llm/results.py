"""A language model's results as tables."""

from collections.abc import Iterator

from rich.table import Table

from accel.bench.llm.interleaved import case_name

HEADINGS = {
    "ms_step": ("ms/token", "{:.2f}"),
    "tok_s": ("tok/s", "{:,.0f}"),
    "ms": ("ms", "{:.1f}"),
    "tflop_s": ("TFLOP/s", "{:.0f}"),
    "share_of_bandwidth": ("of bound", "{:.0%}"),
    "first_s": ("first s", "{:.2f}"),
}


def tables(result: dict) -> Iterator[Table]:
    """One table a part that was measured."""
    parts = result["parts"]
    for part in ("decode", "prefill", "modes", "long"):
        if parts.get(part):
            yield _in_turns(part, parts[part])
    others = ((_memory, parts.get("memory")), (_stalls, parts.get("stalls")), (_ready, parts.get("ready")))
    for table, rows in (*others, (_quantized, result.get("quantized"))):
        if rows:
            yield table(rows)


def _table(title: str, *headings: str, left: int = 1) -> Table:
    shown = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if number < left else "right", no_wrap=number < left)
    return shown


def _in_turns(part: str, rows: list[dict]) -> Table:
    # of bound: the least time of its bytes by its time. first s: the first call of this shape.
    present = [key for key in HEADINGS if any(key in row[name] for row in rows for name in _names(row))]
    shown = _table(part, "", "variant", *(HEADINGS[key][0] for key in present), "speed-up", left=2)
    main = "ms" if part == "prefill" else "ms_step"
    for row in rows:
        about = {key: value for key, value in row.items() if key not in (*_names(row), "new tokens")}
        about = {"mode": about["mode"]} if "mode" in about else about
        names = _names(row)
        for name in names:
            cells = [HEADINGS[key][1].format(row[name][key]) if key in row[name] else "-" for key in present]
            ratio = f"{row['stock'][main] / row[name][main]:.2f}x" if "stock" in row else "-"
            label = case_name(about) if name == names[0] else ""
            style = "bold" if name.startswith("accel") else None
            shown.add_row(label, name, *cells, ratio, style=style, end_section=name == names[-1])
    return shown


def _names(row: dict) -> list[str]:
    """Of the variants that were measured, the compiler behind stock."""
    names = [name for name, value in row.items() if isinstance(value, dict)]
    return sorted(names, key=lambda name: ("stock", "compile").index(name) if name in ("stock", "compile") else 2)


def _memory(rows: list[dict]) -> Table:
    shown = _table("peak memory of a call, MiB", "", "stock", "accel", "keys and values", "weights")
    for row in rows:
        peaks = [f"{row[name]['allocated']:,.0f}" if row[name] else "-" for name in ("stock", "accel")]
        label = f"batch {row['batch']}, context {row['context']}, new tokens {row['new tokens']}"
        shown.add_row(label, *peaks, f"{row['kv_mb']:,.0f}", f"{row['weights_mb']:,.0f}")
    return shown


def _stalls(rows: list[dict]) -> Table:
    shown = _table("the worst first or second call of a new shape", "", "s beyond its steady time", "batch", "context")
    for row in rows:
        call = row["worst_call"]
        shown.add_row(row["variant"], f"{row['worst_s']:.3f}", str(call["batch"]), str(call["context"]))
    return shown


def _ready(rows: dict[str, dict]) -> Table:
    shown = _table("time to ready in a fresh process, s", "", "ready", "optimize", "first call", "a later call")
    for name, row in rows.items():
        shown.add_row(name, *(f"{row[key]:.2f}" for key in ("ready_s", "optimize_s", "first_call_s", "steady_call_s")))
    return shown


def _quantized(rows: dict[str, dict]) -> Table:
    shown = _table(
        "quantized", "", "s to quantize", "MiB of weights", "SQNR dB", "bytes a token", "KL", "same top token"
    )
    for name, row in rows.items():
        formats = {"mb": "{:,.0f}", "sqnr_db": "{:.1f}", "token_bytes": "{:,d}"}
        cells = (text.format(row[key]) if key in row else "-" for key, text in formats.items())
        shown.add_row(name, f"{row['quantize_s']:.1f}", *cells, f"{row['kl']:.1e}", f"{row['top1']:.1%}")
    return shown
