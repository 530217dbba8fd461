"""The command `accel`."""

from typing import Any

import typer
from typer.core import TyperGroup

from accel.commands.bench.adapters import bench_adapters, bench_formats
from accel.commands.bench.coverage import coverage
from accel.commands.bench.encoders import bench_encoders, bench_pictures, bench_speech, bench_vision
from accel.commands.bench.images import bench
from accel.commands.bench.language_models import bench_llm
from accel.commands.bench.ready import bench_ready
from accel.commands.bench.scripts import bench_scripts
from accel.commands.demo import demo
from accel.commands.doctor import doctor
from accel.commands.memory import bench_memory, plan
from accel.commands.quantize import quantize
from accel.commands.report import report
from accel.commands.serve import PASSED_ON, serve
from accel.commands.shard import shard
from accel.commands.verify import verify


class TwoWords(TyperGroup):
    """Commands whose name may be two words: `accel bench llm`, beside `accel bench`, which takes names of cases."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = " ".join(args[:2])
        return (name, self.commands[name], args[2:]) if name in self.commands else super().resolve_command(ctx, args)


app = typer.Typer(
    cls=TwoWords,
    help="Speeds up diffusers and transformers code: accel.optimize(pipe).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def show_versions(wanted: bool) -> None:
    """Prints the versions of accel and of the libraries it works on, and the GPU; ends the command."""
    if not wanted:
        return
    import torch

    import accel
    from accel.libraries.versions import TESTED, installed, newer_than_tested

    typer.echo(f"accel {accel.__version__}")
    for package, (oldest, newest) in TESTED.items():
        typer.echo(f"{package} {installed(package) or 'not installed'} (tested: {oldest} to {newest})")
    typer.echo(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")
    for sentence in newer_than_tested():
        typer.echo(sentence)
    raise typer.Exit


@app.callback()
def about(
    version: bool = typer.Option(False, "--version", callback=show_versions, is_eager=True, help="Show versions."),
) -> None:
    """Speeds up diffusers and transformers code: accel.optimize(pipe)."""


for command in (demo, doctor, report, plan, verify, coverage, quantize, shard, bench):
    app.command()(command)
app.command("bench llm")(bench_llm)
app.command(context_settings=PASSED_ON)(serve)
app.command("bench scripts")(bench_scripts)
app.command("bench ready")(bench_ready)
app.command("bench adapters")(bench_adapters)
app.command("bench formats")(bench_formats)
app.command("bench memory")(bench_memory)
app.command("bench encoders")(bench_encoders)
app.command("bench vision")(bench_vision)
app.command("bench pictures")(bench_pictures)
app.command("bench speech")(bench_speech)
