"""`accel bench`: what it refuses, and the file it writes."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from accel.bench.diffusion.cases import CASES
from accel.families import quantized_among
from accel.saved import without_values
from support.command_line import CALL, DIGITS, run_command
from support.everything import EVERYTHING


def bench(folder, file, *arguments, code=0):
    """The output of the command on a CPU, and what it wrote into this file."""
    result = run_command("bench", *arguments, "--device", "cpu", "--out", folder)
    assert result.exit_code == code, result.output
    return result.output, json.loads((folder / file).read_text())


@pytest.mark.share(1)
@pytest.mark.parametrize(
    "arguments, message",
    [
        (("sd15", "sd99"), "unknown: 'sd99'; give"),
        (("tiny", "--dtype", "fp12"), "fp12"),
        (("tiny", "--device", "abacus"), "abacus"),
        (("tiny", "--size", "32"), "--size is for folders"),
        ((DIGITS / "unet", "--steps", "3"), "for pipelines"),
        ((DIGITS / "tokenizer",), "neither a model_index.json nor a config.json"),
        ((DIGITS, "sd99"), "'sd99'"),
        (("tiny", "--weights", "int3"), "int3"),
        (("tiny", "--weights", "int8-asym", "--activations", "int8"), "needs weights='int8', not 'int8-asym'"),
        (("adapters", "sd99"), "'sd99' is no model of"),
        (("adapters", "--ranks", "0,4"), "whole numbers from 1 on"),
        (("formats", "--formats", "nf5"), "'nf5' is none of"),
        (("ready", "sd99"), "'sd99' is none of"),
        (("ready", "sd15+int8"), "'sd15+int8': behind a plus stands one of"),
        (("ready", "llama-8b+case"), "'llama-8b+case': behind a plus stands one of"),
    ],
    ids=str,
)
def test_bench_refuses(arguments, message):
    where = () if "--device" in arguments else ("--device", "cpu")
    result = run_command("bench", *arguments, *where)
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.turns(2)
def test_bench_tiny_writes_json(tmp_path):
    output, figures = bench(tmp_path, "cpu-tiny.json", "tiny", "--seconds", "0.1")
    assert "speed-up" in output
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
    assert figures["peak_memory_mb"] == {"stock": None, "accel": None} and figures["failed"] == []
    assert min(figures["ready"][key] for key in ("stock_first_call_s", "in_process_s")) > 0


@pytest.mark.turns(4)
def test_bench_with_activations_in_8_bits(tmp_path):
    given = ("--weights", "int8", "--activations", "int8", "--no-compile", "--seconds", "0.05")
    output, found = bench(tmp_path, "cpu-tiny-int8-activations-int8.json", "tiny", *given)
    assert "dB from stock" in output
    assert found["activations"] == "int8" and found["quality"]["psnr_db"] > 40 and found["restored_bit_equal"]
    assert found["error"]["accel_vs_fp32"] <= 2 * found["error"]["stock_vs_fp32"] < 1e-4
    assert {"over the same weights", "rounded rows", "their products"} == set(found["quality"]["parts"])


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
def test_bench_of_a_pipeline_folder(tmp_path):
    asked = (DIGITS, *CALL, "--size", "48", "--batch", "2", "--seconds", "0.1")
    output, figures = bench(tmp_path, "cpu-tiny-sd-digits.json", *asked)
    assert "speed-up" in output and "tiny-sd-digits" in output
    assert figures["about"] == "StableDiffusionPipeline, 3 steps, batch 2"
    assert figures["shapes"]["image"] == [48, 48, 3]
    assert figures["quality"]["passed"] and figures["restored_bit_equal"] is True
    assert figures["sites"]["patched"] > 50 and figures["fallbacks"] == []
    assert 0 < figures["error"]["accel_vs_fp32"] < 1e-4
    assert min(figures["ready"]["in_process_s"], figures["ready"]["stock_first_call_s"]) > 0
    for variant in ("stock", "accel"):
        assert 0 < figures[variant]["q1_ms"] <= figures[variant]["median_ms"] and figures[variant]["calls"] >= 2


@pytest.mark.parametrize(
    "part, options, shape",
    [("unet", ("--batch", "1"), ["sample", [1, 4, 8, 8]]), ("vae", ("--size", "32"), ["sample", [1, 3, 32, 32]])],
)
@pytest.mark.turns(2)
def test_bench_of_a_model_folder(tmp_path, part, options, shape):
    _, figures = bench(tmp_path, f"cpu-{part}.json", DIGITS / part, *options, "--seconds", "0.05")
    assert figures["shapes"][shape[0]] == shape[1]
    assert figures["restored_bit_equal"] is True


@pytest.mark.parametrize("arguments", [(DIGITS, *CALL), ("tiny", "--device", "cpu")], ids=str)
@pytest.mark.turns(2)
def test_bench_reports_no_figure_for_a_wrong_model(tmp_path, wrong_resnets, arguments):
    result = run_command("bench", *arguments, "--out", tmp_path)
    assert result.exit_code == 1
    assert "wrong result" in result.output and "FAILED" in result.output
    assert not list(tmp_path.iterdir())


def test_every_case_is_named_in_the_help_in_the_docs_and_where_one_is_unknown():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
    told = set(re.findall(r"[\w-]+", run_command("bench", "--help").output))
    unknown = set(re.findall(r"[\w-]+", run_command("bench", "sd99", "--device", "cpu").output))
    for name in CASES:
        assert f"`{name}`" in page and name in told and name in unknown, name


def test_a_case_is_timed_in_its_usual_dtype(tmp_path, monkeypatch):
    """On a GPU, and the file has that dtype's name only where another was asked for."""
    from accel.bench import machine
    from accel.bench.diffusion import runner

    def run(name, make, device, dtype, *, keep, limit_s, **given):
        ran.append((name, dtype, limit_s))
        result = {"case": name, "dtype": str(dtype).removeprefix("torch."), "skipped": []}
        result |= {
            "failed": [{"variant": "accel", "reason": "no luck"}, {"variant": "compile", "reason": "no compiler"}]
        }
        keep(result)
        return result | {"skipped": [{"case": "torch.compile", "reason": "1 seconds were over"}]}

    ran = []
    monkeypatch.setattr("accel.commands.bench.images.parse_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(machine, "slug", lambda device: "gpu")
    monkeypatch.setattr(runner, "run", run)
    result = run_command("bench", "sdxl", "flux", "--out", tmp_path, "--limit", "60")
    assert ran == [("sdxl", torch.float16, 60.0), ("flux", torch.bfloat16, 60.0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-flux.json", "gpu-sdxl.json"]
    assert result.exit_code == 1 and "flux: failed: accel: no luck" in result.output
    assert "sdxl: left out: torch.compile: 1 seconds were over" in result.output
    run_command("bench", "flux", "--dtype", "fp16", "--out", tmp_path)
    assert ran[-1][1] == torch.float16 and (tmp_path / "gpu-flux-float16.json").is_file()


def test_a_case_that_fails_does_not_cost_the_next_and_a_compiler_is_no_failure_of_ours(tmp_path, monkeypatch):
    from accel.bench.diffusion import runner

    def run(name, *given, **more):
        if name == "flux":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"case": name, "dtype": "float32", "failed": [{"variant": "compile", "reason": "no"}], "skipped": []}

    monkeypatch.setattr(runner, "run", run)
    result = run_command("bench", "flux", "tiny", "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 1 and "flux: failed: stock: OutOfMemoryError: CUDA out of memory" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["cpu-tiny.json"]
    assert run_command("bench", "tiny", "--device", "cpu", "--out", tmp_path).exit_code == 0


@pytest.fixture
def few_tokens(monkeypatch):
    """In each call of a language model that is timed."""
    for name, few in (("PROMPT", 8), ("TOKENS", 3), ("CALLS", 2)):
        monkeypatch.setattr(f"accel.bench.adapters.{name}", few)


@pytest.mark.turns(4)
def test_bench_adapters_writes_json(tmp_path, few_tokens):
    pytest.importorskip("peft")
    asked = ("tiny-text", "--ranks", "4", "--counts", "2", "--rows", "4", "--budget", "0.05")
    _, figures = bench(tmp_path, "cpu-adapters.json", "adapters", *asked)
    (row,) = figures["rows"]
    assert figures["dtype"] == "float32" and list(row["variants"])[:2] == ["plain", "2 x 4"]
    assert list(row["variants"])[2:] == ["4 rows, plain", "4 rows, 1 x 4 by row"]
    assert all(one["median_ms"] > 0 and one["error"] == 0 for one in row["variants"].values())
    assert {"ratio", "switch_ms"} <= row["variants"]["2 x 4"].keys() and row["called"]["plain"] == []


def test_bench_memory_keeps_what_it_has(tmp_path, monkeypatch):
    asked = ("bench", "memory", "tiny-text", tmp_path, "--device", "cpu", "--out", tmp_path)

    def measured(end, name, *given):
        yield "accel, 8GB", {"s": 1.5}
        yield "accel, 1GB", {"failed": "too little"}
        raise end

    for end, code in ((torch.OutOfMemoryError("no memory"), 1), (KeyboardInterrupt(), 130)):
        monkeypatch.setattr("accel.bench.diffusion.streaming.measure_budgets", partial(measured, end))
        monkeypatch.setattr("accel.bench.budgets.measure_text", partial(measured, end))
        result = run_command(*asked)
        rows = json.loads((tmp_path / "cpu-memory.json").read_text())["rows"]
        assert result.exit_code == code and "tiny-text, accel, 8GB: {'s': 1.5}" in result.output
        assert (f"│ {tmp_path.name} " in result.output) == (code == 1)  # of a path what comes last
        assert rows[0]["memory"] == {"accel, 8GB": {"s": 1.5}, "accel, 1GB": {"failed": "too little"}}
        assert [row.get("failed") for row in rows] == ([None] if code == 130 else ["OutOfMemoryError: no memory"] * 2)


@pytest.mark.turns(2)
def test_bench_formats_writes_json(tmp_path, few_tokens):
    asked = ("tiny-text", "--formats", "fp8,Q4_K", "--budget", "0.05")
    output, figures = bench(tmp_path, "cpu-formats.json", "formats", *asked, code=1)
    assert "tiny-text, Q4_K: " in output  # whose blocks are longer
    (row,) = figures["rows"]
    found = row["formats"]["fp8"]
    assert "kernel" in found["library"]["failed"] and found["accel"]["median_ms"] > 0 and found["called"] == []
    assert {"of_plain", "weights_mb", "peak_mb"} <= found.keys() and "failed" in row["formats"]["Q4_K"]


@pytest.mark.turns(2)
def test_bench_pictures_writes_json(tmp_path, monkeypatch):
    for name, few in (("NEW", 3), ("SEVERAL", 2), ("CALLS", 1)):
        monkeypatch.setattr(f"accel.bench.encoders.pictures.{name}", few)
    _, figures = bench(tmp_path, "cpu-pictures.json", "pictures", "tiny-vl", "--budget", "0.02")
    (row,) = figures["rows"]
    kinds = ["one picture, first token", "one picture, 3 tokens", "2 pictures, first token", "a token behind it"]
    assert list(row["pictures"]) == kinds and not row["fallbacks"]
    assert all(row["pictures"][kind][way]["median_ms"] > 0 for kind in kinds[:3] for way in ("stock", "accel"))


@pytest.mark.turns(2)
def test_a_plan_is_told_before_anything_is_loaded():
    result = run_command("plan", "tiny", "--memory", "1GB", "--bus", "20")
    assert result.exit_code == 0, result.output
    assert "tiny" in result.output and "does not fit" not in result.output
    assert "does not fit" in run_command("plan", "tiny", "--memory", "1MB").output
    for option, wrong in [("memory", "much"), ("memory", "50%"), ("weights", "int3"), ("bus", "0"), ("tflops", "nan")]:
        told = run_command("plan", "tiny", f"--{option}", wrong)
        assert told.exit_code == 2 and f"--{option}" in told.output and wrong in told.output


def test_a_plan_is_of_what_a_folder_stores(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 32}
    layers = {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}
    bitsandbytes = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    for said, weights in [
        ({"dtype": "float32"}, "6.48"), ({"dtype": "bfloat16"}, "3.24"),
        ({"quantization_config": bitsandbytes}, "1.62"), ({"quantization_config": {"quant_method": "fp8"}}, "1.62"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "0.84"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"0": layers}}}, "0.84"),
    ]:  # fmt: skip
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | sizes | said
        (tmp_path / "config.json").write_text(json.dumps(config))
        for asked in ((), ("--weights", "int8"))[: 1 + ("dtype" in said)]:
            told = run_command("plan", tmp_path, *asked)
            assert told.exit_code == 0 and ("1.62" if asked else weights) in told.output, (said, told.output)
    for said in ({"quantization_config": {"config_groups": [1]}}, {"architectures": [3]}):
        (tmp_path / "config.json").write_text(json.dumps(config | said))
        told = run_command("plan", tmp_path)
        assert told.exit_code == 2 and "MODEL: " in told.output, said


def test_a_plan_is_of_how_a_pipeline_comes_and_of_what_is_quantized(monkeypatch):
    """Its autoencoder, and what is small, as a whole; beside the denoiser nothing is in fewer bits."""
    monkeypatch.setattr("accel.offload.budget.SLACK", 0)

    def told(memory):
        lines = (line.split("│") for line in run_command("plan", DIGITS, "--memory", memory).output.splitlines())
        return {cells[1].strip(): cells[4].strip() for cells in lines if len(cells) > 4}

    assert told("2MB") == {"text_encoder": "comes whole", "unet": "14", "vae": "comes whole"}
    assert told("5MB") == dict.fromkeys(("text_encoder", "unet", "vae"), "0")
    assert quantized_among(without_values(DIGITS), "int8") == {"unet"}
    for folder, weights, why in [(DIGITS, "int4", "takes 'int8'"), (DIGITS / "vae", "int8", "holds none")]:
        refused = run_command("plan", folder, "--weights", weights)
        assert refused.exit_code == 2 and "--weights: " in refused.output and why in refused.output
