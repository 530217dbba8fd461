"""Commands as a user gives them, in this process."""

from pathlib import Path

from typer.testing import CliRunner

from accel.commands.app import app

DIGITS = Path(__file__).parents[2] / "examples" / "models" / "tiny-sd-digits"
TRANSFORMER_DIGITS = DIGITS.parent / "tiny-dit-digits"
CALL = ("--device", "cpu", "--prompt", "a handwritten two", "--steps", "3")


def run_command(*arguments):
    runner = CliRunner(env={"TERM": "dumb", "COLUMNS": "160"})
    return runner.invoke(app, [str(argument) for argument in arguments])
