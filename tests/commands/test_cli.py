"""The command line: what it lists, what it refuses and how, and the file a benchmark writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from typer.testing import CliRunner

from accel.bench import ready
from accel.bench.cases import CASES, select
from accel.bench.configs import TINY_UNET
from accel.commands.app import app

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "models" / "tiny-sd-digits"


def accel(*arguments: str):
    return CliRunner(env={"TERM": "dumb", "COLUMNS": "160"}).invoke(app, [str(argument) for argument in arguments])


def python(*arguments: str) -> subprocess.CompletedProcess:
    """Python from the repository root, installed or not."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_help_lists_the_commands():
    result = accel("--help")
    assert result.exit_code == 0
    assert all(
        command in result.output
        for command in ("demo", "report", "verify", "bench", "bench llm", "profile", "quantize")
    )


def test_python_m_accel():
    done = python("-m", "accel", "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage: accel" in done.stdout


def test_report_refuses_what_is_no_folder(tmp_path):
    result = accel("report", tmp_path / "nothing-here", "--device", "cpu")
    assert result.exit_code == 2
    assert "nothing-here" in result.output and "not a folder" in result.output


def test_report_refuses_a_folder_without_a_model(tmp_path):
    result = accel("report", tmp_path, "--device", "cpu")
    assert result.exit_code == 2
    assert "config.json" in result.output


@pytest.fixture
def unet_folder(tmp_path):
    UNet2DConditionModel(**TINY_UNET).save_pretrained(tmp_path)
    return tmp_path


def test_report_of_a_saved_model_as_json(unet_folder):
    result = accel("report", unet_folder, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["sites"]


def test_report_of_a_saved_model_as_text(unet_folder):
    result = accel("report", unet_folder, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "down_blocks" in result.output


def test_report_of_a_text_encoder():
    result = accel("report", DIGITS / "text_encoder", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert {site["rule"] for site in json.loads(result.stdout)["sites"]} == {"CUDA graph", "layer norm"}


@pytest.fixture
def wrong_resnets(monkeypatch):
    """A plugin whose resnet blocks are 1 % off."""
    from accel.diffusion.blocks.resnet import ResnetForward

    call = ResnetForward.__call__  # not `fast`, which is examined before a block is replaced
    monkeypatch.setattr(ResnetForward, "__call__", lambda self, *args, **kwargs: 1.01 * call(self, *args, **kwargs))


CALL = ("--device", "cpu", "--prompt", "a handwritten two", "--steps", "3")


def test_verify_a_pipeline():
    result = accel("verify", DIGITS, *CALL)
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("unet", "vae.decoder", "text_encoder", "whole output", "SSIM"))
    assert "passed: " in result.output


def test_verify_as_json_and_without_a_prompt():
    result = accel("verify", DIGITS, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    quality = json.loads(result.stdout)
    assert quality["passed"] and set(quality["parts"]) == {"unet", "vae.decoder", "text_encoder"}


def test_verify_fails_with_exit_code_1(wrong_resnets):
    result = accel("verify", DIGITS, *CALL)
    assert result.exit_code == 1
    assert "FAILED: vae.decoder: relative RMS from full precision" in result.output


def test_verify_a_single_model(unet_folder):
    assert accel("verify", unet_folder, "--device", "cpu").exit_code == 0
    result = accel("verify", unet_folder, "--device", "cpu", "--steps", "3")
    assert result.exit_code == 2 and "for pipelines" in result.output


def test_verify_says_what_it_cannot_call(tmp_path):
    index = json.loads((DIGITS / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionImg2ImgPipeline"}))
    for part in ("scheduler", "text_encoder", "tokenizer", "unet", "vae"):
        (tmp_path / part).symlink_to(DIGITS / part)
    result = accel("verify", tmp_path, "--device", "cpu")
    assert result.exit_code == 2
    assert "StableDiffusionImg2ImgPipeline" in result.output and "it takes image" in result.output


def test_demo_refuses_a_folder_without_a_pipeline(tmp_path):
    result = accel("demo", "--model", tmp_path, "--device", "cpu")
    assert result.exit_code == 2
    assert "model_index.json" in result.output


def test_bench_refuses_an_unknown_case_and_names_the_others():
    result = accel("bench", "sd15", "sd99", "--device", "cpu")
    assert result.exit_code == 2
    assert "'sd99'" in result.output and "'sd15'" not in result.output
    assert all(name in result.output for name in CASES)


@pytest.mark.parametrize("option", [("--dtype", "fp12"), ("--device", "abacus")])
def test_bench_refuses_unknown_dtypes_and_devices(option):
    result = accel("bench", "tiny", *option)
    assert result.exit_code == 2
    assert option[1] in result.output


def test_without_names_every_real_case_or_the_tiny_one():
    assert [case.name for case in select([], torch.device("cpu"))] == ["tiny"]
    on_gpu = {case.name for case in select([], torch.device("cuda"))}
    assert on_gpu == set(CASES) - {"tiny"}
    assert [case.name for case in select(["sdxl", "sd15", "sdxl"], torch.device("cpu"))] == ["sdxl", "sd15"]


def test_bench_tiny_writes_json(tmp_path, monkeypatch):
    """Of the three fresh processes one is started; what the others measure is measured here."""
    started, fresh = [], ready.spawn

    def spawn(module, arguments, caches):
        started.append((arguments[-1], caches))
        if len(started) == 1:
            return fresh(module, arguments, caches)
        case, device, dtype, variant = arguments
        return ready.measure_module(ready.CASES[case], torch.device(device), getattr(torch, dtype), variant)

    monkeypatch.setattr(ready, "spawn", spawn)
    result = accel("bench", "tiny", "--device", "cpu", "--seconds", "0.1", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "speed-up" in result.output
    figures = json.loads((tmp_path / "cpu-tiny.json").read_text())
    assert figures["case"] == "tiny" and figures["dtype"] == "float32"
    assert figures["shapes"]["sample"] == [2, 4, 16, 16]
    assert figures["machine"]["gpu"] is None
    assert {"torch", "triton", "transformers", "diffusers", "python", "cuda", "driver"} <= set(figures["machine"])
    assert {"commit", "date", "sites", "fallbacks"} <= set(figures)
    for variant in ("stock", "accel"):
        timing = figures[variant]
        assert 0 < timing["q1_ms"] <= timing["median_ms"] <= timing["q3_ms"] and timing["calls"] >= 5
    assert "compile" not in figures
    assert 0 < figures["error"]["accel_vs_fp32"] <= 2 * figures["error"]["stock_vs_fp32"] < 1e-5
    assert figures["restored_bit_equal"] is True
    assert figures["peak_memory_mb"] == {"stock": None, "accel": None}
    took = figures["ready"]
    assert min(took["cold_s"], took["warm_s"], took["stock_first_call_s"], took["in_process_s"]) > 0
    assert min(took["cold_lost_s"], took["warm_lost_s"]) >= 0
    assert [variant for variant, _ in started] == ["accel", "accel", "stock"]
    assert len({caches for _, caches in started}) == 1


def test_bench_with_quantized_weights(tmp_path):
    given = ("--weights", "int8", "--no-compile", "--device", "cpu", "--seconds", "0.05", "--out", tmp_path)
    result = accel("bench", "tiny", *given)
    assert result.exit_code == 0, result.output
    assert "dB from stock" in result.output
    found = json.loads((tmp_path / "cpu-tiny-int8.json").read_text())
    assert found["weights"] == "int8" and found["lost"]["psnr_db"] > 50 and found["restored_bit_equal"]
    assert found["error"]["accel_vs_fp32"] <= 2 * found["error"]["stock_vs_fp32"] < 1e-4 < found["lost"]["relative_rms"]
    for case, weights, told in (("vae512", "int8", "not for vae512"), ("tiny", "int4", "none of int8, int8-asym, fp8")):
        refused = accel("bench", case, "--weights", weights)
        assert refused.exit_code == 2 and told in " ".join(refused.output.split())


def test_bench_with_activations_in_8_bits(tmp_path):
    given = ("--weights", "int8", "--activations", "int8", "--no-compile", "--device", "cpu", "--seconds", "0.05")
    result = accel("bench", "tiny", *given, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "cpu-tiny-int8-activations-int8.json").read_text())
    assert found["activations"] == "int8" and found["lost"]["psnr_db"] > 40 and found["restored_bit_equal"]
    assert found["error"]["accel_vs_fp32"] <= 2 * found["error"]["stock_vs_fp32"] < 1e-4 < found["lost"]["relative_rms"]
    assert 0 < max(found["products"].values()) <= 1 and set(found["products"]) == {"rounded rows", "their products"}
    for options, told in (
        (("--activations", "int8"), "needs --weights int8"),
        (("--weights", "int8-asym", "--activations", "int8"), "needs weights='int8', not 'int8-asym'"),
        (("--weights", "fp8", "--activations", "fp8", "--dtype", "fp16"), "give --dtype bf16"),
    ):
        refused = accel("bench", "tiny", *options)
        assert refused.exit_code == 2 and told in " ".join(refused.output.split())


def test_bench_reports_no_figure_for_a_wrong_result(tmp_path, monkeypatch):
    """A plugin that scales its output: the benchmark must say so, write nothing and fail."""
    import accel as plugin

    class Scaled:
        def __init__(self, stock):
            self.stock = stock

        def __call__(self, *args, **kwargs):
            return tuple(part * 1.01 for part in self.stock(*args, **kwargs))

    def spoil(module):
        module.forward = Scaled(type(module).forward.__get__(module))
        return module

    monkeypatch.setattr(plugin, "optimize", spoil)
    result = accel("bench", "tiny", "--device", "cpu", "--no-ready", "--out", tmp_path)
    assert result.exit_code == 1
    assert "wrong result" in result.output
    assert not list(tmp_path.iterdir())


def test_bench_of_a_pipeline_folder(tmp_path):
    result = accel("bench", DIGITS, *CALL, "--size", "48", "--batch", "2", "--seconds", "0.1", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "speed-up" in result.output and "tiny-sd-digits" in result.output
    figures = json.loads((tmp_path / "cpu-tiny-sd-digits.json").read_text())
    assert figures["about"] == "StableDiffusionPipeline, 3 steps, batch 2"
    assert figures["shapes"]["image"] == [48, 48, 3]
    assert figures["quality"]["passed"] and figures["restored_bit_equal"] is True
    assert figures["sites"]["patched"] > 50 and figures["fallbacks"] == []
    assert 0 < figures["error"]["accel_vs_fp32"] < 1e-4
    assert min(figures["ready"]["in_process_s"], figures["ready"]["stock_first_call_s"]) > 0
    for variant in ("stock", "accel"):
        assert 0 < figures[variant]["q1_ms"] <= figures[variant]["median_ms"] and figures[variant]["calls"] >= 3
    assert len(figures["stock_halves_ms"]) == 2


@pytest.mark.parametrize(
    "part, options, shape",
    [("unet", ("--batch", "1"), ["sample", [1, 4, 8, 8]]), ("vae", ("--size", "32"), ["sample", [1, 3, 32, 32]])],
)
def test_bench_of_a_model_folder(tmp_path, part, options, shape):
    result = accel("bench", DIGITS / part, *options, "--device", "cpu", "--seconds", "0.05", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / f"cpu-{part}.json").read_text())
    assert figures["shapes"][shape[0]] == shape[1]
    assert figures["restored_bit_equal"] is True


def test_bench_reports_no_figure_for_a_wrong_model(tmp_path, wrong_resnets):
    result = accel("bench", DIGITS, *CALL, "--out", tmp_path)
    assert result.exit_code == 1
    assert "wrong result" in result.output and "FAILED" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("tiny", "--size", "32"), "--size is for folders"),
        ((DIGITS / "unet", "--steps", "3"), "for pipelines"),
        ((DIGITS / "tokenizer",), "neither a model_index.json nor a config.json"),
        ((DIGITS, "sd99"), "'sd99'"),
    ],
    ids=str,
)
def test_bench_refuses_what_does_not_go_together(arguments, message):
    result = accel("bench", *arguments, "--device", "cpu")
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.real], ids=lambda case: case.name)
def test_real_cases_are_the_published_sizes(case):
    """Built on the meta device, so that it costs nothing: the parameter counts everybody knows."""
    millions = sum(p.numel() for p in case.build(torch.device("meta"), torch.float16).parameters()) / 1e6
    known = {"sd15": 859.5, "sd15-b16": 859.5, "sd21": 865.9, "sdxl": 2567.5, "vae512": 83.7, "vae1024": 83.7}
    assert millions == pytest.approx(known[case.name], abs=0.1)
