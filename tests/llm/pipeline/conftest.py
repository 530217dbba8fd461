"""A model that is spread over two devices, and its untouched twin."""

import copy

import pytest

import accel
from support.llm.families import make
from support.spread import spread


@pytest.fixture(scope="module")
def both():
    """(optimized, stock): four layers, two and two."""
    stock = make("llama", num_hidden_layers=4)
    return accel.optimize(spread(copy.deepcopy(stock))), stock
