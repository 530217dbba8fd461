"""Folders of pipelines and diffusers models: their weights are read from safetensors, never from a pickle."""

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from typer.testing import CliRunner

from accel import saved
from accel.commands.app import app

DIGITS = Path(__file__).parents[2] / "examples" / "models" / "tiny-sd-digits"
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
    shutil.copytree(DIGITS, folder)
    file = pickled(folder / part, WEIGHTS[part])
    with pytest.raises(ValueError, match=rf"{file.name} is a pickle, .*safetensors are wanted"):
        saved.load_saved(folder, torch.float32, CPU)
    for given in (["report", folder], ["verify", folder], ["demo", "--model", folder]):
        result = CliRunner(env={"TERM": "dumb", "COLUMNS": "600"}).invoke(app, [*map(str, given), "--device", "cpu"])
        assert result.exit_code == 2 and f"{file} is a pickle" in " ".join(result.stderr.replace("│", " ").split())


def test_beside_safetensors_pickles_are_not_looked_at(tmp_path, no_pickle):
    folder = tmp_path / "pipe"
    shutil.copytree(DIGITS, folder)
    for part, name in WEIGHTS.items():
        pickled(folder / part, name, beside=True)
    pipe, model = saved.load_saved(folder, torch.float32, CPU), saved.load_saved(folder / "unet", torch.float32, CPU)
    stock = UNet2DConditionModel.from_pretrained(DIGITS / "unet")
    for name, parameter in stock.named_parameters():
        assert torch.equal(pipe.unet.get_parameter(name), parameter)
        assert torch.equal(model.get_parameter(name), parameter)


def test_a_diffusers_model_that_is_a_pickle_is_refused(tmp_path, no_pickle):
    shutil.copytree(DIGITS / "unet", tmp_path / "unet")
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
