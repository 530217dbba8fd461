"""`accel bench llm`: a language model's generate(), stock beside accel."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from accel.commands.bench.language_models import KIND_HELP, MODEL_HELP, Stage, known_model, names_of, run_model
from accel.commands.options import DEVICE_HELP
from accel.options import ACTIVATIONS, KV_CACHE, WEIGHTS


def bench_llm(
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    batch: Annotated[str, typer.Option(help="rows of a decode step")] = "1,8,32",
    context: Annotated[str, typer.Option(help="tokens of the prompt: the first with every batch")] = "512,2048,8192",
    new_tokens: Annotated[int, typer.Option(min=2, help="steps a decode time is taken over")] = 64,
    long: Annotated[int, typer.Option(min=1, help="tokens of the past in the part `long`")] = 32768,
    long_batch: Annotated[str, typer.Option(help="rows of the part `long`")] = "1",
    parts: Annotated[
        str | None, typer.Option(help="of decode,prefill,modes,long,memory,stalls,ready; all of them by default")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="decode by stock's static cache under torch.compile too")
    ] = False,
    weights: Annotated[
        str | None, typer.Option(help="schemes of accel.optimize(weights=...) to measure beside, such as int8,int4")
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(help="kinds of accel.optimize(kv_cache=...) to measure beside, alone and with --weights"),
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="kinds of accel.optimize(activations=...), with weights of the same kind")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="after so many, nothing new is begun")] = 280.0,
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path("benchmarks/results"),
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help=KIND_HELP)] = None,
) -> None:
    """Time generate() of a language model stock and with accel, correctness first; writes JSON as it goes.

    Decode steps by batch and context with their share of the memory's bandwidth, prompts, beams, sampling and assisted
    text. A long context, memory, the slowest call of a new shape, and time to ready.
    """
    from accel.bench.llm import results, runner

    place, kind = known_model(model, device, dtype)
    request = runner.BenchRequest(
        model, place, kind, names_of(parts, tuple(runner.PARTS), "--parts") or tuple(runner.PARTS),
        _numbers(batch, "--batch"), _numbers(context, "--context"), new_tokens, long, compiled, seconds,
        names_of(weights, WEIGHTS, "--weights"), names_of(kv_cache, KV_CACHE, "--kv-cache"),
        names_of(activations, ACTIVATIONS, "--activations"), _numbers(long_batch, "--long-batch"),
    )  # fmt: skip

    def run(stage: Stage, keep: Callable[[dict], object]) -> dict:
        return runner.bench_language_model(request, stage, keep)

    run_model(model, place, out, run, lambda console, result: console.print(*results.tables(result)), runner.STAGES)


def _numbers(given: str, option: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in given.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{given!r}: give numbers with commas between, such as 1,8,32", param_hint=option)
    return found
