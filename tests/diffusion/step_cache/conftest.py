"""Tiny transformers with the step cache."""

import copy

import pytest

import accel
from support.compatibility.stack_oracle import StackOracle, deep, loop


@pytest.fixture
def pair(request):
    """An optimized tiny transformer, an oracle of it, and the calls of a loop."""
    name, interval = request.param if isinstance(request.param, tuple) else (request.param, 3)
    model, given = deep(name)
    oracle = StackOracle(copy.deepcopy(model), interval)
    return accel.optimize(model, step_cache=interval), oracle, loop(model, given)
