"""`accel bench batch`: a language model's generate_batch(), stock beside accel."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from accel.commands.options import DEVICE_HELP, parse_device, parse_dtype, quiet, wrong_folder
from accel.options import KV_CACHE, WEIGHTS
from accel.progress import progress_bar


def bench_batch(
    model: Annotated[
        str, typer.Option(help="llama-8b, qwen-0.5b ... with random weights, or a folder; an unknown name lists them")
    ],
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
    dtype: Annotated[str | None, typer.Option(help="fp16, bf16 or fp32; bf16 on a GPU, fp32 elsewhere")] = None,
) -> None:
    """Time generate_batch() of a language model stock and with accel, correctness first; writes JSON as it goes.

    Requests of different lengths, many short ones, long answers, long prompts, a shared prompt; what a call costs
    besides its tokens, and whether memory grows.
    """
    from accel.bench import results as files
    from accel.bench.llm import batch_runner
    from accel.bench.llm.configs import CONFIGS
    from accel.bench.llm.workloads import WORKLOADS
    from accel.bench.machine import slug

    place = parse_device(device)
    kind = parse_dtype(dtype or ("bf16" if place.type == "cuda" else None), place)
    if model not in CONFIGS and not Path(model).is_dir():
        message = f"{model!r} is neither a folder nor one of {', '.join(CONFIGS)}"
        raise typer.BadParameter(message, param_hint="--model")
    known = tuple(one.name for one in WORKLOADS)
    chosen = known if workloads is None else tuple(workloads.split(","))
    if unknown := [one for one in chosen if one not in known]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}", param_hint="--workloads")
    request = batch_runner.BatchRequest(model, place, kind, chosen, stock_seconds, seconds, _lossy(lossy), most_tokens)
    quiet()
    console = Console()

    def keep(result: dict) -> Path:
        return files.save(result, out, slug(place), usual="bfloat16")

    with progress_bar(console) as progress:
        task = progress.add_task("", total=None)
        try:
            result = batch_runner.bench_batches(request, lambda now: progress.update(task, description=now), keep)
        except batch_runner.WrongResult as error:
            progress.console.print(f"[red]wrong result[/red] {model}: {error}", highlight=False)
            raise typer.Exit(1) from None
        except (TypeError, ValueError, OSError) as error:
            raise wrong_folder(error) from None
    console.print(_table(result))
    for row in result["failed"]:
        console.print(f"failed: {row['case']}: {row['reason']}", highlight=False, markup=False)
    for row in result["skipped"]:
        console.print(f"left out, no time: {row}", highlight=False, markup=False)
    console.print(f"wrote {keep(result)}", highlight=False)


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
