"""Models that a command measures one after the other: progress, a file that grows, a table."""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from accel.commands.options import parse_device, quiet
from accel.progress import progress_bar

if TYPE_CHECKING:
    import torch

Cell = str | tuple[float | None, str]  # words, or a number and its form


def chosen_models(
    names: list[str] | None, device: str | None, known: Collection[str]
) -> "tuple[torch.device, list[str]]":
    """The device, and the names; without names the tiny ones, on a GPU the others. Raises BadParameter."""
    place = parse_device(device)
    if unknown := [one for one in names or () if one not in known]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}")
    return place, names or [one for one in known if one.startswith("tiny") != (place.type == "cuda")]


def whole_numbers(text: str) -> list[int]:
    """Of "1,32". Raises BadParameter for anything else."""
    found = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(found) < len(text.split(",")) or min(found) < 1:
        raise typer.BadParameter("give whole numbers from 1 on, with commas between them")
    return found


def measure_each(
    case: str,
    about: str,
    names: list[str],
    place: "torch.device",
    out: Path,
    measure: "Callable[[str, torch.device], dict | Iterator[dict]]",
    told: Callable[[dict], Iterator[tuple[Cell, ...]]],
    *headings: str,
    left: int = 2,
) -> None:
    """Each model in turn, kept as JSON as it grows; rows of the table are told(row). Ends with 1 where one fails.

    case: of the file's name, and where a row has its parts. measure: gives a row, or it again whenever it has grown.
    headings, left: of the columns behind the model's, and how many, with that, are words.
    Raises KeyError's kin, BadParameter, for an unknown name.
    """
    import torch

    from accel.bench import results
    from accel.bench.machine import provenance, slug
    from accel.errors import Refused, logged, reason_of

    quiet()
    console = Console()
    rows: list[dict] = []
    result: dict = {"case": case, "about": about, "rows": rows}
    path = out / f"{slug(place)}-{case}.json"
    usual_dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            row: dict = {"name": name}
            rows.append(row)
            try:
                made = measure(name, place)
                for more in (made,) if isinstance(made, dict) else made:
                    row |= more
                    results.write(result | provenance(place, usual_dtype), path)
            except KeyError:
                raise typer.BadParameter(f"{name!r} is no model of `accel bench` or `accel bench llm`") from None
            except Exception as error:  # the others are still worth their time
                row["failed"] = logged(error) if isinstance(error, Refused) else reason_of(error, memory=True)
                results.write(result | provenance(place, usual_dtype), path)
            progress.advance(task)
    failed, shown = [], results.new_table("", "model", *headings, left=left)
    for row in rows:
        parts = {row["name"]: row} | {f"{row['name']}, {key}": one for key, one in row.get(case, {}).items()}
        failed += [f"{part}: {one['failed']}" for part, one in parts.items() if "failed" in one]
        for cells in () if "failed" in row and case not in row else told(row):
            name = Path(row["name"]).name  # of a folder; all of its path would leave figures no room
            shown.add_row(name, *(one if isinstance(one, str) else results.cell(*one) for one in cells))
    console.print(shown)
    console.print(f"written to {path}")
    for line in failed:
        console.print(line, markup=False)
    if failed:
        raise typer.Exit(1)
