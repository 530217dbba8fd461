"""`accel shard`: what it writes and tells, its exit codes, and what other commands say of its folders."""

import json
from pathlib import Path

from typer.testing import CliRunner

from accel.commands.app import app
from accel.llm.shards.manifest import MANIFEST, read_manifest

LM = Path(__file__).parents[2] / "examples" / "models" / "tiny-lm"


def accel(*arguments: object):
    return CliRunner(env={"TERM": "dumb", "COLUMNS": "160"}).invoke(app, [*map(str, arguments)])


def test_it_divides_a_model_and_says_how(tmp_path):
    out = tmp_path / "parts"
    result = accel("shard", LM, "--tp", 2, "--out", out)
    assert result.exit_code == 0, result.output
    manifest = read_manifest(out)
    assert "rank 1: " in result.output and f"of {len(manifest.tensors)} tensors" in result.output
    assert {"config.json", "tokenizer.json", MANIFEST} <= {path.name for path in out.iterdir()}
    told = accel("verify", out, "--device", "cpu")
    assert told.exit_code == 2 and "torchrun" in told.output
    told = json.loads(accel("shard", LM, "--tp", 4, "--out", tmp_path / "four", "--json").stdout)
    assert told["ranks"] == len(told["bytes"]) == 4 and 0 < told["divided"] < told["tensors"]


def test_what_cannot_be_done_ends_with_2(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    for arguments, words in (
        (("--tp", 2, "--out", tmp_path / "full"), "is not an empty folder"),
        (("--tp", 1, "--out", tmp_path / "new"), "Invalid value for '--tp'"),
    ):
        result = accel("shard", LM, *arguments)
        assert result.exit_code == 2 and words in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "new").exists()
