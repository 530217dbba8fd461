"""`accel bench scripts`: scripts as people write them, stock beside accel."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from accel.commands.options import DEVICE_HELP, parse_device, quiet
from accel.progress import progress_bar


def bench_scripts(
    names: Annotated[
        list[str] | None, typer.Argument(help="scripts, or how their names begin; all of them by default")
    ] = None,
    budget: Annotated[float, typer.Option(min=0.0, help="seconds a script, about")] = 20.0,
    total: Annotated[float, typer.Option(min=1.0, help="after so many seconds no script is begun")] = 900.0,
    size: Annotated[
        str | None, typer.Option(help="real for published sizes, tiny for a smoke run; real on a GPU, tiny elsewhere")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for the JSON file, which keeps rows of other scripts")] = Path(
        "benchmarks/results"
    ),
    plot: Annotated[Path | None, typer.Option(help="draw the ratios into this file; needs matplotlib")] = None,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
) -> None:
    """Run some forty scripts of images, text, speech and embeddings whole, stock and accel in turns; writes JSON.

    Random weights; correctness first. A script that fails is a row with its error, one whose packages or GPUs are
    missing is left out with the reason. Ends with 1 where one fails or is slower than 0.97 of stock's speed.
    """
    from accel.bench.machine import slug
    from accel.bench.scripts import results
    from accel.bench.scripts.registry import SCRIPTS, find_scripts
    from accel.bench.scripts.runner import run_scripts
    from accel.bench.scripts.script import Size

    place = parse_device(device)
    if size not in (None, "real", "tiny"):
        raise typer.BadParameter(f"{size!r} is neither real nor tiny", param_hint="--size")
    try:
        chosen = find_scripts(names or [])
    except KeyError as error:
        unknown = ", ".join(map(repr, error.args))
        raise typer.BadParameter(f"unknown: {unknown}; give of {', '.join(SCRIPTS)}", param_hint="NAMES") from None
    quiet()
    console = Console()
    path = out / f"{slug(place)}-scripts.json"
    tiny = size == "tiny" or (size is None and place.type != "cuda")
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(chosen))

        def stage(name: str) -> None:
            progress.update(task, description=name)

        def keep(result: dict) -> None:
            results.save_rows(result, path)
            progress.advance(task)
            console.print(results.line(result["rows"][-1]), highlight=False, markup=False)

        done = run_scripts(chosen, Size(place, tiny), budget, total, stage, keep)
    console.print(results.rows_table(done["rows"]))
    console.print(f"wrote {path}", highlight=False)
    if plot is not None:
        from accel.bench.scripts.plot import save_ratios

        save_ratios(json.loads(path.read_text()), plot)
        console.print(f"wrote {plot}", highlight=False)
    slow = [] if tiny else results.below(done["rows"])
    if slow or any("failed" in row for row in done["rows"]):
        raise typer.Exit(1)
