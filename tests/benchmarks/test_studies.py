"""`python -m benchmarks`: every study can be imported and asked for its options."""

import inspect
import sys
from importlib import import_module

import pytest

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
