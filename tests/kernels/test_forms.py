"""Tensors that kernels are measured on: like those of a call, in no more memory."""

import pytest
import torch
from accel_kernels.autotune import BorrowedTensor, TensorForm, filled
from torch import nn


def span(tensors):
    """Bytes of the memory of all."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def heads(rows):
    """Queries, keys and values that are columns of the same rows."""
    return [one.unflatten(-1, (3, 8)).transpose(1, 2) for one in rows.chunk(3, -1)]


@pytest.mark.parametrize(
    "given",
    [
        heads(torch.empty(2, 50, 72)),
        heads(torch.empty(2, 70, 72)[:, 20:]),
        [torch.empty(2, 50, 24), *heads(torch.empty(2, 50, 72))[1:]],
        [torch.empty(2, 3, 50, 8)] * 3,
        list(torch.empty(3, 2, 50, 24).unbind()),
        [torch.empty(4, 100, 8)[0], torch.empty(4, 100, 8)[3]],
    ],
    ids=["columns", "some rows", "one alone", "the same", "side by side", "apart"],
)
def test_a_trial_takes_no_more_memory_than_the_call_that_asked_for_it(given):
    made = filled([TensorForm.of(one) for one in given])
    assert span(made) <= span(given)
    for one, other in zip(made, given, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert one.isfinite().all() and one.float().std() > 0.5
    alike = len({one.data_ptr() for one in given}) == 1
    assert all(torch.equal(made[0], one) == alike for one in made[1:])


def test_tensors_far_apart_in_one_memory_are_filled_each_by_itself():
    whole = torch.empty(1000, 8)
    forms = [TensorForm.of(whole[:4]), TensorForm.of(whole[-4:])]
    assert span(filled(forms)) == 2 * 4 * 8 * 4


def test_a_weight_is_lent_for_as_long_as_it_is_there():
    weight = nn.Parameter(torch.randn(6, 8))
    whole, rows = BorrowedTensor.of(weight), BorrowedTensor.of(weight[2:4])
    for _ in range(2):
        assert whole.filled().data_ptr() == weight.data_ptr() and torch.equal(whole.filled(), weight)
        assert rows.filled().data_ptr() == weight[2:4].data_ptr() and torch.equal(rows.filled(), weight[2:4])
    weight.data = weight.data.clone()  # moved
    for lent, shape in ((whole, (6, 8)), (rows, (2, 8))):
        made = lent.filled()
        assert made.shape == shape and made.untyped_storage().nbytes() == made.nbytes and made.std() > 0.1
    whole = BorrowedTensor.of(weight)
    weight.untyped_storage().resize_(0)  # as some offloading does
    assert whole.filled().isfinite().all() and whole.filled().shape == (6, 8)
