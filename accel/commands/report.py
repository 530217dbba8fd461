"""`accel report`."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from accel.commands.options import (
    DEVICE_HELP,
    DTYPE_HELP,
    JSON_HELP,
    load_folder,
    parse_device,
    parse_dtype,
    parse_folder,
    user_errors,
)
from accel.progress import progress_bar

if TYPE_CHECKING:
    from rich.table import Table


def report(
    folder: Annotated[Path, typer.Argument(help="a diffusers pipeline or model, or a transformers model, saved here")],
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="time each model with and without each mechanism: ms and MB of each")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """List every site of a saved model: sped up or skipped, by which rule, and why."""
    parse_folder(folder)
    import accel

    place = parse_device(device)
    kind = parse_dtype(dtype, place)
    console = Console()
    with progress_bar(console) as progress:
        task = progress.add_task(f"loading {folder}", total=None)
        loaded = load_folder(folder, kind, place)
        measured = _measured(loaded, lambda name: progress.update(task, description=name)) if measure else {}
        progress.update(task, description="optimizing")
        with user_errors("FOLDER", TypeError, ValueError):
            found = accel.report(accel.optimize(loaded))
    if as_json:
        print(json.dumps(found.to_dict() | ({"mechanisms": measured} if measure else {}), indent=2))
        return
    console.print(found)
    for name, rows in measured.items():
        console.print(_mechanisms(name, rows))


def _measured(loaded: Any, at: Callable[[str], None]) -> dict[str, list[dict]]:
    """Every mechanism of every model whose inputs are known, by the model's name."""
    from accel.bench.ablation import ablate
    from accel.diffusion.inputs import denoiser_inputs
    from accel.planning.targets import models_in

    def without(name: str, mechanism: str) -> None:
        at(f"{name} without {mechanism}")

    found = {}
    for name, model in models_in(loaded).items():
        try:
            inputs = denoiser_inputs(model)
        except TypeError:
            continue  # nothing is known of what it takes
        call = partial(model, **inputs)
        found[name] = list(ablate(model, call, at=partial(without, name)))
    return found


def _mechanisms(name: str, rows: list[dict]) -> "Table":
    from rich.table import Table

    stock, whole, *others = rows
    title = f"{name or 'model'}: stock {stock['ms']:.2f} ms, optimized {whole['ms']:.2f} ms; what each mechanism gives"
    table = Table("mechanism", "ms", "MB", title=title, title_justify="left")
    for row in sorted(others, key=lambda row: -row["gain_ms"]):
        memory = "-" if row["peak_mb"] is None else f"{row['peak_mb'] - whole['peak_mb']:+.0f}"
        table.add_row(row["without"], f"{row['gain_ms']:+.2f}", memory)
    return table
