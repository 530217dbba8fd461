"""`accel profile`: where a token's time goes."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from accel.commands.bench.language_models import KIND_HELP, known_model
from accel.commands.options import DEVICE_HELP, JSON_HELP, quiet, user_errors
from accel.progress import progress_bar

if TYPE_CHECKING:
    from rich.table import Table


def profile(
    model: Annotated[str, typer.Argument(help="a folder with a causal language model, or llama-8b, qwen-0.5b ...")],
    batch: Annotated[int, typer.Option(min=1, help="rows of the step")] = 1,
    context: Annotated[int, typer.Option(min=1, help="tokens before it")] = 512,
    stock: Annotated[bool, typer.Option("--stock", help="of the model as it is, without accel")] = False,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help=KIND_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Show where the time of a language model's decode step goes, beside the least that its bytes would take."""
    from accel.bench.llm.models import build
    from accel.bench.llm.profile import profile as measure

    place, kind = known_model(model, device, dtype, "MODEL")
    quiet()
    console = Console()
    with progress_bar(console) as progress:
        progress.add_task(model, total=None)
        with user_errors():
            result = measure(build(model, place, kind), place, batch, context, stock=stock)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    for table in _tables(model, result):
        console.print(table)
    for row in result["fallbacks"]:
        console.print(f"ran stock: {row['path'] or 'whole model'}, {row['calls']} calls: {row['reason']}", markup=False)


def _tables(model: str, result: dict) -> "Iterator[Table]":
    from accel.bench.results import new_table

    bound, step, spent = result["bound_ms"], result["step_ms"], sum(row["ms"] for row in result["rows"])
    on_gpu = result["machine"]["gpu"] is not None
    whole = step if on_gpu else spent  # a CPU is slower while it is watched
    title = (
        f"{model}: {result['about']}: {step:.3f} ms, {result['token_ms']:.3f} ms a token under generate(); at "
        f"{result['copy_bandwidth_gb_s']:,.0f} GB/s its bytes take {bound:.3f} ms, {bound / step:.0%} of that"
    )
    calls = "launches" if on_gpu else "calls"
    table = new_table(title, "part", "ms", "of all", calls, "MB read", "least ms", "of its ms")
    for row in result["rows"]:
        share = f"{row['least_ms'] / row['ms']:.0%}" if row["ms"] else "-"
        cells = (f"{row['ms']:.3f}", f"{row['ms'] / whole:.0%}", f"{row['launches']:g}", f"{row['mb']:,.1f}")
        table.add_row(row["part"], *cells, f"{row['least_ms']:.3f}", share)
    if on_gpu:
        between = "gaps between" if step >= spent else "overlap"
        table.add_row(between, f"{step - spent:.3f}", f"{(step - spent) / step:.0%}", "", "", "", "")
    yield table
    table = new_table("what ran", "kernel or operation", "us a step", "launches")
    for row in result["kernels"]:
        table.add_row(row["name"], f"{row['us']:.1f}", f"{row['launches']:g}")
    yield table
