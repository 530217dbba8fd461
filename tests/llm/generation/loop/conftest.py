"""The loop that runs ahead, let run on a CPU, where stock's way is the default."""

import copy

import pytest

import accel
from accel.llm.generation.loop import handover
from support.llm.calls import counting_loops
from support.llm.families import make


@pytest.fixture
def ran(monkeypatch):
    """[loops, steps]: how often the loop ran, and how many steps it launched; on a CPU too."""
    monkeypatch.setattr(handover, "DEVICES", ("cpu", "cuda"))
    return counting_loops(monkeypatch)


@pytest.fixture(scope="module")
def twins():
    """Maker of a pair that a test may change: copies, so that the model is optimized once."""
    stock = make("llama")
    ours = accel.optimize(copy.deepcopy(stock))
    return lambda: (copy.deepcopy(ours), copy.deepcopy(stock))
