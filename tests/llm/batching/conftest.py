"""A pair of models, a manager over a toy engine, and what stock's logger is told."""

import logging

import pytest
from transformers.generation.continuous_batching.requests import logger

from support.llm.batching.managers import make_manager


@pytest.fixture
def llama(pair_of):
    return pair_of("llama")


@pytest.fixture
def manager():
    made = make_manager()
    yield made
    made.toy.hold.set()
    made.stop(hard_stop=True)
    assert not made.toy.running and not made.toy.waiting


@pytest.fixture
def logged():
    """What stock's logger is told; it passes nothing on."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
