"""Weights copied to the CPU by a thread of its own: values, strides, and what goes wrong on the way."""

import pytest
import torch
from torch import nn

from accel.quantization import parking
from accel.quantization.parking import Parking


def weights():
    return {
        "many pieces": nn.Parameter(torch.randn(37, 53)),
        "another order": nn.Parameter(torch.randn(64, 32).bfloat16().t()),
        "rows of another's memory": nn.Parameter(torch.randn(99, 16)[7:20]),
        "gaps in its memory": nn.Parameter(torch.randn(9, 9)[:, :4]),
        "bytes": torch.randint(0, 255, (5, 1001), dtype=torch.uint8),
        "one piece": nn.Parameter(torch.randn(250)),
        "nothing": nn.Parameter(torch.empty(0, 4)),
    }


def test_values_and_strides_in_memory_of_its_own():
    given = weights()
    before = {name: (tensor.detach().clone(), tensor.stride(), tensor.data_ptr()) for name, tensor in given.items()}
    with Parking(piece=1000) as parked:
        for tensor in given.values():
            parked.park(tensor)
    for name, tensor in given.items():
        value, stride, place = before[name]
        assert torch.equal(tensor, value) and tensor.stride() == stride, name
        assert tensor.data_ptr() != place or name in ("gaps in its memory", "nothing"), name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes or name == "gaps in its memory", name


def test_an_error_of_the_copy_is_raised_and_leaves_the_rest(monkeypatch):
    first, second, third = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))
    places, own = [tensor.data_ptr() for tensor in (first, second, third)], parking.set_data

    def full(tensor, change):
        if tensor is second:
            raise MemoryError("no room")
        own(tensor, change)

    monkeypatch.setattr(parking, "set_data", full)
    with pytest.raises(MemoryError, match="no room"), Parking() as parked:
        for tensor in (first, second, third):
            parked.park(tensor)
    moved = [tensor.data_ptr() != place for tensor, place in zip((first, second, third), places, strict=True)]
    assert moved == [True, False, False]


def test_an_error_of_the_caller_waits_for_what_was_begun():
    weight = nn.Parameter(torch.randn(64, 64))
    before, place = weight.detach().clone(), weight.data_ptr()
    with pytest.raises(KeyError), Parking(piece=512) as parked:
        parked.park(weight)
        raise KeyError
    assert weight.data_ptr() != place and torch.equal(weight, before) and parked.thread is None
