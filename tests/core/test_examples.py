"""Examples that are run, and saved models that are refused."""

import os
import re
import runpy
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from typer.testing import CliRunner

from accel import saved
from accel.commands.app import app
from support.everything import EVERYTHING

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DIGITS = ROOT / "examples" / "models" / "tiny-sd-digits"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs an example as from the root of a checkout, in this process, where all it imports is already."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)

    def started(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"examples/{name}", *arguments])
        capsys.readouterr()
        runpy.run_path(f"examples/{name}", run_name="__main__")
        return capsys.readouterr().out

    return started


@pytest.mark.share(1)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_what_it_shows(path):
    lines = path.read_text().splitlines()
    assert len(lines) < 40
    assert lines[0].startswith('"""') and len(lines[0]) > 40


def test_every_example_is_run_here():
    tested = {name.removeprefix("test_") + ".py" for name in [*globals(), *PRINTED]}
    assert {path.name for path in EXAMPLES} <= tested


# What an example prints, as patterns, and a file it leaves.
PRINTED = {
    "text_to_image": (["sites patched"], "seven.png"),
    "text_to_image_transformer": ([r"(image \d: [\d.]+ s\b.*){3}", "sites patched"], "drawn.png"),
    "batch_requests": (["9 of 9 requests answered", " ".join(map(str, range(1, 21)))], None),
    "compare_and_undo": (["bit-equal after the block: True", "passed"], None),
    "generate": ([r"^It was a beautiful evening, and(.*?\s){36}", "sites patched"], None),
    "batch": (["rows as by themselves: 3 of 3"], None),
    "sdxl": ([r"(image \d: [\d.]+ s\b.*){3}", "sites patched", "passed: ", "text_encoder_2"], "sdxl.png"),
}


@pytest.mark.share(1)
@pytest.mark.turns(4)
@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed(name, run, tmp_path, request):
    patterns, file = PRINTED[name]
    folder = request.getfixturevalue("sdxl_folder") if name == "sdxl" else None
    printed = run(f"{name}.py", *(["--model", str(folder), "--steps", "2", "--prompt", "seven"] if folder else []))
    assert [pattern for pattern in patterns if not re.search(pattern, printed, re.S)] == [], printed
    assert file is None or (tmp_path / file).stat().st_size > 200


@pytest.mark.skipif(not EVERYTHING, reason="commands/test_serve.py serves in process; ACCEL_TEST_EVERYTHING=1 runs it")
def test_serve(run):
    for package in ("fastapi", "openai", "uvicorn"):
        pytest.importorskip(package)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    printed = run("serve.py", "examples/models/tiny-lm", port)
    assert len([line for line in printed.splitlines() if len(line) > 10]) == 16


