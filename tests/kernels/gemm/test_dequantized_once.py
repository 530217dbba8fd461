"""Weights in fewer bits that are written out once while a model is looked at."""

import gc

import pytest
import torch
from accel_kernels.gemm.quantized.dequantized_once import forget_dequantized, keep_dequantized
from accel_kernels.gemm.quantized_weight import quantize_weight


@pytest.fixture
def weight(monkeypatch):
    """Gives a weight, and how often it was written out."""
    made, count = quantize_weight(torch.randn(32, 64), torch.int8, 32), []
    kind = type(made)
    write = kind._dequantized
    monkeypatch.setattr(kind, "_dequantized", lambda self, dtype: count.append(dtype) or write(self, dtype))
    return made, count


def test_once_for_each_dtype_while_it_lives_and_is_unchanged(weight):
    weight, count = weight
    wanted = weight.dequantized(torch.bfloat16)
    with keep_dequantized(2**20):
        found = [weight.dequantized(torch.bfloat16) for _ in range(3)]
        assert found[0] is found[1] is found[2] and torch.equal(found[0], wanted) and len(count) == 2
        assert weight.dequantized(torch.float32).dtype is torch.float32
        half = weight.rows(16, 32)
        assert torch.equal(half.dequantized(torch.bfloat16), wanted[16:])
        weight.scales.mul_(2)
        assert torch.equal(weight.dequantized(torch.bfloat16), wanted * 2)
        memory = bytearray(weight.scales.numpy().tobytes())
        for factor in (1, 4):  # of which the second comes to lie where the first was
            memory[:] = (factor * weight.scales).numpy().tobytes()
            scales = torch.frombuffer(memory, dtype=torch.float32).view(weight.scales.shape)
            assert torch.equal(weight._replace(scales=scales).dequantized(torch.bfloat16), wanted * 2 * factor)
            del scales
            gc.collect()
        before = len(count)
        forget_dequantized()
        assert weight.dequantized(torch.bfloat16) is not weight.dequantized(torch.bfloat16) and len(count) == before + 2
    assert weight.dequantized(torch.bfloat16) is not weight.dequantized(torch.bfloat16)


def test_no_more_than_there_is_room_for(weight):
    weight, count = weight
    first, second = weight.rows(0, 16), weight.rows(16, 32)
    with keep_dequantized(16 * 64 * 2):
        for _ in range(3):
            first.dequantized(torch.bfloat16), second.dequantized(torch.bfloat16)
    assert len(count) == 1 + 3
    with keep_dequantized(2**20), torch.inference_mode():
        uncounted = weight.each(torch.clone)
        assert uncounted.dequantized(torch.bfloat16) is not uncounted.dequantized(torch.bfloat16)
