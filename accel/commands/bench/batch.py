"""`accel bench batch`: a language model's generate_batch(), stock beside accel."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from accel.commands.bench.language_models import KIND_HELP, MODEL_HELP, Stage, known_model, names_of, run_model
from accel.commands.options import DEVICE_HELP
from accel.options import KV_CACHE, WEIGHTS


def bench_batch(
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    workloads: Annotated[
        str | None, typer.Option(help="names with commas between; an unknown one lists them; all by default")
    ] = None,
    lossy: Annotated[
        str, typer.Option(help="weights and kv_cache of accel.optimize to measure beside, or none")
    ] = "int8,int8",
    most_tokens: Annotated[
        int | None, typer.Option(min=8, help="shorten workloads to so many tokens a request, as for a small model")
    ] = None,
    stock_seconds: Annotated[
        float,
        typer.Option(
            min=0.1, help="about how long stock may take at each workload; it gets fewer requests and new tokens"
        ),
    ] = 20.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="after so many, nothing new is begun")] = 500.0,
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path("benchmarks/results"),
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help=KIND_HELP)] = None,
) -> None:
    """Time generate_batch() of a language model stock and with accel, correctness first; writes JSON as it goes.

    Requests of different lengths, many short ones, long answers, long prompts, a shared prompt; what a call costs
    besides its tokens, and whether memory grows.
    """
    from accel.bench.llm import batch_runner
    from accel.bench.llm.workloads import WORKLOADS

    place, kind = known_model(model, device, dtype)
    known = tuple(one.name for one in WORKLOADS)
    chosen = names_of(workloads, known, "--workloads") or known
    request = batch_runner.BatchRequest(model, place, kind, chosen, stock_seconds, seconds, _lossy(lossy), most_tokens)

    def run(stage: Stage, keep: Callable[[dict], object]) -> dict:
        return batch_runner.bench_batches(request, stage, keep)

    run_model(model, place, out, run, lambda console, result: console.print(_table(result)))


def _lossy(given: str) -> tuple[str, str] | None:
    if given == "none":
        return None
    weights, _, kv_cache = given.partition(",")
    if weights not in WEIGHTS or kv_cache not in KV_CACHE:
        message = f"{given!r}: give one of {', '.join(WEIGHTS)}, a comma, and one of {', '.join(KV_CACHE)}; or none"
        raise typer.BadParameter(message, param_hint="--lossy")
    return weights, kv_cache


def _table(result: dict) -> Table:
    shown = Table(title=f"{result['about']}: new tokens a second", title_justify="left")
    for heading in ("workload", "requests", "prompt", "new"):
        shown.add_column(heading, justify="left" if heading == "workload" else "right")
    names = list(dict.fromkeys(name for row in result["rows"] for name in row if isinstance(row[name], dict)))
    for name in names:
        shown.add_column(name, justify="right")
    for row in result["rows"]:
        cells = [f"{row[name]['tok_s']:,.0f}" if name in row else "-" for name in names]
        about = [str(row[key]) for key in ("workload", "requests", "prompt tokens", "new tokens")]
        shown.add_row(*about, *cells)
    return shown
