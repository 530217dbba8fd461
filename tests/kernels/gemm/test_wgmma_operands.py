"""Operands of warpgroups' products: where threads read them, and how activations are permuted for that."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from accel_kernels import Norm
from accel_kernels.gemm.quantized.operands import permuted_activations_triton as permute_activations
from accel_kernels.gemm.quantized.operands import wgmma_operands_triton as warpgroup_factor
from accel_kernels.norm.norm import reference

from support.kernels.warpgroups import Array, Gluon, rebuilt


def test_no_bank_conflict():
    """Eight lanes at a time read 16 bytes each; sixteenths of a row of 128 bytes lie swizzled by the row's number."""
    layout = warpgroup_factor.half_layout(8, 64, 8)
    assert layout.reg_bases[:3] == [[0, 1], [0, 2], [0, 16]]
    for piece in (0, 16):
        for first in range(0, 32, 8):
            banks = set()
            for lane in range(first, first + 8):
                bases = [base for bit, base in enumerate(layout.lane_bases) if lane >> bit & 1]
                row, word = np.sum(bases or [[0, 0]], 0)
                banks.add((int(word) + piece) // 4 ^ int(row) % 8)
            assert len(banks) == 8


def test_rows_stand_in_the_factor_where_threads_read_them():
    """Lanes' rows in memory, in the order of the factor's: what `both` and `weight_row` have to agree on."""
    layout = warpgroup_factor.half_layout(8, 64, 8)
    steps = [base[0] for base in layout.lane_bases[2:]]  # of bits 0, 1 and 2 of a row of the factor
    weight_row = rebuilt((warpgroup_factor,), gl=Gluon(True))["weight_row"]
    for place in range(128):
        row = sum(step for bit, step in enumerate(steps) if place >> bit & 1) + place // 16 * 8
        assert int(weight_row(Array(place), 0, 1000, 64, True)) == row


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_arranged(format, norm, dtype):
    x = torch.randn(3, 416).to(dtype)
    given = {"none": None, "rms": Norm(torch.rand(416).to(dtype), None, 1e-5, offset=1.0)}
    given["layer"] = Norm(torch.rand(416).to(dtype), torch.randn(416).to(dtype), 1e-5, centred=True)
    found, split_counters, sums = permute_activations.permute_activations(x, given[norm], format, 512, 5, 8)
    wanted = x if norm == "none" else reference(x.double(), given[norm])
    column = permute_activations.column_of.fn(
        np.arange(512), format == "int4", format == "fp8" or dtype == torch.float16
    )
    assert sorted(column) == list(range(512)) and (split_counters == 0).all()
    wanted = torch.nn.functional.pad(wanted, (0, 96))[:, column].double()
    step = 2.0 ** (-10 if dtype == torch.float16 else -7)  # the interpreter truncates bfloat16
    assert ((found.double() - wanted).abs() <= step * wanted.abs() + 1e-6).all()
    pieces = found.float().unflatten(1, (-1, 128 if format == "int4" else 64))
    assert torch.allclose(sums[:, :3].T, pieces.sum(2), rtol=1e-5, atol=1e-5)
