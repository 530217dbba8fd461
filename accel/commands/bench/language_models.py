"""What benchmarks of a language model share as commands: the model that is named, the run, what it leaves."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from accel.commands.options import parse_device, parse_dtype, quiet, wrong_folder
from accel.progress import progress_bar

if TYPE_CHECKING:
    import torch

MODEL_HELP = "llama-8b, qwen-0.5b ... with random weights, or a folder; an unknown name lists them"
KIND_HELP = "fp16, bf16 or fp32; bf16 on a GPU, fp32 elsewhere"
Stage = Callable[[str], None]


def known_model(model: str, device: str | None, dtype: str | None) -> "tuple[torch.device, torch.dtype]":
    """Where it runs and in what. Raises typer.BadParameter for what is neither a name nor a folder."""
    from accel.bench.llm.configs import CONFIGS

    place = parse_device(device)
    kind = parse_dtype(dtype or ("bf16" if place.type == "cuda" else None), place)
    if model not in CONFIGS and not Path(model).is_dir():
        message = f"{model!r} is neither a folder nor one of {', '.join(CONFIGS)}"
        raise typer.BadParameter(message, param_hint="--model")
    return place, kind


def names_of(given: str | None, valid: tuple[str, ...], option: str) -> tuple[str, ...]:
    """The names of a list with commas. Raises BadParameter with one that is not valid."""
    names = tuple(given.split(",")) if given else ()
    if unknown := [name for name in names if name not in valid]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(valid)}", param_hint=option)
    return names


def run_model(
    model: str,
    place: "torch.device",
    out: Path,
    run: Callable[[Stage, Callable[[dict], Path]], dict],
    show: Callable[[Console, dict], None],
    stages: tuple[str, ...] = (),
) -> None:
    """run(stage, keep): measures. show: prints its tables; what failed or was left out, and the file, come behind."""
    from accel.bench import results
    from accel.bench.machine import slug
    from accel.bench.results import WrongResult

    def keep(result: dict) -> Path:
        return results.save(result, out, slug(place), usual="bfloat16")

    quiet()
    console = Console()
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(stages) or None)

        def stage(now: str) -> None:
            known = {"completed": stages.index(now)} if now in stages else {}
            progress.update(task, description=f"{Path(model).name}: {now}", **known)

        try:
            result = run(stage, keep)
        except WrongResult as error:
            progress.console.print(f"[red]wrong result[/red] {model}: {error}", highlight=False)
            raise typer.Exit(1) from None
        except (TypeError, ValueError, OSError) as error:
            raise wrong_folder(error) from None
    show(console, result)
    for word, rows in (("failed", result["failed"]), ("left out", result["skipped"])):
        for row in rows:
            about = " ".join(filter(None, (row.get("part"), row.get("case"), row.get("variant"))))
            console.print(f"{word}: {about}: {row['reason']}", highlight=False, markup=False)
    console.print(f"wrote {keep(result)}", highlight=False)
