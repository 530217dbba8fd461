"""The command `accel`. Whatever loads model libraries is imported inside the command that needs it."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

app = typer.Typer(
    help="Speeds up diffusers and transformers code: accel.optimize(pipe).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

DEVICE_HELP = "cuda, cuda:1, cpu ...; a GPU if there is one"
DTYPE_HELP = "fp16, bf16 or fp32; fp16 on a GPU, fp32 elsewhere"


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _device(name: str | None):
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise typer.BadParameter(str(error).split("\n")[0], param_hint="--device") from None
    return device


def _dtype(name: str | None, device):
    import torch

    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    name = name or ("fp16" if device.type == "cuda" else "fp32")
    if name not in dtypes:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(dtypes)}", param_hint="--dtype")
    return dtypes[name]


def _quiet() -> None:
    """Hugging Face's loading bars would run across ours, and its hints are not about us; this process is ours alone."""
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()


@app.command()
def demo(
    model: Annotated[Path | None, typer.Option(help="a pipeline folder; examples/models/tiny-sd-digits")] = None,
    out: Annotated[Path, typer.Option(help="where to write the picture")] = Path("accel-demo.png"),
    steps: Annotated[int, typer.Option(min=1, help="denoising steps a picture")] = 30,
    seed: Annotated[int, typer.Option(help="seed of the first digit; the others follow")] = 0,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
) -> None:
    """Draw ten digits stock and optimised from the same seeds, and compare them."""
    from accel import demo as drawing

    try:
        folder = drawing.find_model(model)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None
    place = _device(device)
    kind = _dtype(dtype, place)
    _quiet()
    console = Console()
    with _progress(console) as progress:
        comparison = drawing.run(folder, place, kind, steps=steps, seed=seed, progress=progress)
    comparison.picture().save(out)
    comparison.show(console)
    console.print(f"Picture: {out}", highlight=False)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="a diffusers pipeline or model, or a transformers model, saved here")],
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """List every site of a saved model: sped up or skipped, by which rule, and why."""
    from accel import saved

    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is not a folder", param_hint="FOLDER")
    place = _device(device)
    kind = _dtype(dtype, place)
    _quiet()
    console = Console()
    try:
        with _progress(console) as progress:
            task = progress.add_task(f"loading {folder}", total=None)
            loaded = saved.load(folder, kind, place)
            progress.update(task, description="optimising")
            found = _report(loaded)
    except (TypeError, ValueError, OSError) as error:
        raise typer.BadParameter(str(error).split("\n")[0], param_hint="FOLDER") from None
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        console.print(found)


def _report(loaded):
    import accel

    return accel.report(accel.optimize(loaded))


@app.command()
def bench(
    cases: Annotated[
        list[str] | None, typer.Argument(help="names of cases; all of them on a GPU, tiny elsewhere")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for the JSON files")] = Path("benchmarks/results"),
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="torch.compile too, minutes a case; on a GPU by default"),
    ] = None,
    ready: Annotated[bool, typer.Option(help="measure the time to ready, in fresh processes")] = True,
    seconds: Annotated[float, typer.Option(min=0.01, help="about how long to time each variant")] = 2.0,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
) -> None:
    """Time stock, accel and torch.compile side by side, correctness first; writes JSON."""
    from accel.bench import cases as registry
    from accel.bench import machine, results, runner

    place = _device(device)
    kind = _dtype(dtype, place)
    try:
        chosen = registry.select(cases or [], place)
    except KeyError as error:
        valid = ", ".join(registry.CASES)
        unknown = ", ".join(repr(name) for name in error.args)
        raise typer.BadParameter(f"unknown: {unknown}; the cases are {valid}", param_hint="CASES") from None
    compiled = place.type == "cuda" if compiled is None else compiled
    _quiet()
    console = Console()
    done, wrong = [], []
    with _progress(console) as progress:
        task = progress.add_task("", total=len(chosen) * len(runner.STAGES))
        for number, case in enumerate(chosen):
            stages = iter(range(number * len(runner.STAGES), (number + 1) * len(runner.STAGES)))

            def stage(name, case=case, stages=stages):
                progress.update(task, description=f"{case.name}: {name}", completed=next(stages))

            try:
                result = runner.run(case, place, kind, compiled=compiled, ready=ready, budget_s=seconds, stage=stage)
            except runner.WrongResult as error:
                wrong.append(f"{case.name}: {error}")
                continue
            done.append(result)
            progress.console.print(f"wrote {results.save(result, out, machine.slug(place))}", highlight=False)
    if done:
        console.print(results.table(done))
    for failed in (result for result in done if "compile_failed" in result):
        console.print(
            f"{failed['case']}: torch.compile failed: {failed['compile_failed']}", highlight=False, markup=False
        )
    for line in wrong:
        console.print(f"[red]wrong result[/red] {line}", highlight=False)
    if wrong:
        raise typer.Exit(1)
