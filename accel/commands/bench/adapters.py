"""`accel bench adapters`: a model with LoRAs that are not merged beside itself without."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from accel.commands.options import DEVICE_HELP, parse_device, quiet
from accel.progress import progress_bar


def bench_adapters(
    names: Annotated[
        list[str] | None, typer.Argument(help="of `accel bench` or `accel bench llm`; usual ones by default")
    ] = None,
    ranks: Annotated[str, typer.Option(help="ranks of the adapters, with commas between them")] = "16,64",
    counts: Annotated[str, typer.Option(help="how many are active at once, with commas between them")] = "1,3",
    budget: Annotated[float, typer.Option(min=0.0, help="seconds a variant, about")] = 4.0,
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path("benchmarks/results"),
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
) -> None:
    """Time calls with adapters of low rank against the same model without, in turns; writes JSON.

    Random weights, adapters on every linear of the blocks. Needs peft. Ends with 1 where one fails.
    """
    import torch

    from accel.bench import results
    from accel.bench.adapters import measure_adapters, usual
    from accel.bench.machine import provenance, slug
    from accel.errors import reason_of

    place = parse_device(device)
    try:
        sizes, many = ([int(part) for part in text.split(",")] for text in (ranks, counts))
        if min(*sizes, *many, 1) < 1:
            raise ValueError
    except ValueError:
        raise typer.BadParameter("give whole numbers from 1 on, with commas between them") from None
    quiet()
    console = Console()
    rows: list[dict] = []
    about = "adapters of low rank, not merged, beside the model without"
    result: dict = {"case": "adapters", "about": about, "rows": rows}
    path = out / f"{slug(place)}-adapters.json"
    chosen, usual_dtype = names or usual(place), torch.bfloat16 if place.type == "cuda" else torch.float32
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(chosen))
        for name in chosen:
            progress.update(task, description=name)
            try:
                rows.append(measure_adapters(name, place, sizes, many, budget))
            except KeyError:
                raise typer.BadParameter(f"{name!r} is no model of `accel bench` or `accel bench llm`") from None
            except Exception as error:  # the others are still worth their time
                rows.append({"name": name, "failed": reason_of(error)})
            results.write(result | provenance(place, usual_dtype), path)
            progress.advance(task)
    shown = results.new_table("", "model", "adapters x rank", "ms", "ratio", "error", "switch ms", left=2)
    for row in rows:
        for key, one in row.get("variants", {}).items():
            numbers = (one["median_ms"], "{:,.2f}"), (one["ratio"], "{:.3f}"), (one["error"], "{:.1e}")
            shown.add_row(row["name"], key, *(results.cell(*pair) for pair in numbers), str(one.get("switch_ms", "")))
    console.print(shown)
    console.print(f"written to {path}")
    if failed := [row for row in rows if "failed" in row]:
        for row in failed:
            console.print(f"{row['name']}: {row['failed']}", markup=False)
        raise typer.Exit(1)
