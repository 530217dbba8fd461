"""`accel bench adapters` and `accel bench formats`: models with LoRAs, or linears of other libraries, beside plain."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from accel.commands.bench.each_model import Cell, measure_each, whole_numbers
from accel.commands.options import DEVICE_HELP, parse_device


def bench_adapters(
    names: Annotated[
        list[str] | None, typer.Argument(help="of `accel bench` or `accel bench llm`; usual ones by default")
    ] = None,
    ranks: Annotated[str, typer.Option(help="ranks of the adapters, with commas between them")] = "16,64",
    counts: Annotated[str, typer.Option(help="how many are active at once, with commas between them")] = "1,3",
    rows: Annotated[int, typer.Option(min=0, help="of a batch of texts, each with an adapter of its own; 0: none")] = 0,
    budget: Annotated[float, typer.Option(min=0.0, help="seconds a variant, about")] = 4.0,
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path("benchmarks/results"),
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
) -> None:
    """Time calls with adapters of low rank against the same model without, in turns; writes JSON.

    Random weights, adapters on every linear of the blocks. Needs peft. Ends with 1 where one fails.
    """
    from accel.bench.adapters import measure_adapters, usual

    place, sizes, many = parse_device(device), whole_numbers(ranks), whole_numbers(counts)
    about = "adapters of low rank, not merged, beside the model without"
    measure = partial(measure_adapters, ranks=sizes, counts=many, rows=rows, budget_s=budget)

    def told(row: dict) -> Iterator[tuple[Cell, ...]]:
        for key, one in row["variants"].items():
            numbers = (one["median_ms"], "{:,.2f}"), (one["ratio"], "{:.3f}"), (one["error"], "{:.1e}")
            yield key, *numbers, str(one.get("switch_ms", ""))

    headings = "adapters x rank", "ms", "ratio", "error", "switch ms"
    measure_each("adapters", about, names or usual(place), place, out, measure, told, *headings)


def bench_formats(
    names: Annotated[
        list[str] | None, typer.Argument(help="of `accel bench` or `accel bench llm`; usual ones by default")
    ] = None,
    formats: Annotated[str, typer.Option(help="with commas between them; all whose packages are installed")] = "",
    budget: Annotated[float, typer.Option(min=0.0, help="seconds a variant, about")] = 4.0,
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path("benchmarks/results"),
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
) -> None:
    """Time models whose linears are in formats of other libraries, by these and by accel, in turns; writes JSON.

    Random weights, converted in place. Ends with 1 where a model, or a format of it, fails.
    """
    from accel.bench.adapters import usual
    from accel.bench.formats import FORMATS, installed_formats, measure_formats

    chosen = formats.split(",") if formats else installed_formats()
    if unknown := [one for one in chosen if one not in FORMATS]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(FORMATS)}")
    measure = partial(measure_formats, formats=chosen, budget_s=budget)

    def told(row: dict) -> Iterator[tuple[Cell, ...]]:
        for key, one in row["formats"].items():
            times = (one.get(variant, {}).get("median_ms") for variant in ("library", "accel", "plain"))
            yield key, *((ms, "{:,.2f}") for ms in times), (one.get("error"), "{:.1e}")

    about = "linears in formats of other libraries, by these and by accel, beside accel with plain weights"
    place = parse_device(device)
    headings = "format", "library ms", "accel ms", "plain ms", "error"
    measure_each("formats", about, names or usual(place), place, out, measure, told, *headings)
