"""What tests of quantizing take a fixture for: models in float64, a method that notes what it is given."""

import pytest
import torch

import accel.llm.analysis.router  # noqa: F401 (before a test takes float64 for float32, which it would keep)
from accel.llm.ptq import run as running


@pytest.fixture
def double(monkeypatch):
    """double(): from now on everything is float64; stock norms and rotary tables are float32 else, and numbers next to
    a half fall to the other side.
    """

    def enter():
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch, "float", torch.float64)  # which transformers 5.17 says
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)

    return enter


@pytest.fixture
def method_with_data(monkeypatch):
    """Stands for a calibrated method: it notes what it is given and rounds as "rtn" does."""
    seen = []
    real = running.quantize_layers

    def quantize_layers(model, scheme, method, batches, known, device):
        seen.append((method, batches, dict(known)))
        return real(model, scheme, "rtn", [], known)

    monkeypatch.setattr(running, "quantize_layers", quantize_layers)
    return seen
