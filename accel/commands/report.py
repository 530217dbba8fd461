"""`accel report`."""

import json
from pathlib import Path
from typing import Annotated

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


def report(
    folder: Annotated[Path, typer.Argument(help="a diffusers pipeline or model, or a transformers model, saved here")],
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
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
        progress.update(task, description="optimizing")
        with user_errors("FOLDER", TypeError, ValueError):
            found = accel.report(accel.optimize(loaded))
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    console.print(found)
