"""`accel bench`: cases of the registry, and models of the user's own."""

import math
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from accel.commands.options import DEVICE_HELP, DTYPE_HELP, parse_device, parse_dtype, quiet, wrong_folder
from accel.options import ACTIVATIONS, SCHEMES, check_activations
from accel.progress import progress_bar

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress, TaskID


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
    ready: Annotated[bool, typer.Option(help="measure a case's time to ready, in fresh processes")] = True,
    seconds: Annotated[float, typer.Option(min=0.01, help="about how long to time each variant")] = 2.0,
    limit: Annotated[
        float | None, typer.Option(min=1.0, help="cases: seconds after which no compiling and no other process begins")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="cases: of accel.optimize, such as int8; stock keeps its own; no time to ready")
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="cases: of accel.optimize, with --weights of the same kind, such as int8")
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
    import torch

    from accel.bench import folder, machine, results, runner
    from accel.errors import logged

    place = parse_device(device)
    kind = parse_dtype(dtype, place)
    folders, chosen = _chosen(cases or [], place)
    usual = {case.name: case.dtype or torch.float16 for case in chosen}
    kinds = {name: one if place.type == "cuda" and dtype is None else kind for name, one in usual.items()}
    given: dict[str, Any] = {"prompt": prompt, "steps": steps, "size": size, "batch": batch}
    if not folders and (without := [name for name, value in given.items() if value is not None]):
        raise typer.BadParameter(f"--{without[0]} is for folders; cases have sizes of their own")
    if weights is not None:
        _checked(weights, folders, chosen)
    if activations is not None:
        _fit(activations, weights, set(kinds.values()))
    compiled = place.type == "cuda" if compiled is None else compiled

    def keep(result: dict, usual: str = "float16") -> Path:
        return results.save(result, out, machine.slug(place), usual)

    def run_case(case: Any, stage: Callable[[str], None]) -> dict:
        given: dict[str, Any] = {"compiled": compiled, "ready": ready, "budget_s": seconds}
        given |= {"weights": weights, "activations": activations, "limit_s": math.inf if limit is None else limit}
        kept = partial(keep, usual=str(usual[case.name]).removeprefix("torch."))
        result = runner.run(case, place, kinds[case.name], **given, stage=stage, keep=kept)
        progress.console.print(f"wrote {kept(result)}", highlight=False)
        return result

    def run_folder(path: Path, stage: Callable[[str], None]) -> dict:
        try:
            result = folder.bench_folder(path, place, kind, **given, budget_s=seconds, stage=stage)
        except (TypeError, ValueError, OSError) as error:
            raise wrong_folder(error) from None
        progress.console.print(f"wrote {keep(result)}", highlight=False)
        return result

    jobs: list[tuple[str, tuple[str, ...], Callable[..., dict], Any]]
    jobs = [(path.name, folder.STAGES, run_folder, path) for path in folders]
    jobs += [(case.name, runner.STAGES, run_case, case) for case in chosen]
    quiet()
    console = Console()
    done: list[dict] = []
    wrong: list[str] = []
    failed: list[tuple[str, str, str]] = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=sum(len(stages) for _, stages, _, _ in jobs))
        for name, stages, run, subject in jobs:
            start = progress.tasks[0].completed
            try:
                result = run(subject, _stage(progress, task, name, stages))
            except runner.WrongResult as error:
                wrong.append(f"{name}: {error}")
            except typer.BadParameter:
                raise
            except Exception as error:  # the next one may run all the same
                traceback.print_exc()
                failed.append((name, "stock", logged(error)))
            else:
                done.append(result)
            progress.update(task, completed=start + len(stages))
    failed += [(result["case"], *item) for result in done for item in result.get("failed", {}).items()]
    _tell(console, done, failed, wrong)
    if wrong or failed:
        raise typer.Exit(1)


def _tell(console: Console, done: list[dict], failed: list[tuple[str, str, str]], wrong: list[str]) -> None:
    """A table of what was measured, and what was not. failed: case, variant and reason."""
    from accel.bench import results

    if done:
        console.print(results.table(done))
    for result in (result for result in done if "lost" in result):
        console.print(results.lost(result), highlight=False)
    beside = {"compile_failed": "torch.compile", "reference_failed": "full precision"}  # which are no failure of ours
    others = [(one["case"], what, one[key]) for one in done for key, what in beside.items() if key in one]
    for case, what, reason in others + failed:
        console.print(f"{case}: {what} failed: {reason}", highlight=False, markup=False)
    for result in (result for result in done if "skipped" in result):
        console.print(f"{result['case']}: no time was left for {', '.join(result['skipped'])}", highlight=False)
    for line in wrong:
        console.print(f"[red]wrong result[/red] {line}", highlight=False)


def _chosen(given: list[str], device: "torch.device") -> tuple[list[Path], list]:
    """Folders and cases; a name is a case's first, so that a folder of that name needs a slash."""
    from accel.bench import cases as registry

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


def _checked(weights: str, folders: list[Path], cases: list) -> None:
    valid = [name for name in SCHEMES if not name.startswith("int4")]
    if weights not in valid:
        raise typer.BadParameter(f"{weights!r} is none of {', '.join(valid)}", param_hint="--weights")
    others = [str(path) for path in folders] + [case.name for case in cases if case.entry != "forward"]
    if others:
        raise typer.BadParameter(f"for cases of denoisers; not for {', '.join(others)}", param_hint="--weights")


def _fit(activations: str, weights: str | None, dtypes: "set[torch.dtype]") -> None:
    import torch

    if activations not in ACTIVATIONS:
        message = f"{activations!r} is none of {', '.join(ACTIVATIONS)}"
    elif weights is None:
        message = f"{activations!r} needs --weights {activations.partition('-')[0]}"
    elif activations == "fp8" and torch.float16 in dtypes:
        message = "'fp8' gives bfloat16: give --dtype bf16"
    else:
        try:
            return check_activations(activations, weights)
        except ValueError as error:
            message = str(error)
    raise typer.BadParameter(message, param_hint="--activations")


def _stage(progress: "Progress", task: "TaskID", name: str, stages: tuple[str, ...]) -> Callable[[str], None]:
    """What a run calls as it gets to each of its stages."""
    start = progress.tasks[0].completed

    def stage(now: str) -> None:
        progress.update(task, description=f"{name}: {now}", completed=start + stages.index(now))

    return stage
