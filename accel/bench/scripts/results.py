"""Rows of scripts as a file, as lines and as a table."""

import json
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table

from accel.bench.results import cell, new_table, write

LEAST_RATIO = 0.97  # of stock's speed, for every script
KEPT = ("about", "dtype", "machine")  # what files share whose rows are of one kind


def least(rows: Iterable[dict]) -> dict | None:
    """The script of the smallest ratio, and that; None where none was timed."""
    timed = [row for row in rows if "ratio" in row]
    worst = min(timed, key=lambda row: row["ratio"], default=None)
    return worst and {"script": worst["script"], "ratio": worst["ratio"]}


def below(rows: Iterable[dict]) -> list[dict]:
    """The rows that are slower than they may be."""
    return [row for row in rows if row.get("ratio", 1.0) < LEAST_RATIO]


def save_rows(result: dict, path: Path) -> None:
    """Writes the result. Rows of other scripts that lie there stay, where machine, versions and sizes are the same."""
    rows = {row["script"]: row for row in _earlier(result, path)}
    for row in result["rows"]:
        if "left_out" not in row or row["script"] not in rows:
            rows[row["script"]] = row
    write(result | {"rows": list(rows.values()), "least": least(rows.values())}, path, indent=1)


def _earlier(result: dict, path: Path) -> list[dict]:
    try:
        before = json.loads(path.read_text())
        return before["rows"] if all(before[key] == result[key] for key in KEPT) else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def line(row: dict) -> str:
    """A row in words, as soon as it is known."""
    name = row["script"]
    if "left_out" in row:
        return f"{name}: left out, {row['left_out']}"
    if "failed" in row:
        return f"{name}: failed, {row['failed']}"
    why = "" if row["path"] == "graphs" else _why(row)
    times = f"stock {row['stock']['least_ms']:,.1f} ms, accel {row['accel']['least_ms']:,.1f}"
    return f"{name}: {row['ratio']:.2f}x ({times}; ready {row['ready_s']:.1f} s; {row['path']}{why})"


def _why(row: dict) -> str:
    reasons = [told["reason"] for kind in ("ran_stock", "skipped") for told in row[kind]] + row["no_graph"]
    return f": {reasons[0]}" if reasons else ""


def rows_table(rows: list[dict]) -> Table:
    """The rows that were timed, the slowest first; how many others there are stands in the title."""
    timed = sorted((row for row in rows if "ratio" in row), key=lambda row: row["ratio"])
    others = {word: sum(kind in row for row in rows) for kind, word in (("failed", "failed"), ("left_out", "left out"))}
    title = ", ".join([f"{len(timed)} timed", *(f"{count} {word}" for word, count in others.items() if count)])
    if worst := least(rows):
        title += f"; least {worst['ratio']:.2f}x, {worst['script']}"
    shown = new_table(title, "script", "stock ms", "accel ms", "ratio", "peak MiB", "accel MiB", "ready s", "path")
    for row in timed:
        sides = [row[side] for side in ("stock", "accel")]
        shown.add_row(
            row["script"],
            *(f"{side['least_ms']:,.1f}" for side in sides),
            f"{row['ratio']:.2f}x",
            *(cell(side["peak_mb"], "{:,.0f}") for side in sides),
            f"{row['ready_s']:.1f}",
            row["path"],
            style="red" if row["ratio"] < LEAST_RATIO else None,
        )
    return shown
