"""`accel bench ready`: seconds until a model is optimized and its first call done, by part."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from accel.commands.options import DEVICE_HELP, parse_device, quiet
from accel.progress import progress_bar

if TYPE_CHECKING:
    from rich.table import Table


def bench_ready(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="of `accel bench llm` or `accel bench`; with +int8, +int4, +fp8 or +batch behind; "
            "or of `accel bench scripts`, with +script behind"
        ),
    ] = None,
    states: Annotated[str, typer.Option(help="of cold, warm and stock, with commas between them")] = "cold,warm,stock",
    limit: Annotated[float, typer.Option(min=1.0, help="seconds that one process may take")] = 180.0,
    profile: Annotated[bool, typer.Option(help="the slowest functions of the calling thread too; slower")] = False,
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path("benchmarks/results"),
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
) -> None:
    """Measure how long accel.optimize and a first call take, in fresh processes; writes JSON.

    Cold is with empty caches, warm with those that the process before left; beyond stock is without what stock's own
    first call takes. +batch is a first call of generate_batch. Random weights are made on the device, which does not
    count. Without names: a small model of each kind. Ends with 1 where one fails.
    """
    from accel.bench import results
    from accel.bench.machine import provenance, slug
    from accel.bench.ready.names import NamedModel
    from accel.bench.ready.states import STATES, measure_states

    place = parse_device(device)
    wanted = tuple(states.split(","))
    usual = ["qwen3-0.6b", "sd15"] if place.type == "cuda" else ["tiny"]
    try:
        chosen = {name: NamedModel.parse(name) for name in names or usual}
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAMES") from None
    if unknown := [state for state in wanted if state not in STATES]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(STATES)}", param_hint="--states")
    quiet()
    console = Console()
    rows: list[dict] = []
    dtypes = {name: asked.dtype(place) for name, asked in chosen.items()}
    result = {"case": "ready", "about": "time to ready, by part, in fresh processes", "rows": rows}
    result |= provenance(place, next(iter(dtypes.values())))
    path = out / f"{slug(place)}-ready.json"
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(chosen))
        for name, dtype in dtypes.items():
            progress.update(task, description=name)
            more = ("--profile",) if profile else ()
            try:
                rows += measure_states(name, place, dtype, wanted, more, lambda: limit).values()
            except RuntimeError as error:
                rows.append({"name": name, "failed": str(error)[-1500:]})
            results.write(result, path)
            progress.advance(task)
    console.print(_table(rows))
    console.print(f"written to {path}")
    if any("failed" in row for row in rows):
        raise typer.Exit(1)


def _table(rows: list[dict]) -> "Table":
    """One line a state; of the parts the three that take longest."""
    from accel.bench.results import cell, new_table

    headings = ("model", "state", "optimize s", "first call s", "ready s", "beyond stock s", "most of it")
    shown = new_table("", *headings, left=2)
    for row in rows:
        if "failed" in row:
            shown.add_row(row["name"], row["failed"].strip().splitlines()[-1])
            continue
        parts = Counter(row.get("parts_of_optimize", {}))
        parts.update(row["parts_of_first_call"])
        most = ", ".join(f"{part.removesuffix('_s')} {took:.1f}" for part, took in parts.most_common(3))
        figures = (row.get(key) for key in ("optimize_s", "first_call_s", "ready_s", "over_stock_s"))
        shown.add_row(row["name"], row["state"], *(cell(one, "{:.2f}") for one in figures), most)
    return shown
