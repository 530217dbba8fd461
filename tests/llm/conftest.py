"""Pairs of a model and its untouched twin; transformers' advice on unusual calls is kept quiet."""

import copy
import functools

import pytest
import torch

import accel
from support.llm.families import BY_NAME, available, make


@pytest.fixture(autouse=True)
def quiet():
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def new_pair(name: str, **changes):
    """(optimized, stock); skips what this transformers does not have."""
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    stock = make(name, **changes)
    return accel.optimize(copy.deepcopy(stock)), stock


@pytest.fixture(scope="session")
def pair_of():
    """One pair a family for all tests that leave no trace on it."""
    return functools.cache(new_pair)


@pytest.fixture
def pair():
    """Maker of a pair that a test may change."""
    return new_pair
