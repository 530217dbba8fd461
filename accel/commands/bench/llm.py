"""`accel bench llm`: a language model's generate(), stock beside accel."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from accel.commands.options import DEVICE_HELP, parse_device, parse_dtype, quiet, wrong_folder
from accel.options import ACTIVATIONS, KV_CACHE, WEIGHTS
from accel.progress import progress_bar


def bench_llm(
    model: Annotated[
        str, typer.Option(help="llama-8b, qwen-0.5b ... with random weights, or a folder; an unknown name lists them")
    ],
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
    dtype: Annotated[str | None, typer.Option(help="fp16, bf16 or fp32; bf16 on a GPU, fp32 elsewhere")] = None,
) -> None:
    """Time generate() of a language model stock and with accel, correctness first; writes JSON as it goes.

    Decode steps by batch and context with their share of the memory's bandwidth, prompts, beams, sampling, assisted
    text, a long context, memory, the slowest call of a new shape, and time to ready.
    """
    from accel.bench import results as files
    from accel.bench.llm import results, runner
    from accel.bench.llm.configs import CONFIGS
    from accel.bench.machine import slug

    place = parse_device(device)
    kind = parse_dtype(dtype or ("bf16" if place.type == "cuda" else None), place)
    if model not in CONFIGS and not Path(model).is_dir():
        message = f"{model!r} is neither a folder nor one of {', '.join(CONFIGS)}"
        raise typer.BadParameter(message, param_hint="--model")
    chosen = tuple(runner.PARTS if parts is None else parts.split(","))
    if unknown := [part for part in chosen if part not in runner.PARTS]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(runner.PARTS)}", param_hint="--parts")
    sizes = (_numbers(batch, "--batch"), _numbers(context, "--context"), new_tokens, long)
    schemes, caches = _names(weights, WEIGHTS, "--weights"), _names(kv_cache, KV_CACHE, "--kv-cache")
    rounded = _names(activations, ACTIVATIONS, "--activations")
    request = runner.BenchRequest(model, place, kind, chosen, *sizes, compiled, seconds, schemes, caches, rounded,
                             _numbers(long_batch, "--long-batch"))  # fmt: skip
    quiet()
    console = Console()
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(runner.STAGES))

        def stage(now: str) -> None:
            known = {"completed": runner.STAGES.index(now)} if now in runner.STAGES else {}
            progress.update(task, description=f"{request.name}: {now}", **known)

        def keep(result: dict) -> Path:
            return files.save(result, out, slug(place), usual="bfloat16")

        try:
            result = runner.bench_language_model(request, stage, keep)
        except runner.WrongResult as error:
            progress.console.print(f"[red]wrong result[/red] {model}: {error}", highlight=False)
            raise typer.Exit(1) from None
        except (TypeError, ValueError, OSError) as error:
            raise wrong_folder(error) from None
    for table in results.tables(result):
        console.print(table)
    for row in result["failed"]:
        words = " ".join(filter(None, (row["part"], row["case"], row["variant"])))
        console.print(f"failed: {words}: {row['reason']}", highlight=False, markup=False)
    for row in result["skipped"]:
        console.print(f"left out: {row['part']} {row['case']}: {row['reason']}", highlight=False, markup=False)
    console.print(f"wrote {keep(result)}", highlight=False)


def _names(given: str | None, valid: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(given.split(",")) if given else ()
    if unknown := [name for name in names if name not in valid]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(valid)}", param_hint=option)
    return names


def _numbers(given: str, option: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in given.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{given!r}: give numbers with commas between, such as 1,8,32", param_hint=option)
    return found
