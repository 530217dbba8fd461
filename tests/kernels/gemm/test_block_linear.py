"""Products with weights in the blocks of a library."""

import pytest
import torch
from accel_kernels import BlockWeight, dequantize, quantized_linear

from support.everything import EVERYTHING

pytest.importorskip("triton")

SMALL = [case for case in dequantize.cases if case.small]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")


@interpreted
@pytest.mark.share(1)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_values_are_the_references_to_the_bit(case):
    """Of every format, the sign of zero too."""
    for dtype in (torch.float32, torch.float16)[: 1 + EVERYTHING]:
        args, _ = case.make(torch.device("cpu"), dtype)
        ours, wanted = dequantize.triton(*args), dequantize.reference(*args)
        assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))


def case_of(name, dtype=torch.float16):
    return next(case for case in quantized_linear.cases if case.name == name).make(torch.device("cpu"), dtype)


@pytest.mark.parametrize("name", ["nf4-nested-gate-bias", "fp4-rows-2"][: 1 + EVERYTHING])
def test_more_rows_than_kernels_take_are_the_same_product(name):
    (x, weight, bias), more = case_of(name, torch.float32)
    x = torch.randn(520, x.shape[1])
    more.pop("residual", None)
    torch.testing.assert_close(
        quantized_linear.instead(x, weight, bias, **more), quantized_linear.reference(x, weight, bias, **more)
    )


def test_what_kernels_cannot_read_is_named():
    (x, weight, _), more = case_of("nf4-nested-gate-bias")
    assert isinstance(weight, BlockWeight) and quantized_linear.supports(x, weight) is None

    def refused(*args, **kwargs):
        return quantized_linear.supports(*args, **kwargs) or "nothing"

    assert "rows" in refused(x.expand(257, -1).contiguous(), weight)
    assert "rows" in refused(x.float().expand(257, -1).contiguous(), weight)
    assert "gate" in refused(x, weight, up=more["up"])
    other = more["up"]._replace(side=more["up"].side._replace(shift=weight.side.shift + 1))
    assert "gate" in refused(x, weight, up=other, activation="silu")
    assert "inputs" in refused(x[:, :64].contiguous(), weight)
    assert "contiguous" in refused(x, weight._replace(data=weight.data.t().contiguous().t()))
    assert "multiple" in refused(torch.cat([x, x[:, :2]], 1), weight._replace(columns=1090))
