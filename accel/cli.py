"""The command `accel`."""

import typer

from accel.commands.bench import bench
from accel.commands.demo import demo
from accel.commands.report import report
from accel.commands.verify import verify

app = typer.Typer(
    help="Speeds up diffusers and transformers code: accel.optimize(pipe).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

for command in (demo, report, verify, bench):
    app.command()(command)
