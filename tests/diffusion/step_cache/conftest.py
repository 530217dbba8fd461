"""Tiny denoisers with the step cache."""

import copy

import pytest

import accel
from support.compatibility.stack_oracle import StackOracle, deep
from support.compatibility.stack_oracle import loop as stack_loop
from support.diffusion.oracles import loop
from support.diffusion.tiny_models import UNETS


@pytest.fixture
def pair(request, cached, tiny):
    """An optimized tiny UNet of a family, or transformer of a class, an oracle of it, and the calls of a loop."""
    name, interval = request.param if isinstance(request.param, tuple) else (request.param, 3)
    if name in UNETS:
        model, oracle = cached(name, interval)
        return model, oracle, loop(tiny, model)
    model, given = deep(name)
    oracle = StackOracle(copy.deepcopy(model), interval)
    return accel.optimize(model, step_cache=interval), oracle, stack_loop(model, given)
