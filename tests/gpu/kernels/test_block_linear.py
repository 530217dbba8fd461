"""Weights in the blocks of a library, unpacked by compiled kernels."""

import pytest
import torch
from accel_kernels import dequantize

from accel.quantization.formats.bitsandbytes import read_bitsandbytes
from accel.quantization.formats.stored_weight import stored_weight
from support.bits import four_bit

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", dequantize.cases, ids=lambda case: case.name)
def test_values_are_the_references_to_the_bit(case, dtype):
    args, _ = case.make(torch.device("cuda"), dtype)
    assert torch.equal(dequantize.triton(*args), dequantize.reference(*args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("columns", "block"), [(1024, 64), (864, 128), (288, 4096)])  # the last over the ends of rows
def test_values_are_the_librarys_to_the_bit(kind, nested, dtype, columns, block):
    functional = pytest.importorskip("bitsandbytes").functional
    linear = four_bit(torch.nn.Linear(columns, 320, device="cuda", dtype=dtype), kind, nested, block=block)
    wanted = functional.dequantize_4bit(linear.weight, linear.quant_state)
    assert torch.equal(dequantize(read_bitsandbytes(linear).weight, dtype), wanted)
    assert stored_weight(linear) is not None
