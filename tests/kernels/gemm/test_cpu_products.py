"""Few rows of bfloat16 by int8 on a CPU: torch's own product of both, where it can, and nowhere else."""

from types import SimpleNamespace

import pytest
import torch
from accel_kernels import Norm, Quantized, quantized_linear
from accel_kernels.gemm.fused_linear import in_passes
from accel_kernels.gemm.quantized.quantized_linear import CPU_ROWS
from accel_kernels.gemm.quantized_weight import pack, quantize_weight, unpack

from support.noted import noted

BF16 = torch.bfloat16


@pytest.fixture
def taken(monkeypatch):
    """Calls of torch's product."""
    return noted(monkeypatch, torch, "_weight_int8pack_mm", lambda *args: True)


def drawn(*size, dtype=BF16, spread=1.0):
    return (torch.randn(*size) * spread).to(dtype)


def made(n: int, k: int, dtype=BF16, kind=torch.int8, **how) -> Quantized:
    return quantize_weight(drawn(n, k, dtype=dtype, spread=k**-0.5), kind, **how)


def turned(weight: Quantized) -> Quantized:
    return weight._replace(data=weight.data.t().contiguous().t())


@pytest.mark.parametrize("rows", [1, 3, CPU_ROWS])
@pytest.mark.parametrize("n", [4, 36])
@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gate"])
def test_as_good_as_torch(gate, n, rows, taken, as_good_as_torch):
    torch.manual_seed(0)
    given = (drawn(rows, 96), made(n, 96), drawn(n))
    more = {"norm": Norm(drawn(96), None, 1e-5)}
    more |= {"up": made(n, 96), "activation": "silu"} if gate else {"residual": drawn(rows, n), "scale": 0.5}
    as_good_as_torch(SimpleNamespace(triton=quantized_linear, reference=quantized_linear.reference), given, more, BF16)
    assert len(taken) == 1 + gate


def test_rows_of_several_dimensions_that_do_not_lie_in_a_line(taken):
    torch.manual_seed(0)
    x, weight = drawn(64, 2, 3).permute(1, 2, 0), made(8, 64)
    found = quantized_linear(x, weight)
    assert found.shape == (2, 3, 8) and len(taken) == 1
    torch.testing.assert_close(found, quantized_linear(x.contiguous(), weight), rtol=0, atol=0)


@pytest.mark.parametrize("place", [1, 8, 16])
def test_at_any_address(place, taken):
    """Torch's product loads 32 bytes of x and 16 of the weight, and ends the process where they begin between."""
    torch.manual_seed(0)
    weight, x = made(8, 64), drawn(1, 64)
    wanted = quantized_linear(x, weight)
    held = torch.empty(64 + place, dtype=BF16)[place:].view(1, 64)
    assert torch.equal(quantized_linear(held.copy_(x), weight), wanted)
    data = torch.empty(weight.data.numel() + place, dtype=torch.int8)[place:].view(weight.data.shape)
    assert torch.equal(quantized_linear(x, weight._replace(data=data.copy_(weight.data))), wanted)
    assert len(taken) == 3


OTHERS = {
    "float32": (lambda: drawn(1, 64, dtype=torch.float32), lambda: made(8, 64, torch.float32)),
    "float16": (lambda: drawn(1, 64, dtype=torch.float16), lambda: made(8, 64, torch.float16)),
    "scales of float32": (lambda: drawn(1, 64), lambda: made(8, 64, torch.float32)),
    "72 columns": (lambda: drawn(1, 72), lambda: made(8, 72)),
    "groups": (lambda: drawn(1, 64), lambda: made(8, 64, group=32)),
    "zeros": (lambda: drawn(1, 64), lambda: made(8, 64, zeros=True)),
    "4 bits": (lambda: drawn(1, 64), lambda: made(8, 64, kind=torch.int32, group=32)),
    "fp8": (lambda: drawn(1, 64), lambda: made(8, 64, kind=torch.float8_e4m3fn)),
    "5 outputs": (lambda: drawn(1, 64), lambda: made(5, 64)),
    "a weight that does not lie in a line": (lambda: drawn(1, 64), lambda: turned(made(8, 64))),
    "many rows": (lambda: drawn(CPU_ROWS + 1, 64), lambda: made(8, 64)),
    "no rows": (lambda: drawn(0, 64), lambda: made(8, 64)),
    "gradients": (lambda: drawn(1, 64).requires_grad_(), lambda: made(8, 64)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_is_the_reference(name, taken):
    torch.manual_seed(0)
    x, weight = (make() for make in OTHERS[name])
    found = quantized_linear(x, weight)
    assert not taken and torch.equal(found, quantized_linear.reference(x, weight))


def test_a_gate_of_another_format_is_the_reference(taken):
    torch.manual_seed(0)
    x, more = drawn(2, 64), {"up": made(8, 64, group=32), "activation": "silu"}
    weight = made(8, 64)
    assert torch.equal(quantized_linear(x, weight, **more), quantized_linear.reference(x, weight, **more))
    assert not taken


def test_words_that_do_not_lie_in_a_line_are_unpacked():
    numbers = torch.randint(-8, 8, (5, 64), dtype=torch.int8)
    words = pack(numbers)
    assert torch.equal(unpack(words), numbers)
    assert torch.equal(unpack(words.t().contiguous().t()), numbers)
    assert torch.equal(unpack(words[1:, 2:6]), numbers[1:, 16:48])


def test_a_sum_takes_the_place_of_a_residual_that_nobody_reads_behind_it():
    x, weight, residual = drawn(2, 70, 8), drawn(16, 8), drawn(2, 70, 16)
    wanted = in_passes(x, weight, residual=residual.clone())
    for bias, place in ((None, True), (drawn(16), False)):
        given = residual.clone()
        y = in_passes(x, weight, bias, residual=given, spare=True)
        assert (y.data_ptr() == given.data_ptr()) is place and torch.equal(given, wanted if place else residual)
    assert in_passes(x, weight, residual=residual).data_ptr() != residual.data_ptr()
