"""Rounding of weights, and memory in which originals wait."""

import math

import pytest
import torch
from accel_kernels.gemm.quantized_weight import pack, unpack
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accel.options import SCHEMES as NAMES
from accel.options import WEIGHTS
from accel.quantization import parking, rounding
from accel.quantization.parking import Parking
from accel.quantization.rounding import round_to_nearest, sqnr_db
from accel.quantization.scheme import Scheme
from support.everything import always

SCHEMES = [Scheme.parse(name) for name in NAMES]
GROUPED = 128  # columns that fit every scheme
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def weights(draw):
    """(N, 128 or 256), with rows and stretches of zeros, single large values, one sign only, any order of magnitude."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows, columns = draw(st.integers(1, 5)), GROUPED * draw(st.integers(1, 2))
    size = 10.0 ** draw(st.integers(-12, 2))
    w = torch.randn(rows, columns, generator=generator) * size
    if draw(st.booleans()):
        w[draw(st.integers(0, rows - 1))] = 0
    if draw(st.booleans()):
        w[:, 32:64] = 0
    if draw(st.booleans()):
        w[torch.rand(w.shape, generator=generator) < 0.02] *= 40
    if draw(st.booleans()):
        w = w.abs() * draw(st.sampled_from([1, -1]))
    return w.to(draw(st.sampled_from(DTYPES)))


def checked(w: torch.Tensor, scheme: Scheme):
    """The quantized weight, of which no element is further off than its scale allows."""
    quantized = round_to_nearest(w, scheme)
    assert quantized.shape == tuple(w.shape) and quantized.group == (scheme.group or w.shape[1])
    assert (quantized.zeros is None) == (scheme.symmetric or scheme.weight_dtype == "fp8")
    assert quantized.scales.dtype in (w.dtype, torch.float32) and bool((quantized.scales > 0).all())
    got = quantized.dequantized(torch.float64)
    exact, steps = w.double(), quantized.scales.double().repeat_interleave(quantized.group, dim=1)
    if scheme.weight_dtype == "fp8":  # three bits after the first; steps of 2^-9 below 2^-6
        allowed = torch.maximum(exact.abs() * 2**-4, steps * 2**-10) + exact.abs() * 2**-7 * (exact.abs() > 440 * steps)
    else:
        allowed = 0.5 * steps
    assert bool(((got - exact).abs() <= allowed * (1 + 1e-5)).all())
    assert bool((got[exact == 0] == 0).all())
    return quantized


@pytest.mark.parametrize("scheme", always(SCHEMES, Scheme.parse("int8-asym")), ids=str)
@given(w=weights())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_no_element_is_further_off_than_half_a_step(scheme, w):
    checked(w, scheme)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_scales_are_no_larger_than_they_must_be(scheme):
    """The largest number is used in every group, or the step were larger than it has to be."""
    w = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    numbers = round_to_nearest(w, scheme).numbers().float().unflatten(1, (-1, scheme.group or 256))
    low, high = scheme.range
    if scheme.symmetric:
        assert bool((numbers.abs().amax(-1) == high).all())
    else:
        assert bool((numbers.amax(-1) - numbers.amin(-1) >= high - low - 1).all())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_what_is_hardly_more(scheme, dtype):
    least = torch.finfo(dtype).smallest_normal
    w = torch.zeros(4, GROUPED, dtype=dtype)
    w[1, 5], w[2, 7], w[3] = least, -3 * least, torch.finfo(dtype).max / 4
    quantized = checked(w, scheme)
    assert quantized.dequantized(dtype).isfinite().all()
    assert torch.equal(quantized.dequantized(dtype)[0], w[0])
    assert (quantized.scales.dtype == torch.float32) == (dtype != torch.bfloat16)  # which has float32's exponents


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_few_rows_at_a_time_give_the_same(scheme, monkeypatch):
    w = torch.randn(37, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole, ratio = round_to_nearest(w, scheme), sqnr_db(w, round_to_nearest(w, scheme))
    monkeypatch.setattr(rounding, "AT_ONCE", 5 * 256)
    again = round_to_nearest(w, scheme).parts()
    assert again.keys() == whole.parts().keys()
    assert all(torch.equal(a.view(torch.uint8), again[name].view(torch.uint8)) for name, a in whole.parts().items())
    assert sqnr_db(w, whole) == pytest.approx(ratio)
    turned = w.t().contiguous().t()  # as GPT-2 stores it
    assert torch.equal(round_to_nearest(turned, scheme).dequantized(w.dtype), whole.dequantized(w.dtype))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(scheme, value):
    w = torch.randn(3, GROUPED)
    w[1, 9] = value
    with pytest.raises(ValueError, match="NaN or Inf"):
        round_to_nearest(w, scheme)


@pytest.mark.parametrize(
    ("name", "columns", "unit"), [("int8", 12, 8), ("fp8", 9, 8), ("int4", 192, 128), ("int4-g64", 96, 64)]
)
def test_columns_that_do_not_fit_are_named(name, columns, unit):
    with pytest.raises(ValueError, match=f"{columns} inputs, not a multiple of {unit}"):
        round_to_nearest(torch.randn(4, columns), Scheme.parse(name))


def test_names():
    assert Scheme.parse("int8") == Scheme("int8", None, True)
    assert Scheme.parse("int4") == Scheme("int4", 128, True)
    assert Scheme.parse("int4-g32-asym") == Scheme("int4", 32, False)
    assert Scheme.parse("fp8") == Scheme("fp8", None, True)
    assert len({str(scheme) for scheme in SCHEMES}) == len(NAMES)


def test_names_of_heads():
    assert len(WEIGHTS) == 2 * len(NAMES)
    for name in NAMES:
        layers, head = Scheme.parse(f"{name}-head"), Scheme.of_head(f"{name}-head")
        assert layers == Scheme.parse(name) and Scheme.of_head(name) is None
        assert head == (Scheme("int8") if "int4" in name else layers)


def test_signal_to_noise_by_hand():
    w = torch.tensor([[127.0, 0.25, -3.5, 0, 0, 0, 0, 0]])
    quantized = round_to_nearest(w, Scheme.parse("int8"))
    assert quantized.data.tolist() == [[127, 0, -4, 0, 0, 0, 0, 0]] and quantized.scales.tolist() == [[1.0]]
    assert sqnr_db(w, quantized) == pytest.approx(10 * math.log10((127**2 + 0.25**2 + 3.5**2) / (0.25**2 + 0.5**2)))
    assert sqnr_db(torch.zeros(2, 8), round_to_nearest(torch.zeros(2, 8), Scheme.parse("int8"))) == math.inf


def test_asymmetric_by_hand():
    w = torch.tensor([[0.0, 1, 2, 15] * 8])
    quantized = round_to_nearest(w, Scheme.parse("int4-g32-asym"))
    assert quantized.scales.tolist() == [[1.0]] and quantized.zeros.tolist() == [[-8]]
    assert torch.equal(unpack(quantized.data), torch.tensor([[-8, -7, -6, 7] * 8], dtype=torch.int8))
    assert torch.equal(pack(unpack(quantized.data)), quantized.data)
    assert torch.equal(quantized.dequantized(torch.float32), w)


def parked_weights():
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
    given = parked_weights()
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
