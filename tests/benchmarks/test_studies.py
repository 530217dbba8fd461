"""`python -m benchmarks`: every study can be imported and asked for its options."""

import inspect
import random
import sys
from importlib import import_module

import pytest
import torch

from benchmarks.__main__ import STUDIES, main
from support.everything import EVERYTHING


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_has_a_function_and_says_what_it_measures(name):
    pytest.importorskip("triton")
    place, _, function = STUDIES[name][0].partition(":")
    module = import_module(f"benchmarks.{place}")
    assert module.__doc__ and inspect.isfunction(getattr(module, function or "main"))


def test_an_unknown_name_lists_all(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "nothing"])
    with pytest.raises(SystemExit) as error:
        main()
    assert all(name in str(error.value) for name in STUDIES)


NEEDS = {"nf4": "bitsandbytes", "Q8_0": "gguf"}
HELD = ("llama nf4", "flux Q8_0", "gemma int8")
MORE = (
    "sd15",
    "sdxl Q8_0",
    "pixart nf4",
    "clip Q8_0",
    "qwen3 nf4",
    "qwen3 Q8_0",
    "qwen3_moe int4-g32",
    "llama fp8",
    "gpt2 int8",
)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("sd3", 12), *((name, 60 if EVERYTHING else 8) for name in (*HELD, *(MORE if EVERYTHING else ())))],
)
@pytest.mark.turns(2)
def test_adapters_of_a_model_change_beside_stock(name, changes):
    """Also where a library, or accel, holds its weights in fewer bits."""
    for package in ("peft", *(package for format, package in NEEDS.items() if format in name)):
        pytest.importorskip(package)
    soak = import_module("benchmarks.models.adapters_soak").Soak(name, random.Random("a slice"))
    with torch.no_grad():
        told = soak.run(changes)
    assert not told["wrong"] and told["sites"]
    assert told["kinds"]["calls by buffers"] > 2 or name not in ("sd3", "flux Q8_0")
    assert name != "sd3" or not told["fallbacks"]
