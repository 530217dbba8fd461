"""The smallest model of the benchmark, on one thread."""

import pytest
import torch

from accel.bench.llm import models

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny():
    return models.build("tiny", CPU, torch.float32)
