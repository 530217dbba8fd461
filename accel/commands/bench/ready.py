"""`accel bench ready`: seconds until a model is optimized and its first call done, by part."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from accel.commands.options import DEVICE_HELP, parse_device, quiet
from accel.progress import progress_bar


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
    from accel.bench.machine import provenance, slug
    from accel.bench.ready.states import STATES, check_name, dtype_for, measure_states

    place = parse_device(device)
    chosen = names or (["qwen3-0.6b", "sd15"] if place.type == "cuda" else ["tiny"])
    wanted = tuple(states.split(","))
    try:
        for name in chosen:
            check_name(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAMES") from None
    if unknown := [state for state in wanted if state not in STATES]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(STATES)}", param_hint="--states")
    quiet()
    console, failed = Console(), []
    kept: list[dict] = []
    result = {"case": "ready", "about": "time to ready, by part, in fresh processes", "rows": kept}
    result |= provenance(place, dtype_for(chosen[0], place))
    path = out / f"{slug(place)}-ready.json"
    out.mkdir(parents=True, exist_ok=True)
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(chosen))
        for name in chosen:
            progress.update(task, description=name)
            more = ("--profile",) if profile else ()
            try:
                rows = measure_states(name, place, dtype_for(name, place), wanted, more, lambda: limit)
            except RuntimeError as error:
                failed.append(name)
                rows = {"failed": {"name": name, "failed": str(error)[-1500:]}}
            kept += rows.values()
            path.write_text(json.dumps(result, indent=2) + "\n")
            progress.advance(task)
    console.print(_table(kept))
    console.print(f"written to {path}")
    if failed:
        raise typer.Exit(1)


def _table(rows: list[dict]) -> Table:
    """One line a state; of the parts the three that take longest."""
    shown = Table("model", "state", "optimize s", "first call s", "ready s", "beyond stock s", "most of it")
    for row in rows:
        if "failed" in row:
            shown.add_row(row["name"], row["failed"].strip().splitlines()[-1])
            continue
        parts: dict[str, float] = {}
        for found in (row.get("parts_of_optimize", {}), row["parts_of_first_call"]):
            for part, took in found.items():
                parts[part] = parts.get(part, 0.0) + took
        longest = sorted(parts, key=parts.__getitem__, reverse=True)[:3]
        most = ", ".join(f"{part.removesuffix('_s')} {parts[part]:.1f}" for part in longest)
        figures = (row.get("optimize_s"), row["first_call_s"], row["ready_s"], row.get("over_stock_s"))
        shown.add_row(row["name"], row["state"], *("-" if one is None else f"{one:.2f}" for one in figures), most)
    return shown
