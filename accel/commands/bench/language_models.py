"""`accel bench llm` and `accel bench batch`: a language model's generate() and generate_batch(), stock beside accel."""

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from accel.bench.llm.request import BatchRequest, LlmRequest
from accel.commands.options import DEVICE_HELP, parse_device, parse_dtype, quiet, wrong_folder
from accel.progress import progress_bar

if TYPE_CHECKING:
    import torch
    from rich.table import Table

KIND_HELP = "fp16, bf16 or fp32; bf16 on a GPU, fp32 elsewhere"
WHERE = {
    "out": (Annotated[Path, typer.Option(help="folder for the JSON file")], Path("benchmarks/results")),
    "device": (Annotated[str | None, typer.Option(help=DEVICE_HELP)], None),
    "dtype": (Annotated[str | None, typer.Option(help=KIND_HELP)], None),
}


def known_model(model: str, device: str | None, dtype: str | None, option: str) -> "tuple[torch.device, torch.dtype]":
    """Where it runs and in what. Raises BadParameter, of this option, for what is neither a name nor a folder."""
    from accel.bench.llm.configs import CONFIGS

    place = parse_device(device)
    kind = parse_dtype(dtype or ("bf16" if place.type == "cuda" else None), place)
    if model not in CONFIGS and not Path(model).is_dir():
        raise typer.BadParameter(f"{model!r} is neither a folder nor one of {', '.join(CONFIGS)}", param_hint=option)
    return place, kind


def asking(request: type) -> Callable[[Callable], Callable]:
    """Makes a command of a function of (request, out, device, dtype): its options are the fields of the request."""
    hints = get_type_hints(request, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    own = inspect.signature(request).parameters
    fields = [one.replace(kind=kind, annotation=hints[name]) for name, one in own.items()]
    fields += [inspect.Parameter(name, kind, default=default, annotation=one) for name, (one, default) in WHERE.items()]

    def decorate(run: Callable[..., None]) -> Callable:
        def command(**given: Any) -> None:
            where = {name: given.pop(name) for name in WHERE}
            run(request(**given), **where)

        command.__signature__ = inspect.Signature(fields)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in fields}
        command.__doc__ = run.__doc__
        return command

    return decorate


@asking(LlmRequest)
def bench_llm(request: LlmRequest, out: Path, device: str | None, dtype: str | None) -> None:
    """Time generate() of a language model stock and with accel, correctness first; writes JSON as it goes.

    Decode steps by batch and context with their share of the memory's bandwidth, prompts, beams, sampling and assisted
    text. A long context, memory, the slowest call of a new shape, and time to ready.
    """
    from accel.bench.llm import tables
    from accel.bench.llm.runner import STAGES, bench_language_model

    _run(request, out, device, dtype, bench_language_model, tables.generate_tables, STAGES)


@asking(BatchRequest)
def bench_batch(request: BatchRequest, out: Path, device: str | None, dtype: str | None) -> None:
    """Time generate_batch() of a language model stock and with accel, correctness first; writes JSON as it goes.

    Requests of different lengths, many short ones, long answers, long prompts, a shared prompt; what a call costs
    besides its tokens, and whether memory grows.
    """
    from accel.bench.llm import tables
    from accel.bench.llm.batch import bench_batches

    _run(request, out, device, dtype, bench_batches, tables.batch_tables)


def _run(
    request: BatchRequest | LlmRequest,
    out: Path,
    device: str | None,
    dtype: str | None,
    measure: Callable[..., dict],
    tables: "Callable[[dict], Iterable[Table]]",
    stages: tuple[str, ...] = (),
) -> None:
    """Measures, prints the tables, then what failed or was left out, and the file."""
    from accel.bench import results
    from accel.bench.machine import slug

    place, kind = known_model(request.model, device, dtype, "--model")

    def keep(result: dict) -> Path:
        return results.save(result, out, slug(place), usual="bfloat16")

    quiet()
    console = Console()
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(stages) or None)

        def stage(now: str) -> None:
            known = {"completed": stages.index(now)} if now in stages else {}
            progress.update(task, description=f"{request.name}: {now}", **known)

        try:
            result = measure(request, place, kind, stage, keep)
        except results.WrongResult as error:
            progress.console.print(f"[red]wrong result[/red] {request.model}: {error}", highlight=False)
            raise typer.Exit(1) from None
        except (TypeError, ValueError, OSError) as error:
            raise wrong_folder(error) from None
    console.print(*tables(result))
    for line in results.trouble_lines(result):
        console.print(line, highlight=False, markup=False)
    console.print(f"wrote {keep(result)}", highlight=False)
