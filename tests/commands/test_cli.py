"""The command line: its commands, and shards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import UNet2DConditionModel

from accel.bench.diffusion.configs import TINY_UNET
from accel.llm.shards.manifest import MANIFEST, read_manifest
from support.command_line import CALL, DIGITS, TRANSFORMER_DIGITS, run_command

ROOT = Path(__file__).parents[2]


def python(*arguments: str) -> subprocess.CompletedProcess:
    """Python from the repository root, installed or not."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_help_lists_the_commands():
    result = run_command("--help")
    assert result.exit_code == 0
    assert all(
        command in result.output for command in ("demo", "doctor", "report", "verify", "bench", "bench llm", "quantize")
    )


def test_python_m_accel():
    done = python("-m", "accel", "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage: accel" in done.stdout


@pytest.fixture
def unet_folder(tmp_path):
    UNet2DConditionModel(**TINY_UNET).save_pretrained(tmp_path)
    return tmp_path


def test_report_of_a_text_encoder():
    result = run_command("report", DIGITS / "text_encoder", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert {site["rule"] for site in json.loads(result.stdout)["sites"]} == {"encoder", "layer norm"}


@pytest.mark.turns(2)
def test_verify_a_pipeline():
    result = run_command("verify", DIGITS, *CALL)
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("unet", "vae.decoder", "text_encoder", "whole output", "SSIM"))
    assert "passed: " in result.output


@pytest.mark.turns(2)
def test_verify_a_pipeline_with_a_transformer():
    result = run_command("verify", TRANSFORMER_DIGITS, *CALL, "--json")
    assert result.exit_code == 0, result.output
    quality = json.loads(result.stdout)
    encoders = {"text_encoder", "text_encoder_2", "text_encoder_3"}
    assert quality["passed"] and set(quality["parts"]) == {"transformer", "vae.decoder", *encoders}


@pytest.mark.turns(4)
def test_verify_what_8_bits_lose():
    result = run_command("verify", TRANSFORMER_DIGITS, *CALL, "--json", "--weights", "int8", "--activations", "int8")
    assert result.exit_code == 0, result.output
    quality = json.loads(result.stdout)
    assert quality["lossy"] == "weights='int8', activations='int8'" and "transformer: rounded rows" in quality["parts"]
    assert 30 < quality["psnr_db"] < 60 and 0 < quality["gmsd"] < 0.1
    wrong = run_command("verify", TRANSFORMER_DIGITS, *CALL, "--weights", "int8", "--activations", "fp8")
    assert wrong.exit_code == 2 and "needs weights='fp8'" in wrong.output


@pytest.mark.turns(2)
def test_verify_fails_with_exit_code_1(wrong_resnets):
    result = run_command("verify", DIGITS, *CALL)
    assert result.exit_code == 1
    assert "FAILED: vae.decoder: relative RMS from full precision" in result.output


def test_verify_a_single_model(unet_folder):
    assert run_command("verify", unet_folder, "--device", "cpu").exit_code == 0
    result = run_command("verify", unet_folder, "--device", "cpu", "--steps", "3")
    assert result.exit_code == 2 and "for pipelines" in result.output


def test_verify_says_what_it_cannot_call(tmp_path):
    index = json.loads((DIGITS / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionImg2ImgPipeline"}))
    for part in ("scheduler", "text_encoder", "tokenizer", "unet", "vae"):
        (tmp_path / part).symlink_to(DIGITS / part)
    result = run_command("verify", tmp_path, "--device", "cpu")
    assert result.exit_code == 2
    assert "StableDiffusionImg2ImgPipeline" in result.output and "it takes image" in result.output


@pytest.mark.parametrize(
    ("command", "folder", "words"),
    [
        (("report",), "nothing-here", ("nothing-here", "not a folder")),
        (("report",), "", ("config.json",)),
        (("demo", "--model"), "", ("model_index.json",)),
    ],
)
@pytest.mark.share(1)
def test_a_folder_that_holds_nothing_is_named(command, folder, words, tmp_path):
    result = run_command(*command, tmp_path / folder, "--device", "cpu")
    assert result.exit_code == 2 and all(word in result.output for word in words)


def test_report_of_a_saved_model(unet_folder):
    as_json, as_text = (run_command("report", unet_folder, "--device", "cpu", *more) for more in (["--json"], []))
    assert as_json.exit_code == as_text.exit_code == 0, as_json.output
    assert json.loads(as_json.stdout)["sites"] and "down_blocks" in as_text.output


LM = Path(__file__).parents[2] / "examples" / "models" / "tiny-lm"


def test_it_divides_a_model_and_says_how(tmp_path):
    out = tmp_path / "parts"
    result = run_command("shard", LM, "--tp", 2, "--out", out)
    assert result.exit_code == 0, result.output
    manifest = read_manifest(out)
    assert "rank 1: " in result.output and f"of {len(manifest.tensors)} tensors" in result.output
    assert {"config.json", "tokenizer.json", MANIFEST} <= {path.name for path in out.iterdir()}
    told = run_command("verify", out, "--device", "cpu")
    assert told.exit_code == 2 and "torchrun" in told.output
    told = json.loads(run_command("shard", LM, "--tp", 4, "--out", tmp_path / "four", "--json").stdout)
    assert told["ranks"] == len(told["bytes"]) == 4 and 0 < told["divided"] < told["tensors"]


def test_what_cannot_be_done_ends_with_2(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    for arguments, words in (
        (("--tp", 2, "--out", tmp_path / "full"), "is not an empty folder"),
        (("--tp", 1, "--out", tmp_path / "new"), "Invalid value for '--tp'"),
    ):
        result = run_command("shard", LM, *arguments)
        assert result.exit_code == 2 and words in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "new").exists()
