"""No pickle is read, which could run any code: not by quantizing, nor going on, nor loading; safetensors are wanted."""

import _pickle
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import _weights_only_unpickler, serialization
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import accel
from accel.commands.app import app
from accel.llm.ptq import run as running
from support.llm.families import make
from support.llm.quantized import held_by, logits

IDS = [torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.fixture
def no_pickle(monkeypatch):
    """Everything that reads a pickle raises, and is noted should somebody catch that."""
    read = []

    def refuses(name: str) -> type:
        def __init__(self, *given, **named):
            read.append(name)
            raise AssertionError(f"{name} reads a pickle")

        return type(name, (), {"__init__": __init__})

    for module in (pickle, _pickle, torch, serialization, _weights_only_unpickler):
        for name in ("load", "loads", "_load", "_loads", "_legacy_load", "Unpickler", "_Unpickler"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, refuses(f"{module.__name__}.{name}"))
    yield
    assert read == []


def command(*given) -> tuple[int, str]:
    """The exit code and what it says on the error stream, on one line."""
    result = CliRunner(env={"TERM": "dumb", "COLUMNS": "600"}).invoke(app, [*map(str, given), "--device", "cpu"])
    return result.exit_code, " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(("scheme", "method"), [("int8", "rtn"), ("int4-g32", "gptq"), ("fp8", "rtn")])
def test_quantizing_going_on_and_loading_read_none(scheme, method, no_pickle, tmp_path, monkeypatch):
    pytest.importorskip("compressed_tensors")
    out, real = tmp_path / "out", running.quantize_layers
    data = None if method == "rtn" else IDS

    def interrupted(*given):
        yield next(iter(real(*given)))
        raise KeyboardInterrupt

    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(running, "quantize_layers", interrupted)
        accel.quantize(make("llama"), scheme, data, method=method, out=out)
    assert [path.name for path in (out / "unfinished").glob("*.safetensors")] == ["model.layers.0.safetensors"]
    model = accel.quantize(make("llama"), scheme, data, method=method, out=out)
    loaded, prequantized = accel.load(out), accel.optimize(AutoModelForCausalLM.from_pretrained(out))
    assert len(held_by(loaded)) == len(held_by(prequantized)) == 14
    for other in (loaded, prequantized):
        torch.testing.assert_close(logits(other)["logits"], logits(model)["logits"], rtol=0, atol=1e-5)


def test_the_command_reads_none(no_pickle, tmp_path):
    make("llama").save_pretrained(tmp_path / "in")
    assert command("quantize", tmp_path / "in", "--out", tmp_path / "out")[0] == 0
    assert command("verify", tmp_path / "out")[0] == 0


@pytest.fixture(params=["plain", "quantized", "in shards"])
def pickled(request, tmp_path):
    """A folder whose weights are a pickle alone."""
    model, folder = make("llama"), tmp_path / "pickled"
    if request.param == "quantized":
        accel.quantize(model, "int8")
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    name = "pytorch_model-00001-of-00001.bin" if request.param == "in shards" else "pytorch_model.bin"
    torch.save(model.state_dict(), folder / name)
    return folder, name


def test_pickles_are_refused(pickled, no_pickle, tmp_path):
    folder, name = pickled
    with pytest.raises(ValueError, match=rf"{name} is a pickle, .*safetensors are wanted"):
        accel.load(folder)
    for first, *rest in (("quantize", "--out", tmp_path / "out"), ("verify",), ("report",)):
        code, told = command(first, folder, *rest)
        assert code == 2 and f"{folder / name} is a pickle" in told and "safetensors are wanted" in told, first
    assert not (tmp_path / "out").exists()


def test_nor_is_a_pickle_read_beside_other_safetensors(pickled, no_pickle):
    folder, _ = pickled
    save_file({"lora": torch.ones(2)}, folder / "adapter_model.safetensors")
    with pytest.raises((ValueError, OSError), match=r"model.safetensors"):
        accel.load(folder)
    code, told = command("report", folder)
    assert code == 2 and "model.safetensors" in told


def test_beside_safetensors_a_pickle_is_not_looked_at(no_pickle, tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle at all")
    assert torch.equal(logits(accel.load(tmp_path))["logits"], logits(model)["logits"])
    assert command("quantize", tmp_path, "--out", tmp_path / "out")[0] == 0
