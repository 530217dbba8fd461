"""`accel quantize`: its table, its exit codes, what it refuses, and going on after Ctrl-C."""

import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import accel as library
from accel import progress
from accel.commands.app import app
from accel.llm.ptq import run as running
from accel.llm.ptq.calibration.batches import windows
from support.everything import EVERYTHING
from support.noted import noted

LM = Path(__file__).parents[2] / "examples" / "models" / "tiny-lm"
TEXT = LM / "held_out.txt"


def accel(*arguments: str):
    environment = {"TERM": "dumb", "COLUMNS": "160"}
    return CliRunner(env=environment).invoke(app, ["quantize", *map(str, arguments), "--device", "cpu"])


def interrupted(results, after: int = 2):
    for number, result in enumerate(results):
        if number == after:
            raise KeyboardInterrupt
        yield result


@pytest.fixture
def text(tmp_path):
    """A short one."""
    file = tmp_path / "text.txt"
    file.write_text(TEXT.read_text()[:1000])
    return file


def test_it_saves_the_model_and_shows_what_it_did(tmp_path, text):
    out = tmp_path / "out"
    result = accel(LM, "--scheme", "int4-g64", "--method", "rtn", "--calibration", text, "--out", out)
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    least, name, lost, middle = re.search(
        r"SQNR (\S+) dB at least \((\S+), (\S+)% of what it adds is lost\), (\S+) dB in the median", told
    ).groups()
    assert 5 < float(least) < float(middle) < 40 and name.startswith("model.layers.")
    assert float(lost) == pytest.approx(100 * 10 ** (-float(least) / 20), rel=0.01)
    assert "note:" not in told
    assert "model.layers.*.mlp.down_proj" in result.output and "int4 by 64 columns" in result.output
    assert "6 layers" in result.output and str(out) in result.output.replace("\n", "")
    wanted = library.quantize(AutoModelForCausalLM.from_pretrained(LM), "int4-g64")
    ids = AutoTokenizer.from_pretrained(out)("It was a beautiful evening", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(library.load(out)(ids).logits, wanted(ids).logits)
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {path.name for path in out.iterdir()}


def test_the_output_head_too(tmp_path):
    """tiny-lm reads its words by the same matrix, which stays beside."""
    out = tmp_path / "out"
    result = accel(LM, "--scheme", "int4-g64-head", "--out", out)
    assert result.exit_code == 0, result.output
    table = [line.split() for line in result.output.splitlines() if "lm_head" in line]
    assert len(table) == 1 and " int8 by row " in " ".join(table[0])
    loaded = library.load(out)
    head, words = loaded.get_output_embeddings(), loaded.get_input_embeddings().weight
    assert str(head.scheme) == "int8 by row"
    assert torch.equal(words, AutoModelForCausalLM.from_pretrained(LM).get_input_embeddings().weight)


def test_notes_of_layers_are_shown_once_with_their_number(tmp_path, text, monkeypatch):
    real = running.quantize_layers

    def quantize_layers(*given):
        for number, result in enumerate(real(*given)):
            result.notes = (f"{result.path}.q: left as it was", *(["only here"] if number == 4 else ()))
            yield result

    monkeypatch.setattr(running, "quantize_layers", quantize_layers)
    result = accel(LM, "--out", tmp_path / "out", "--method", "rtn", "--calibration", text)
    assert result.exit_code == 0, result.output
    assert "note: q: left as it was (6 of 6 layers)" in result.output and "note: only here (1 of 6" in result.output
    result = accel(LM, "--out", tmp_path / "json", "--method", "rtn", "--calibration", text, "--json")
    found = json.loads(result.stdout)
    assert found["layer_sqnr_db"].keys() == found["layer_notes"].keys() == found["layer_seconds"].keys()
    assert all(20 < ratio < 80 for ratio in found["layer_sqnr_db"].values())
    assert found["layer_notes"]["model.layers.4"] == ["model.layers.4.q: left as it was", "only here"]


def test_as_json(tmp_path):
    result = accel(LM, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["layer_sqnr_db"] == {}  # without text no layer was run
    assert len(found["weights"]) == 42 and found["skipped"] == {} and len(found["layer_seconds"]) == 6
    assert all(row["scheme"] == "int8 by row" and 35 < row["sqnr_db"] < 60 for row in found["weights"])


def test_activations_are_saved_and_loaded(tmp_path):
    result = accel(LM, "--activations", "int8", "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert {row["scheme"] for row in json.loads(result.stdout)["weights"]} == {
        "int8 by row, activations int8 beyond 64 rows"
    }
    assert library.load(tmp_path / "out").model.layers[0].mlp.up_proj.activations == "int8"
    result = accel(LM, "--scheme", "int4-g64", "--activations", "int8", "--out", tmp_path / "other")
    assert result.exit_code == 2 and "needs weights='int8'" in " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def terminal(monkeypatch):
    """terminal(*arguments): the command as on a terminal; what its bar was told, and what counts it showed."""
    real, told = progress.bar, []

    @contextmanager
    def bar(description):
        with real(description) as at:
            yield lambda *counts: (told.append(counts), at(*counts))

    def run(*arguments) -> tuple[list, list]:
        told.clear()
        environment = {"TERM": "xterm", "COLUMNS": "160", "FORCE_COLOR": "1"}
        given = ["quantize", *map(str, arguments), "--device", "cpu"]
        result = CliRunner(env=environment).invoke(app, given)
        assert result.exit_code in (0, 130) and "quantizing to" not in result.stdout, result.output
        plain = re.sub(r"\x1b\[[\d;?]*\w", "", result.stderr)
        return told, [tuple(map(int, counts)) for counts in re.findall(r"quantizing to \S+ .*?(\d+)/(\d+)", plain)]

    monkeypatch.setattr(progress, "bar", bar)
    return run


@pytest.mark.turns(2)
def test_a_bar_counts_to_all_linears_of_all_layers(terminal, tmp_path, text, monkeypatch):
    """tiny-lm has six layers of seven."""
    told, shown = terminal(LM, "--calibration", text, "--out", tmp_path / "whole")
    assert told == [(7 * layer, 42) for layer in range(7)]
    assert shown == sorted(shown) and set(shown) <= set(told) and shown[-1] == (42, 42)
    told, shown = terminal(LM, "--scheme", "int8-head", "--out", tmp_path / "head")
    assert told[-1] == shown[-1] == (43, 43)
    real = running.quantize_layers
    with monkeypatch.context() as patches:
        patches.setattr(running, "quantize_layers", lambda *given: interrupted(real(*given)))
        told, shown = terminal(LM, "--out", tmp_path / "out")
    assert told[-1] == shown[-1] == (14, 42)
    told, shown = terminal(LM, "--out", tmp_path / "out")  # goes on with what is done
    assert told == [(7 * layer, 42) for layer in range(2, 7)] and shown[-1] == (42, 42)


@pytest.mark.turns(2)
def test_the_other_commands_take_the_folder(tmp_path):
    assert accel(LM, "--out", tmp_path / "out").exit_code == 0
    runner = CliRunner(env={"TERM": "dumb", "COLUMNS": "160"})
    for command in ("report", "verify")[: 1 + EVERYTHING]:  # test_no_pickle.py has verify of such a folder
        result = runner.invoke(app, [command, str(tmp_path / "out"), "--device", "cpu"])
        assert result.exit_code == 0, result.output


def test_interrupted_it_goes_on(tmp_path, monkeypatch):
    out, real = tmp_path / "out", running.quantize_layers
    with monkeypatch.context() as patches:
        patches.setattr(running, "quantize_layers", lambda *given: interrupted(real(*given)))
        result = accel(LM, "--out", out)
    assert result.exit_code == 130 and "the same command goes on" in result.stderr
    result = accel(LM, "--scheme", "fp8", "--out", out)
    assert result.exit_code == 2 and "another scheme: int8, now fp8" in result.stderr
    result = accel(LM, "--out", out)
    assert result.exit_code == 0 and "4 layers, 2 more taken from the interrupted run" in result.output
    assert not (out / "unfinished").exists()
    result = accel(LM, "--out", out)
    assert result.exit_code == 2 and "not empty and holds no interrupted run" in result.stderr


@pytest.fixture
def without_tokenizer(tmp_path):
    AutoModelForCausalLM.from_pretrained(LM).save_pretrained(tmp_path / "bare")
    return tmp_path / "bare"


def test_wrong_usage_is_code_2_and_changes_nothing(tmp_path, without_tokenizer):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "empty").write_text("")
    wrong = {
        "is not one of 'int8'": (LM, "--scheme", "int5"),
        "method='best' is not one of": (LM, "--method", "best"),
        "looks at calibration data": (LM, "--method", "gptq"),
        "not a folder": (tmp_path / "nothing",),
        "is no text file": (LM, "--calibration", tmp_path / "nothing.txt"),
        "can't decode": (LM, "--calibration", tmp_path / "binary"),
        "is empty": (LM, "--calibration", tmp_path / "empty", "--method", "rtn"),
        "holds no tokenizer": (without_tokenizer, "--calibration", TEXT),
        "no language model": (LM.parent / "tiny-sd-digits",),
    }
    for message, arguments in wrong.items():
        result = accel(*arguments, "--out", tmp_path / "out")
        assert result.exit_code == 2, (message, result.output)
        assert message in " ".join(result.stderr.replace("│", " ").split()), result.stderr
        assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(app, ["quantize", str(LM)]).exit_code == 2  # no --out


def test_what_does_not_fit_is_told_and_no_tokenizer_is_needed(tmp_path, without_tokenizer):
    result = accel(without_tokenizer, "--scheme", "int4", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "left alone: 36 (192 inputs, not a multiple of 128)" in result.output
    assert not (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.turns(4)
def test_layers_go_to_the_device_and_the_model_stays_on_the_cpu(tmp_path, text, monkeypatch):
    given = noted(
        monkeypatch, running, "quantize", lambda model, *args: (next(model.parameters()).device.type, args[-1])
    )
    assert accel(LM, "--scheme", "int4-g64", "--calibration", text, "--out", tmp_path / "ours").exit_code == 0
    assert given == [("cpu", torch.device("cpu"))]  # which is the device that was asked for
    tokenizer = AutoTokenizer.from_pretrained(LM)
    rows = windows(text.read_text(), tokenizer, 512)
    library.quantize(AutoModelForCausalLM.from_pretrained(LM), "int4-g64", rows, tokenizer, out=tmp_path / "whole")
    whole, ours = (tmp_path / name / "model.safetensors" for name in ("whole", "ours"))
    assert whole.read_bytes() == ours.read_bytes()
