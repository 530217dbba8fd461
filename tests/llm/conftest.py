"""Pairs of a model and its untouched twin; transformers' advice on unusual calls is kept quiet."""

import pytest
import torch

from support.llm import optimized_models


@pytest.fixture(scope="module", autouse=True)
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


@pytest.fixture(scope="session")
def pair_of():
    """One pair a family for all tests that leave no trace on it: (optimized, stock)."""
    return lambda name: optimized_models.shared(name)[:2]


@pytest.fixture
def pair():
    """Maker of a pair that a test may change."""
    return lambda name, **changes: optimized_models.pair(name, changes=tuple(changes.items()))
