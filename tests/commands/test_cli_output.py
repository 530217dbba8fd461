"""What commands show before they are done, and what they do without loading a library of models."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import accel
from accel.progress import bar, progress_bar
from support.command_line import run_command

ROOT = Path(__file__).parents[2]
TEXT_ENCODER = ROOT / "examples" / "models" / "tiny-sd-digits" / "text_encoder"
HELPED = """
import sys
from typer.testing import CliRunner
from accel.commands.app import app
commands = ("", "report", "verify", "bench", "bench llm", "demo", "quantize")
codes = [CliRunner().invoke(app, [*command.split(), "--help"]).exit_code for command in commands]
wrong = (["reprot"], ["report"], ["report", "no-such-folder"], ["verify", "no-such-folder"], ["bench", "--sise", "1"])
codes += [CliRunner().invoke(app, arguments).exit_code for arguments in wrong]
print(codes, sorted({"torch", "diffusers", "transformers", "numpy"} & set(sys.modules)))
"""


def test_help_and_typos_load_neither_torch_nor_a_model_library():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run([sys.executable, "-c", HELPED], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == f"{[0] * 7 + [2] * 5} []", done.stderr


def test_stages_are_lines_on_the_error_stream_where_there_is_no_terminal():
    result = run_command("report", TEXT_ENCODER, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[:2] == [f"loading {TEXT_ENCODER}", "optimizing"]
    assert json.loads(result.stdout)["sites"]


def test_a_stage_is_told_when_it_begins_and_once(capsys):
    told = io.StringIO()
    with progress_bar(Console(file=told)) as progress:
        task = progress.add_task("loading", total=2)
        assert capsys.readouterr().err == "loading\n"
        progress.update(task, description="timing")
        progress.update(task, description="timing", advance=1)
        progress.advance(task)
        assert capsys.readouterr().err == "timing\n"
        assert progress.tasks[0].completed == 2
    assert told.getvalue() == ""


def test_a_terminal_has_the_bar_alone(capsys):
    told = io.StringIO()
    with progress_bar(Console(file=told, force_terminal=True)) as progress:
        progress.add_task("loading", total=2)
        progress.refresh()
    assert "loading" in told.getvalue() and capsys.readouterr().err == ""


def test_a_bar_counts_in_lines(capsys):
    with bar("quantizing") as at:
        at(0, 2)
        at(1, 2)
        at(1, 2)
    assert capsys.readouterr().err.splitlines() == ["quantizing", "quantizing: 0 of 2", "quantizing: 1 of 2"]


@pytest.mark.parametrize("command", ["report", "verify", "bench"])
@pytest.mark.parametrize("text", ['{"architectures": ', "[]"])
def test_a_broken_configuration_is_named(tmp_path, command, text):
    (tmp_path / "config.json").write_text(text)
    result = run_command(command, tmp_path, "--device", "cpu")
    assert result.exit_code == 2
    assert "config.json" in "".join(result.output.split("\n"))


def test_a_report_of_what_is_not_optimized_says_so():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9}
    model = LlamaForCausalLM(LlamaConfig(hidden_size=8, **sizes)).eval()
    assert "not optimized" in str(accel.report(model)) and "not optimized" in accel.report(model).summary()
    assert accel.report(model).sites == []
    with torch.no_grad():
        accel.optimize(model)
    assert isinstance(model, nn.Module) and "not optimized" not in str(accel.report(model))
    assert "not optimized" in str(accel.report(accel.restore(model)))
