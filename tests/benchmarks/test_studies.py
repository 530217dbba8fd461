"""`python -m benchmarks`: every study can be imported and asked for its options."""

import inspect
import random
import sys
from importlib import import_module

import pytest
import torch

from benchmarks.__main__ import STUDIES, main


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


def test_adapters_of_a_model_change_beside_stock():
    pytest.importorskip("peft")
    soak = import_module("benchmarks.models.adapters_soak").Soak("sd3", random.Random("a slice"))
    with torch.no_grad():
        told = soak.run(12)
    assert not (told["wrong"] or told["fallbacks"]) and told["kinds"]["calls by buffers"] > 2
