"""The product by specialized warps: no interpreter runs it, so here its partitions run as threads over numpy."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from accel_kernels import Quantized, QuantizedRows, hopper_gemm
from accel_kernels.gemm import gluon_triton
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.hopper import finish_triton, hopper_gemm_triton
from accel_kernels.gemm.hopper.finish_triton import FinishArguments

from support.kernels.warp_partitions import MatrixDescriptor, Partitions
from support.kernels.warpgroups import Array, Pointer, rebuilt

OPERANDS = SimpleNamespace(primitive_bitwidth=16)


def emulate(x, weights, bias, modulation, residual, box, stages, group, programs, at_once=True, seed=0):
    """What the kernel gives in float64: with two weights relu(x W^T + b) * (x U^T + b), times 0.5 and modulation.

    box: rows and columns of a tile.
    """
    machine = Partitions(at_once, OPERANDS, seed)
    names = rebuilt(
        (gluon_triton, finish_triton, hopper_gemm_triton), gl=machine, tl=machine, mbarrier=machine, tma=machine,
        start_load=machine.start_load, start_store=machine.start_store, warpgroup_mma=machine.warpgroup_mma,
        warpgroup_mma_wait=machine.warpgroup_mma_wait, fence_async_shared=lambda: None, all_threads=lambda: None,
        activate=lambda y, kind: Array(np.maximum(y.data, 0)), RENAMED=True, WIDTH=64, BUFFERS=2, FIRST=0, SECOND=1,
        STAGES=stages, GROUP=group, WORKER_WARPS=[4, 1], WORKER_REGISTERS=[232, 40],
        range=lambda *to: map(Array, range(*map(int, to))),
    )  # fmt: skip
    (m, k), n, gate = x.shape, len(weights[0]), len(weights) == 2
    (height, columns), y = box, np.full((m, n), np.nan)
    described = [
        MatrixDescriptor(data, shape, OPERANDS, 2)
        for data, shape in (
            (x, (height, 64)),
            (weights[0], (columns // len(weights), 64)),
            (weights[-1], (columns // len(weights), 64)),
            (y, (height, 64)),
        )
    ]
    shift, factor, added = (None if one is None else Pointer(one.reshape(-1)) for one in (bias, modulation, residual))
    after = FinishArguments(shift, shift, None, None, None, factor, added, 0.5)
    machine.programs = min(programs, -(-m // height) * -(-n * len(weights) // columns))
    order = list(range(machine.programs))
    for program in reversed(order) if seed else order:
        machine.program = program
        names["hopper_gemm_kernel"](
            *described, after, m, n // 8, k, n // 8, n // 8, 1 if modulation is None else m // len(modulation),
            GATE=gate, ACTIVATION="relu" if gate else None, ROUNDED=False, num_warps=4,
        )  # fmt: skip
    return y


CASES = {  # rows, outputs, inputs, gate, programs; rows and columns of a tile, stages, group
    "tails": (200, 136, 72, False, 2, (64, 128), 3, 2),
    "one step a tile": (300, 264, 64, False, 1, (64, 128), 4, 2),
    "fewer steps than stages": (140, 200, 200, False, 1, (128, 64), 5, 16),
    "one tile": (100, 64, 64, False, 1, (128, 64), 2, 2),
    "more steps than stages": (260, 136, 840, False, 3, (128, 128), 5, 16),
    "an odd number of tiles, gate": (300, 136, 320, True, 3, (128, 128), 3, 2),
    "gate, four pieces": (200, 200, 200, True, 2, (64, 256), 3, 2),
}


@pytest.mark.parametrize("at_once", [True, False], ids=["loads at once", "loads late"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_emulated(case, at_once):
    m, n, k, gate, programs, *tile = case
    random = np.random.default_rng(0)
    x, weights = random.normal(size=(m, k)), [random.normal(size=(n, k)) for _ in range(1 + gate)]
    bias, modulation, residual = random.normal(size=n), random.normal(size=(2, n)), random.normal(size=(m, n))
    wanted = x @ weights[0].T + bias
    if gate:
        wanted = np.maximum(wanted, 0) * (x @ weights[1].T + bias)
    wanted = residual + 0.5 * wanted * modulation.repeat(m // 2, 0)
    for seed in range(2):
        found = emulate(x, weights, bias, modulation, residual, *tile, programs, at_once, seed)
        assert np.abs(found - wanted).max() < 1e-9 * np.abs(wanted).max()


def test_the_tile_fits_into_shared_memory():
    kernel = hopper_gemm_triton
    ring = kernel.STAGES.value * kernel.STEP * (kernel.HEIGHT + kernel.COLUMNS)
    pieces = 2 * kernel.BUFFERS.value * kernel.HEIGHT * kernel.WIDTH.value * 2  # of two warpgroups
    assert 200_000 < ring + pieces + 2048 <= 232448  # barriers, alignment, what the compiler hands to warpgroups


def test_a_modulation_multiplies_each_part():
    """By torch, one after the other and in passes; kernels that know none refuse it."""
    x, weight, residual = torch.randn(2, 3, 8), torch.randn(16, 8), torch.randn(2, 3, 16)
    modulation = torch.randn(2, 16)
    wanted = residual + modulation[:, None] * (x @ weight.t()) * 0.5
    given = {"modulation": modulation, "residual": residual, "scale": 0.5}
    torch.testing.assert_close(hopper_gemm(x, weight, **given), wanted)
    torch.testing.assert_close(hopper_gemm.instead(x, weight, **given), wanted)
    assert Epilogue(modulation=modulation).refusal(weight) == "a modulation"
    assert not Epilogue(modulation=modulation).plain and Epilogue(residual=residual).plain


def test_eight_bits_on_a_cpu_are_the_reference():
    from accel_kernels import quantize_rows

    x, weight, modulation = torch.randn(2, 3, 32).bfloat16(), torch.randn(16, 32), torch.randn(2, 16).bfloat16()
    for kind in (torch.int8, torch.float8_e4m3fn):
        rows, numbers = quantize_rows(x, dtype=kind), quantize_rows(weight, dtype=kind)
        args = QuantizedRows(*rows), Quantized(numbers.data, numbers.scales)
        exact = args[0].dequantized(torch.float64) @ args[1].dequantized(torch.float64).t() * modulation[:, None]
        for run in (hopper_gemm, hopper_gemm.instead):
            found = run(*args, modulation=modulation)
            assert found.dtype == torch.bfloat16
            assert float((found.double() - exact).norm() / exact.norm()) < 5e-3
