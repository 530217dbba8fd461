"""Grouped experts in 4 bits by warpgroups: no interpreter runs their products, so here they are emulated."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from accel_kernels.gemm import gluon_triton
from accel_kernels.gemm.quantized.operands import mma_operands_triton as fragments
from accel_kernels.gemm.quantized.operands import wgmma_operands_triton as warpgroup_factor
from accel_kernels.gemm.quantized.operands import wgmma_units_triton as units
from accel_kernels.gemm.quantized_weight import INT4, MXFP4, e2m1_numbers, mxfp4_weight, quantize_weight
from accel_kernels.moe import experts_triton, gating_triton, grouped_triton
from accel_kernels.moe.experts import experts
from accel_kernels.moe.hopper import wgmma_stores_triton, wgmma_triton
from accel_kernels.moe.weights import ExpertWeights, Gating

from support.everything import EVERYTHING
from support.kernels.compiler import in_a_process
from support.kernels.numbers import numbers_of
from support.kernels.warpgroups import Array, Gluon, launching, rebuilt

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
E2M1 = e2m1_numbers(SimpleNamespace(data=torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)))[0].double()


def unpacking(format):
    """`pairs` as its text has it, of words and floats of the same shape."""
    if format is INT4:
        return numbers_of("int4", False, 136)

    def pairs(words, scales, *_):
        words = words.data.astype(np.int64)
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        return [Array(E2M1.numpy()[words >> 4 * place & 15] * scales.data) for place in order]

    return pairs


def device(format, gating):
    machine = Gluon(False)
    wait = SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)

    def twice(pair, words, exponents):
        found = names["both"](*pair).data
        return Array(np.repeat(2.0 ** (found - 127.0) if exponents else found, words, axis=1))

    def gated(gate, up, _):
        return Array(gating(*(torch.from_numpy(one.data) for one in (gate, up))).numpy())

    names = rebuilt(
        (gluon_triton, fragments, warpgroup_factor, units, gating_triton, grouped_triton, wgmma_stores_triton,
         wgmma_triton), gl=machine,
        tl=machine.triton(wait), mbarrier=machine, start_load=machine.start_load, apply_gating=gated, twice=twice,
        warpgroup_mma=machine.warpgroup_mma, warpgroup_mma_wait=machine.warpgroup_mma_wait, pairs=unpacking(format),
        fence_async_shared=lambda: None, all_threads=lambda: None, zero_point=lambda *_: 136 if format is INT4 else 0,
        half_layout=lambda *_: None, unit_layout=lambda *_: None, channels_layout=lambda *_: None, PIECE=128, max=max,
        range=lambda *to: map(Array, range(*map(int, to))),
    )  # fmt: skip
    return machine, names["expert_rows_kernel"]


# Format, experts, tokens, choices, hidden, inner, interleaved, biases, zeros, missing.
CASES = {
    "mxfp4": (MXFP4, 4, 80, 2, 544, 288, True, True, False, False),
    "one expert has most": (MXFP4, 5, 70, 2, 160, 96, False, False, False, True),
    "int4": (INT4, 2, 110, 1, 288, 160, False, True, False, False),
    "int4 zeros": (INT4, 3, 40, 2, 96, 320, False, False, True, False),
}


@pytest.mark.parametrize("tile", [wgmma_triton.FEW, wgmma_triton.MANY], ids=["few", "many"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.turns(2)
def test_emulated(case, tile, monkeypatch, poisoned):
    """From the op's arguments: what stands around the products by the interpreter."""
    format, many, tokens, chosen, hidden, inner, interleaved, biases, zeros, missing = case
    g = torch.Generator().manual_seed(0)

    def rand(*shape, spread=1.0):
        return torch.randn(*shape, generator=g) * spread

    def stack(rows, columns):
        full = rand(rows, columns, spread=columns**-0.5)
        return mxfp4_weight(full) if format is MXFP4 else quantize_weight(full, torch.int32, 32, zeros)

    bias = (rand(many, 2 * inner), rand(many, hidden)) if biases else (None, None)
    gating = Gating("silu", 1.702, 1.5, 1.0)
    up, down = stack(many * 2 * inner, hidden), stack(many * hidden, inner)
    weights = ExpertWeights(up, down, gating, interleaved, *bias)
    x, shares = rand(tokens, hidden), torch.rand(tokens, chosen, generator=g)
    index = torch.rand(tokens, many, generator=g).topk(chosen).indices
    if missing:
        index[:, 0] = 1
        index[3], index[4, 1] = many, -1
    kernels = []

    def launch(kernel, grid, *args, **meta):
        kernels.append(kernel)
        if kernel is wgmma_triton.expert_rows_kernel:
            launching(lambda: device(format, gating))(kernel, grid, *args, **meta)
        else:
            experts_triton.launch(kernel, grid, *args, **meta)

    monkeypatch.setattr(wgmma_triton, "launch", launch)
    monkeypatch.setattr(wgmma_triton, "tile_for", lambda x, weights, rows: tile)
    found, wanted = (
        experts_triton.experts(x, index, shares, weights, tile="64"),
        experts.reference(x, index, shares, weights),
    )
    assert kernels.count(wgmma_triton.expert_rows_kernel) == 2 and wanted.any()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


CHECK = """
import re
import sys
import torch
from accel_kernels import experts
from support.kernels.absent_gpu import GPU, absent_gpu

for name in ("gpt-oss-20b-512-mxfp4", "qwen3-moe-2048-int4")[: 1 + (sys.argv[1:] == ["all"])]:
    case = next(one for one in experts.cases if one.name == name)
    with absent_gpu(90) as launches:
        args, more = case.make(GPU, torch.bfloat16)
        experts.triton(*args, **more, tile="64")
    found = [one for one in launches if one.name == "expert_rows_kernel"]
    assert len(found) == 2
    compiled = found[1].compiled()
    assert compiled.metadata.shared <= 115712, name  # two to a multiprocessor
    ptx = compiled.asm["ptx"]
    products = re.findall(r"wgmma.mma_async[^;]*;", ptx)
    assert products and all(re.search(r"}, *{(%r[0-9]+, *){3}%r[0-9]+}, *%rd", one) for one in products)
    walk = ptx[ptx.index("mbarrier.try_wait"):ptx.index("wgmma.wait_group.sync.aligned 0;")]
    assert "st.shared" not in walk and "stmatrix" not in walk and "shfl" not in walk, name
print("registers")
"""


@pytest.mark.turns(4)
def test_numbers_go_from_words_to_products_in_registers(tmp_path):
    assert in_a_process(CHECK, tmp_path, *["all"] * EVERYTHING).strip() == "registers"


def test_experts_that_lie_elsewhere_are_left_to_kernels_that_look_there(monkeypatch):
    monkeypatch.setattr(wgmma_triton, "has", lambda *given: True)
    case = next(one for one in experts.cases if one.name == "grouped-64-int4")
    (x, *_, weights), _ = case.make(torch.device("cpu"), torch.bfloat16)
    assert wgmma_triton.tile_for(x, weights, 64) is wgmma_triton.FEW
    assert wgmma_triton.tile_for(x, weights._replace(places=torch.zeros(8, 6)), 64) is None
