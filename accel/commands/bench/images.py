"""`accel bench`: cases of the registry, and models of the user's own."""

import math
import re
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from accel.commands.options import DEVICE_HELP, DTYPE_HELP, parse_device, parse_dtype, quiet, user_errors, wrong_folder
from accel.options import Options
from accel.progress import progress_bar

if TYPE_CHECKING:
    import torch


def bench(
    cases: Annotated[
        list[str] | None,
        typer.Argument(help="names of cases, or folders with a saved pipeline or model; UNets on a GPU, else tiny"),
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for the JSON files")] = Path("benchmarks/results"),
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="torch.compile too, minutes a case; on a GPU by default"),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="about how long to time each variant")] = 2.0,
    limit: Annotated[float | None, typer.Option(min=1.0, help="cases: seconds after which no compiling begins")] = None,
    weights: Annotated[str | None, typer.Option(help="of accel.optimize, such as int8; stock keeps its own")] = None,
    activations: Annotated[
        str | None, typer.Option(help="of accel.optimize, with --weights of the same kind, such as int8")
    ] = None,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
    prompt: Annotated[str | None, typer.Option(help="folder of a pipeline: what to draw")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="folder of a pipeline: denoising steps; 20")] = None,
    size: Annotated[int | None, typer.Option(min=1, help="folder: pixels of the image, of a UNet's latents")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="folder: images a call")] = None,
) -> None:
    """Time stock, accel and torch.compile, correctness first; writes JSON. Folders are timed stock against accel.

    Cases: sd15, sd15-b16, sd21, sdxl, vae512, vae1024, vae-sdxl, flux, flux512, flux2, sd3, zimage, qwen-image,
    qwen-image-masked, wan, wan-14b, ltx, pixart, hunyuan-video, vae-wan, vae-ltx, vae-hunyuan, tiny.
    """
    from accel.bench import machine, results
    from accel.bench.diffusion import runner, subject
    from accel.errors import logged

    place = parse_device(device)
    kind = parse_dtype(dtype, place)
    folders, chosen = _chosen(cases or [], place)
    kinds = {case.name: case.dtype if place.type == "cuda" and dtype is None else kind for case in chosen}
    given: dict[str, Any] = {"prompt": prompt, "steps": steps, "size": size, "batch": batch}
    if not folders and (without := [name for name, value in given.items() if value is not None]):
        raise typer.BadParameter(f"--{without[0]} is for folders; cases have sizes of their own")
    options: dict[str, Any] = {"weights": weights, "activations": activations}
    options = {name: value for name, value in options.items() if value is not None}
    with user_errors(None, ValueError):
        Options(**options)
    timed: dict[str, Any] = {"budget_s": seconds, "limit_s": math.inf if limit is None else limit, "options": options}
    # Name, what makes it, its dtype and the usual one, and further arguments.
    jobs: list[tuple[str, Callable, Any, Any, dict]] = [
        (_name(path), partial(subject.of_folder, path, place, kind, **given), kind, "float16", {}) for path in folders
    ]
    compiles = place.type == "cuda" if compiled is None else compiled
    for case in chosen:
        more = {"compiled": case if compiles and case.compiled is not None else None}
        usual, own = str(case.dtype).removeprefix("torch."), kinds[case.name]
        jobs.append((case.name, partial(subject.of_case, case, place, own), own, usual, more))
    quiet()
    console = Console()
    done: list[dict] = []
    wrong: list[str] = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(jobs))
        for name, make, own, usual, arguments in jobs:

            def stage(now: str, name: str = name) -> None:
                progress.update(task, description=f"{name}: {now}")

            def keep(result: dict, usual: str = usual) -> Path:
                return results.save(result, out, machine.slug(place), usual)

            try:
                result = runner.run(name, make, place, own, **timed, **arguments, stage=stage, keep=keep)
                progress.console.print(f"wrote {keep(result)}", highlight=False)
                done.append(result)
            except results.WrongResult as error:
                wrong.append(f"{name}: {error}")
            except Exception as error:  # the next one may run all the same
                if not arguments and isinstance(error, (TypeError, ValueError, OSError)):
                    raise wrong_folder(error) from None
                traceback.print_exc()
                done.append({"case": name, "failed": [{"variant": "stock", "reason": logged(error)}], "skipped": []})
            progress.advance(task)
    if measured := [result for result in done if "ready" in result]:
        console.print(results.table(measured))
    for result in done:
        if "weights" in result:
            console.print(f"{result['case']}: PSNR {result['quality']['psnr_db'] or math.inf:.1f} dB from stock")
        for line in results.trouble_lines(result):
            console.print(f"{result['case']}: {line}", highlight=False, markup=False)
    for line in wrong:
        console.print(f"[red]wrong result[/red] {line}", highlight=False)
    # What a compiler does is no failure of ours.
    if wrong or any(row.get("variant") != "compile" for result in done for row in result["failed"]):
        raise typer.Exit(1)


def _name(folder: Path) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", folder.resolve().name).strip("-")


def _chosen(given: list[str], device: "torch.device") -> tuple[list[Path], list]:
    """Folders and cases; a name is a case's first, so that a folder of that name needs a slash."""
    from accel.bench.diffusion import cases as registry

    folders = [Path(name) for name in dict.fromkeys(given) if name not in registry.CASES and Path(name).is_dir()]
    names = [name for name in given if Path(name) not in folders]
    if folders and not names:
        return folders, []
    try:
        return folders, registry.select(names, device)
    except KeyError as error:
        valid = ", ".join(registry.CASES)
        unknown = ", ".join(repr(name) for name in error.args)
        message = f"unknown: {unknown}; give a folder with a saved model, or a case: {valid}"
        raise typer.BadParameter(message, param_hint="CASES") from None
