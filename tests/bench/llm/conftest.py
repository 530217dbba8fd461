"""The smallest model of the benchmark, on one thread."""

import pytest
import torch

from accel.bench import timing
from accel.bench.llm import cases, models, traffic

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """What is timed says nothing here, so it is timed no more often than it must be."""
    monkeypatch.setattr(cases, "MOST_ROUNDS", timing.LEAST_ROUNDS)
    monkeypatch.setitem(traffic.COPY_BYTES, "cpu", 2**20)


@pytest.fixture
def tiny():
    return models.build("tiny", CPU, torch.float32)