def test_ray_serve(run):
    ray = pytest.importorskip("ray", reason="needs ray: make test-ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    ray.init(include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    try:
        printed = run("ray_serve.py", "examples/models/tiny-lm", "2", port)
    finally:
        ray.shutdown()
    assert len(re.findall(r"^I am s.+\.$", printed, re.M)) == 16  # Ray prints beside


@pytest.mark.turns(4)
def test_image_to_image(run, tmp_path):
    printed = run("image_to_image.py")
    assert int(re.search(r"from the new pipeline: (\d+)", printed)[1]) > 50
    assert all(word in printed for word in ("vae.encoder", "vae.decoder", "unet", "passed: "))
    three, eight = (tmp_path / name for name in ("three.png", "eight.png"))
    assert three.read_bytes() != eight.read_bytes()


@pytest.mark.turns(4)
def test_controlnet(run):
    printed = run("controlnet.py")
    moved, apart = (float(re.search(rf"{words} ([\d.e+-]+)", printed)[1]) for words in ("image by", "same hint:"))
    assert moved > 0.1 and apart < 1e-3
    assert "patched: controlnet" in printed


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
def test_lora_switching(run):
    pytest.importorskip("peft")
    rows = re.findall(
        r"^(.+?) +moves the image by ([\d.]+), accel from stock ([\d.e+-]+)$", run("lora_switching.py"), re.M
    )
    assert [name for name, *_ in rows] == ["bold", "slanted", "bold + slanted", "none"]
    moved = [float(value) for _, value, _ in rows]
    assert min(moved[:3]) > 0.05 and moved[3] == 0
    assert all(float(apart) < 1e-3 for *_, apart in rows)


def test_chat(run):
    printed = run("chat.py")
    turns = re.findall(r"^> ([^\n]+)\n(.*?)\n\((\d+) of (\d+) tokens were in the cache\)$", printed, re.M | re.S)
    assert len(turns) == 3
    kept, read = zip(*((int(kept), int(read)) for *_, kept, read in turns), strict=True)
    assert kept[0] == 0 and all(a < b for a, b in zip(kept, read, strict=True))
    assert kept[1] >= read[0] and kept[2] >= read[1]  # a turn keeps at least all that the turn before had to read


@pytest.mark.turns(4)
def test_streaming(run):
    printed = run("streaming.py")
    assert printed.startswith("The carriage was at the door, and")
    assert all(
        float(figure) > 0 for figure in re.search(r"(\d+) ms to the first words, (\d+) tokens", printed).groups()
    )


@pytest.mark.turns(2)
def test_beam(run):
    printed = run("beam.py")
    scores = [float(score) for score in re.findall(r"^(-\d+\.\d+) '", printed, re.M)]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    assert "the same beams as stock: True" in printed
    assert float(re.search(r"scores apart ([\d.e+-]+)", printed)[1]) < 1e-4


def test_quantize_and_save(run, tmp_path):
    printed = run("quantize_and_save.py")
    before, after, size = map(
        float, re.search(r"perplexity ([\d.]+) before, ([\d.]+) after; ([\d.]+) MB", printed).groups()
    )
    assert before < after < 1.2 * before and size < 4
    assert (tmp_path / "tiny-lm-int4" / "tokenizer.json").is_file()


@pytest.mark.turns(4)
def test_load_quantized(run):
    run("quantize_and_save.py", "--scheme", "int8", "--out", "tiny-lm-int8")
    printed = run("load_quantized.py", "--model", "tiny-lm-int8")
    assert printed.startswith("It was a beautiful evening, and") and len(printed.split()) > 40
    assert "sites patched" in printed and float(re.search(r"([\d.]+) MB in memory", printed)[1]) < 5


@pytest.mark.turns(2)
def test_kv_int8_long_context(run):
    printed = run("kv_int8_long_context.py")
    assert "keys and values in int8: 864 bytes a token instead of 3072" in printed
    before, after = map(float, re.search(r"perplexity ([\d.]+) before, ([\d.]+) after", printed).groups())
    assert abs(after / before - 1) < 0.002
    length, text = re.search(r"after (\d+) tokens: (.+)", printed).groups()
    assert int(length) == 432 and len(text.split()) > 40


@pytest.fixture
def sdxl_folder(tmp_path, tiny):
    """A pipeline made like SDXL, each part tiny and random, saved as a user would find it."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
    from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = AutoTokenizer.from_pretrained(DIGITS / "tokenizer")
    text = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = CLIPTextConfig(vocab_size=len(tokenizer), projection_dim=10, max_position_embeddings=77, **text)
    torch.manual_seed(0)
    pipe = StableDiffusionXLPipeline(
        vae=tiny.vae(),
        text_encoder=CLIPTextModel(config),
        text_encoder_2=CLIPTextModelWithProjection(config),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=tiny.unet("sdxl", cross_attention_dim=32),
        scheduler=EulerDiscreteScheduler(),
        add_watermarker=False,
    )
    pipe.save_pretrained(tmp_path / "tiny-sdxl")
    return tmp_path / "tiny-sdxl"


DIGITS_FOLDER = Path(__file__).parents[2] / "examples" / "models" / "tiny-sd-digits"
CPU = torch.device("cpu")
WEIGHTS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "model"}


def pickled(folder: Path, name: str, beside: bool = False) -> Path:
    """The weights of a folder's model as a pickle, alone or beside the safetensors."""
    from safetensors.torch import load_file

    file = folder / f"{name}.safetensors"
    made = folder / ("pytorch_model.bin" if name == "model" else f"{name}.bin")
    torch.save(load_file(file), made)
    if not beside:
        file.unlink()
    return made


@pytest.fixture
def no_pickle(monkeypatch):
    def refuses(*given, **named):
        raise AssertionError("a pickle is read")

    monkeypatch.setattr(torch, "load", refuses)


@pytest.mark.parametrize("part", WEIGHTS)
def test_a_pipeline_of_which_a_part_is_a_pickle_is_refused(part, tmp_path, no_pickle):
    folder = tmp_path / "pipe"
    shutil.copytree(DIGITS_FOLDER, folder)
    file = pickled(folder / part, WEIGHTS[part])
    with pytest.raises(ValueError, match=rf"{file.name} is a pickle, .*safetensors are wanted"):
        saved.load_saved(folder, torch.float32, CPU)
    for given in (["report", folder], ["verify", folder], ["demo", "--model", folder]):
        result = CliRunner(env={"TERM": "dumb", "COLUMNS": "600"}).invoke(app, [*map(str, given), "--device", "cpu"])
        assert result.exit_code == 2 and f"{file} is a pickle" in " ".join(result.stderr.replace("│", " ").split())


def test_beside_safetensors_pickles_are_not_looked_at(tmp_path, no_pickle):
    folder = tmp_path / "pipe"
    shutil.copytree(DIGITS_FOLDER, folder)
    for part, name in WEIGHTS.items():
        pickled(folder / part, name, beside=True)
    pipe, model = saved.load_saved(folder, torch.float32, CPU), saved.load_saved(folder / "unet", torch.float32, CPU)
    stock = UNet2DConditionModel.from_pretrained(DIGITS_FOLDER / "unet")
    for name, parameter in stock.named_parameters():
        assert torch.equal(pipe.unet.get_parameter(name), parameter)
        assert torch.equal(model.get_parameter(name), parameter)


def test_a_diffusers_model_that_is_a_pickle_is_refused(tmp_path, no_pickle):
    shutil.copytree(DIGITS_FOLDER / "unet", tmp_path / "unet")
    file = pickled(tmp_path / "unet", WEIGHTS["unet"])
    with pytest.raises(ValueError, match=rf"{file.name} is a pickle"):
        saved.load_saved(tmp_path / "unet", torch.float32, CPU)


def test_neither_pipeline_nor_model(tmp_path):
    with pytest.raises(ValueError, match=r"neither a model_index\.json nor a config\.json"):
        saved.load_saved(tmp_path, torch.float32, CPU)
    (tmp_path / "config.json").write_text('{"_class_name": "NoSuchModel"}')
    with pytest.raises(ValueError, match="NoSuchModel, which this diffusers does not know"):
        saved.load_saved(tmp_path, torch.float32, CPU)
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    with pytest.raises(ValueError, match="neither a diffusers class nor an architecture"):
        saved.load_saved(tmp_path, torch.float32, CPU)
