"""Inputs emulated in 8 bits, as `benchmarks quality` does: what accel.optimize(model, activations=...) computes."""

import copy
import importlib
from pathlib import Path

import pytest
import torch

import accel
from support.llm.families import make, prompt
from support.llm.rounded_cache import off, oracle

INPUTS = {"int8": "int8", "int8-outliers": "int8 but outliers"}  # what the benchmark calls them


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", ["llama-biases", "gemma2", "gpt2"])
def test_a_model_gives_the_same_logits(name, kind, monkeypatch, in_double):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4]))
    ways = importlib.import_module("benchmarks.quality.ways")
    stock = make(name, torch.float64)
    for module in stock.modules():  # one channel behind every norm is an outlier
        if "norm" in type(module).__name__.lower():
            module.weight.data[5] *= 40.0
    ours = accel.optimize(copy.deepcopy(stock), weights="int8", activations=kind)
    twin = oracle(stock, ours, lambda x, module: x)
    in_double()
    modules = [twin.get_submodule(row["path"]) for row in accel.report(ours).weights]
    assert len(modules) >= 8
    for ids in (prompt(1, 100), prompt(5, 13)):
        plain, found = twin(ids).logits, ours(ids).logits
        with ways.fake_quant(modules, INPUTS[kind]):
            assert off(twin(ids).logits, found) < 1e-9
        assert off(plain, found) > 1e-3
