"""Inputs emulated in 8 bits, as `benchmarks quality` does: what accel.optimize(model, activations=...) computes."""

import copy
import importlib
from pathlib import Path

import pytest
import torch

import accel
from accel.llm.ptq.calibration.linears import linears
from accel.quantization.scheme import Scheme
from support.llm.families import make, prompt
from support.llm.quantized import held_by
from support.llm.rounded_cache import off

ROOT = Path(__file__).parents[4]
INPUTS = {"int8": "int8", "int8-outliers": "int8 but outliers"}  # what the benchmark calls them


@pytest.fixture
def ways(monkeypatch):
    """The module of the benchmark that emulates."""
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.quality.ways")


def planted(name: str, dtype: torch.dtype):
    """A model of which one channel behind every norm is an outlier."""
    model = make(name, dtype)
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            module.weight.data[5] *= 40.0
    return model


def of_layers(model) -> dict:
    return linears(model, Scheme("int8"))[0]


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", ["llama-biases", "gemma2", "gpt2"])
def test_a_model_gives_the_same_logits(name, kind, ways, monkeypatch):
    """In float64, where no number is so near to a half that another order of sums puts it on the other side."""
    fake_quant = planted(name, torch.float64)
    ours = accel.optimize(copy.deepcopy(fake_quant), weights="int8", activations=kind)
    for path, module in of_layers(fake_quant).items():
        held = ours.get_submodule(path).quantized
        weight = held.numbers().double() * held.scales.double()
        module.weight.data = (weight.t() if type(module).__name__ == "Conv1D" else weight).contiguous()
    for said in ("float32", "float"):  # of norms and rotary tables
        monkeypatch.setattr(torch, said, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    modules = list(of_layers(fake_quant).values())
    assert len(modules) == len(held_by(ours)) > 0
    for ids in (prompt(1, 100), prompt(5, 13)):
        plain, found = fake_quant(ids).logits, ours(ids).logits
        with ways.fake_quant(modules, INPUTS[kind]):
            assert off(fake_quant(ids).logits, found) < 1e-9
        assert off(plain, found) > 1e-3
