"""Experts whose weights lie anywhere in memory, as a table says."""

import pytest
import torch

pytest.importorskip("triton")

from accel_kernels.moe import experts_triton
from accel_kernels.moe.experts import CASES, experts
from accel_kernels.moe.tiles import GEMV
from accel_kernels.moe.weights import PLACE_BYTES, PLACES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")


def scattered(weights):
    """The same experts, the odd ones in memory of their own, and nothing of use where they were."""
    places, held = torch.zeros(weights.experts, PLACES, dtype=torch.int64), []
    for column, (tensor, step) in enumerate(zip(weights.parts(), weights.steps(), strict=True)):
        if tensor is None:
            continue
        assert step % PLACE_BYTES == 0
        whole = (tensor if tensor.is_contiguous() else tensor.transpose(1, 2)).view(torch.uint8)
        for expert in range(1, weights.experts, 2):
            own = whole.view(weights.experts, step)[expert]
            held.append(own.clone())
            own.fill_(1)
            places[expert, column] = (held[-1].data_ptr() - own.data_ptr()) // PLACE_BYTES
    return weights._replace(places=places), held


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        *((name, GEMV) for name in ("several", "interleaved", "int8", "int4-zeros", "gpt-oss", "ungated")),
        ("grouped-mxfp4", GEMV),
        *((name, "16") for name in ("several", "grouped-interleaved", "gpt-oss", "int8", "int4", "grouped-mxfp4")),
        ("grouped-ungated-transposed", "16"),
    ],
)
@pytest.mark.turns(2)
def test_every_kernel_reads_them_where_they_are(name, tile):
    (x, index, shares, weights), _ = next(case for case in CASES if case.name == name).make(
        torch.device("cpu"), torch.float32
    )
    index[:2] = torch.arange(2 * index.shape[1]).view(2, -1) % weights.experts  # both kinds
    if tile == GEMV:
        x, index, shares = x[:2], index[:2], shares[:2]
    wanted = experts_triton.experts(x, index, shares, weights, tile=tile)
    moved, held = scattered(weights)
    assert held and experts.supports(x, index, shares, moved) is None
    assert torch.equal(experts_triton.experts(x, index, shares, moved, tile=tile), wanted)
    assert not torch.equal(experts_triton.experts(x, index, shares, weights, tile=tile), wanted)
