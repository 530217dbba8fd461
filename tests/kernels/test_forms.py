"""Forms of kernels, and 16-bit operands."""

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import group_norm, image_sum, upsample_convolve
from accel_kernels.autotune import TensorForm, filled
from accel_kernels.image.half_operands import GAIN, SCALE, halved
from torch import nn

from support.precision import in_tf32, off


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
    whole, rows = TensorForm.of(weight, lent=True), TensorForm.of(weight[2:4], lent=True)
    for _ in range(2):
        assert whole.filled().data_ptr() == weight.data_ptr() and torch.equal(whole.filled(), weight)
        assert rows.filled().data_ptr() == weight[2:4].data_ptr() and torch.equal(rows.filled(), weight[2:4])
    weight.data = weight.data.clone()  # moved
    for lent, shape in ((whole, (6, 8)), (rows, (2, 8))):
        made = lent.filled()
        assert made.shape == shape and made.untyped_storage().nbytes() == made.nbytes and made.std() > 0.1
    whole = TensorForm.of(weight, lent=True)
    weight.untyped_storage().resize_(0)  # as some offloading does
    assert whole.filled().isfinite().all() and whole.filled().shape == (6, 8)


pytest.importorskip("triton")


def image(*shape, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [(2, 24, 5, 3), (1, 32, 97, 53)], ids=str)
def test_a_norm_rounds_its_result_to_float16(size, as_good_as_torch):
    channels = size[1]
    given = (image(*size), 8, rand(channels), rand(channels, seed=1), 1e-6)
    as_good_as_torch(group_norm, given, {"silu": True, "dtype": torch.float16}, torch.float16)


@pytest.mark.parametrize("x, residual", [(torch.float16, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_a_sum_is_as_wide_as_the_wider(x, residual, as_good_as_torch):
    given = (image(2, 24, 41, 47).to(x), image(2, 24, 41, 47, seed=1).to(residual), rand(24), 1.5)
    assert image_sum.supports(*given, gain=GAIN) is None
    as_good_as_torch(image_sum, given, {"gain": GAIN}, torch.float32)
    assert image_sum.triton(*given)[0].dtype is torch.float32


@pytest.mark.parametrize("size, out", [((1, 6, 5, 7), 10), ((2, 8, 3, 4), 3)], ids=str)
@pytest.mark.parametrize("large", [1.0, 1e5])
def test_upsampling_is_as_exact_as_in_tf32(size, out, large):
    """large: of images that float16 cannot hold."""
    x, weight = image(*size) * large, image(out, size[1], 3, 3, seed=1) / 8
    bias = rand(out) * large
    exact = upsample_convolve.reference(x.double(), weight.double(), bias.double())
    stock = in_tf32(F.conv2d)(F.interpolate(x, scale_factor=2.0), weight, bias, padding=1)
    ours = upsample_convolve.triton(x, weight, bias, half=True)
    assert ours.dtype is torch.float32
    assert 1e-6 < off(ours, exact) <= 2 * off(stock, exact)


def test_halved():
    x = image(2, 3, 4, 5) * 1e5
    assert halved(x).dtype is torch.float16 and halved(x).stride() == x.stride()
    assert torch.equal(halved(x), (x * SCALE).half())
