"""What tests of quantizing take a fixture for: models in float64, a method that notes what it is given."""

import pytest

import accel.llm.moe.router_formula  # noqa: F401 (before a test takes float64 for float32, which it would keep)
from accel.llm.ptq import run as running


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
