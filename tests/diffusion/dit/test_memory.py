"""Blocks never hold more memory at a time than stock: not while they are recorded and compared, and less after that."""

import pytest
import torch
from accel_kernels.rowwise.rowwise import rowwise
from torch.utils._python_dispatch import _disable_current_modes

import accel
from support.compatibility.diffusers_calls import inputs
from support.compatibility.tiny_diffusers_models import build
from support.llm.live_bytes import LiveBytes

TOKENS = 512  # many, for activations to be more than weights


def flux():
    model = build("FluxTransformer2DModel")
    given = inputs(model) | {"hidden_states": torch.randn(2, TOKENS, 16), "img_ids": torch.zeros(TOKENS, 3)}
    return model, given


def sd3():
    model = build("SD3Transformer2DModel")
    return model, inputs(model) | {"hidden_states": torch.randn(2, model.config.in_channels, 16, 16)}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A pass takes the memory of its results alone, as its kernel does."""
    reference = rowwise.reference

    def one_kernel(*args, **kwargs):
        with _disable_current_modes():
            return reference(*args, **kwargs)

    monkeypatch.setitem(vars(rowwise), "reference", one_kernel)


@torch.no_grad()
@pytest.mark.parametrize("made", [flux, sd3], ids=lambda one: one.__name__)
def test_no_call_in_16_bits_takes_more_memory_than_stock(made, as_on_a_gpu):
    model, given = made()
    model = model.bfloat16()
    given = {name: one.bfloat16() if one.is_floating_point() else one for name, one in given.items()}

    def peak():
        with LiveBytes(model) as live:
            model(**given)
        return live.peak

    stock = peak()
    accel.optimize(model, cpu="fuse")
    first, *later = [peak() for _ in range(4)]
    assert accel.report(model).fallbacks == []
    assert first <= stock and max(later) < stock and len(set(later)) == 1, (stock, first, later)
