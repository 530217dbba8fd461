"""`accel bench ready`: seconds until a model is optimized and its first call done, by part."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accel.commands.bench.each_model import Cell, measure_each
from accel.commands.options import DEVICE_HELP, parse_device

if TYPE_CHECKING:
    import torch


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
    more = ("--profile",) * profile

    def measure(name: str, place: "torch.device") -> dict:
        try:
            return {"ready": measure_states(name, place, chosen[name].dtype(place), wanted, more, limit)}
        except RuntimeError as error:
            return {"failed": str(error)[-1500:]}

    def told(row: dict) -> Iterator[tuple[Cell, ...]]:
        for state, one in row["ready"].items():
            parts = Counter(one.get("parts_of_optimize", {}))
            parts.update(one["parts_of_first_call"])
            most = ", ".join(f"{part.removesuffix('_s')} {took:.1f}" for part, took in parts.most_common(3))
            figures = (one.get(key) for key in ("optimize_s", "first_call_s", "ready_s", "over_stock_s"))
            yield state, *((figure, "{:.2f}") for figure in figures), most

    about = "time to ready, by part, in fresh processes"
    headings = "state", "optimize s", "first call s", "ready s", "beyond stock s", "most of it"
    measure_each("ready", about, list(chosen), place, out, measure, told, *headings)
