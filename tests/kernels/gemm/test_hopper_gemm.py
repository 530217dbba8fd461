"""Products of Hopper's warp groups, and how their operands lie."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from accel_kernels import Norm, Quantized, QuantizedRows, hopper_gemm, linear_geglu
from accel_kernels.elementwise.activations_triton import activate_fast
from accel_kernels.gemm import gluon_triton
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.hopper import finish_triton, hopper_gemm_triton, load_triton
from accel_kernels.gemm.hopper.finish_triton import FinishArguments
from accel_kernels.gemm.hopper.hopper_gemm_triton import FUSED, WIDER
from accel_kernels.gemm.quantized.operands import permuted_activations_triton as permute_activations
from accel_kernels.gemm.quantized.operands import wgmma_operands_triton as warpgroup_factor
from accel_kernels.norm.norm import ACTIVATIONS, reference

from support.kernels.warp_partitions import Partitions
from support.kernels.warpgroups import Array, Descriptor, Gluon, Pointer, rebuilt

OPERANDS = SimpleNamespace(primitive_bitwidth=16)


class Low(NamedTuple):
    """Adapters: A, each weight's B, where parts of the outputs end, and whether x A^T is computed beside the weight."""

    down: np.ndarray
    ups: list[np.ndarray]
    ends: tuple[int, int]
    together: bool


def emulate(
    x, weights, bias, modulation, residual, box, stages, group, programs, at_once=True, seed=0, low=None, extra=0
):
    """What the kernel gives in float64: with two weights relu(x W^T + b) * (x U^T + c), times 0.5 and modulation.

    box: rows and columns of a tile; extra: columns beyond.
    """
    machine = Partitions(at_once, OPERANDS, seed)
    names = rebuilt(
        (gluon_triton, finish_triton, load_triton, hopper_gemm_triton), gl=machine, tl=machine, mbarrier=machine,
        tma=machine, start_load=machine.start_load, start_store=machine.start_store,
        warpgroup_mma=machine.warpgroup_mma, warpgroup_mma_wait=machine.warpgroup_mma_wait,
        fence_async_shared=lambda: None, all_threads=lambda: None,
        activate_fast=lambda y, kind: Array(np.maximum(y.data, 0)), RENAMED=True, WIDTH=64, FIRST=0, SECOND=1,
        GROUP=group, WORKER_WARPS=[4, 1], WORKER_REGISTERS=[232, 40],
        range=lambda *to: map(Array, range(*map(int, to))),
    )  # fmt: skip
    (m, k), n, gate = x.shape, len(weights[0]), len(weights) == 2
    (height, columns), y = box, np.full((m, n), np.nan)
    low, rank = (Low(x, weights, (0, 0), False), 0) if low is None else (low, low.ups[0].shape[1])
    rows, width = columns // len(weights), rank if low.together else 64
    described = [
        Descriptor(data, shape, 2, OPERANDS)
        for data, shape in (
            (x, (height, 64)),
            (weights[0], (rows, 64)),
            (weights[-1], (rows, 64)),
            (weights[0], (extra, 64)),
            (low.down, (rank, 64)),
            (y, (height, 64)),
            (y, (height, extra)),
            (low.down if not rank or low.together else x @ low.down.T, (height, 64)),
            (low.ups[0], (rows, width)),
            (low.ups[-1], (rows, width)),
            (low.ups[0], (extra, width)),
        )
    ]
    shift, factor, added = (None if one is None else Pointer(one.reshape(-1)) for one in (bias, modulation, residual))
    after = FinishArguments(shift, shift, None, None, None, factor, added, 0.5)
    machine.programs = min(programs, -(-m // height) * -(-n * len(weights) // (columns + extra)))
    order = list(range(machine.programs))
    for program in reversed(order) if seed else order:
        machine.program = program
        names["hopper_gemm_kernel"](
            *described, after, m, n // 8, k, n // 8, n // 8, 1 if modulation is None else m // len(modulation),
            *low.ends, GATE=gate, RANK=rank, ACTIVATION="relu" if gate else None, ROUNDED=False, EXTRA=extra,
            TOGETHER=low.together, STAGES=stages, num_warps=4,
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


ADAPTED = {  # rows, outputs, inputs, gate, programs, rank, where parts end; columns beyond, together; and the tile
    "three parts": (200, 328, 136, False, 2, 16, (128, 256), 0, False, (64, 128), 3, 2),
    "a rank of two steps": (140, 136, 72, False, 1, 128, (136, 136), 0, False, (64, 128), 4, 2),
    "gate": (200, 136, 200, True, 3, 32, (136, 136), 0, False, (128, 128), 3, 2),
    "three parts together": (200, 328, 136, False, 2, 16, (128, 256), 0, True, (64, 128), 3, 2),
    "gate together": (300, 136, 200, True, 1, 32, (136, 136), 0, True, (128, 128), 3, 2),
    "wider": (200, 360, 136, False, 2, 64, (160, 320), 32, False, (64, 128), 3, 2),
    "wider together": (330, 360, 136, False, 1, 16, (160, 320), 32, True, (64, 128), 4, 2),
}


@pytest.mark.parametrize("at_once", [True, False], ids=["loads at once", "loads late"])
@pytest.mark.parametrize("case", ADAPTED.values(), ids=list(ADAPTED))
def test_emulated_adapters(case, at_once):
    m, n, k, gate, programs, rank, ends, extra, together, *tile = case
    random = np.random.default_rng(0)
    x, bias, residual = random.normal(size=(m, k)), random.normal(size=n), random.normal(size=(m, n))
    weights, ups = ([random.normal(size=(n, size)) for _ in range(1 + gate)] for size in (k, rank))
    parts = np.split(np.arange(n), sorted(set(ends) - {n}))
    down = random.normal(size=(rank * len(parts), k))
    inner, adapted = x @ down.T, []
    for weight, up in zip(weights, ups, strict=True):
        added = [inner[:, i * rank : (i + 1) * rank] @ up[part].T for i, part in enumerate(parts)]
        adapted.append(x @ weight.T + bias + np.concatenate(added, 1))
    wanted = residual + 0.5 * (np.maximum(adapted[0], 0) * adapted[1] if gate else adapted[0])
    low = Low(down, ups, ends, together)
    found = emulate(x, weights, bias, None, residual, *tile, programs, at_once, low=low, extra=extra)
    assert np.abs(found - wanted).max() < 1e-9 * np.abs(wanted).max()


@pytest.mark.parametrize("rank, extra", [(0, 0), *((rank, extra) for rank in (*FUSED, 64) for extra in (0, WIDER))])
def test_the_tile_fits_into_shared_memory(rank, extra):
    kernel, fused = hopper_gemm_triton, rank if rank in FUSED else 0
    if extra and rank == FUSED[-1]:
        assert kernel._wider(2048, 1280, (1280,), rank, torch.device("cpu")) == 0
        return
    ring = kernel.STAGES[rank > 0] * kernel.STEP * (kernel.HEIGHT + kernel.COLUMNS + extra + fused)
    pieces = 2 * kernel.HEIGHT * 2 * (extra + kernel.WIDTH.value * (1 if extra else 2))  # of two warpgroups
    ups = 2 * fused * 2 * (kernel.COLUMNS + extra)
    assert 190_000 < ring + pieces + ups + 2048 <= 232448  # barriers, alignment, what the compiler hands to warpgroups


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
        args = QuantizedRows(*rows), Quantized.of(numbers.data, numbers.scales)
        exact = args[0].dequantized(torch.float64) @ args[1].dequantized(torch.float64).t() * modulation[:, None]
        for run in (hopper_gemm, hopper_gemm.instead):
            found = run(*args, modulation=modulation)
            assert found.dtype == torch.bfloat16
            assert float((found.double() - exact).norm() / exact.norm()) < 5e-3


@pytest.mark.parametrize("case", [case for case in linear_geglu.cases if case.small], ids=lambda case: case.name)
def test_geglu_is_a_gate_and_what_it_gates(case, monkeypatch):
    """Whichever half of weight and bias is which; the kernel itself runs on a GPU alone."""
    monkeypatch.setitem(vars(hopper_gemm), "triton", hopper_gemm.reference)
    args, _ = case.make(torch.device("cpu"), torch.float32)
    torch.testing.assert_close(linear_geglu.triton(*args), linear_geglu.reference(*args))


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
    given["layer"] = Norm(torch.rand(416).to(dtype), torch.randn(416).to(dtype), 1e-5, centered=True)
    order = None if format == "int8" else torch.randperm(416).int()
    found, split_counters, sums = permute_activations.permute_activations(x, given[norm], format, 512, 5, 8, order)
    wanted = x if norm == "none" else reference(x.double(), given[norm])
    wanted = wanted if order is None else wanted[:, order]
    column = permute_activations.column_of.fn(
        np.arange(512), format == "int4", format == "fp8" or dtype == torch.float16
    )
    assert sorted(column) == list(range(512)) and (split_counters == 0).all()
    wanted = torch.nn.functional.pad(wanted, (0, 96))[:, column].double()
    step = 2.0 ** (-10 if dtype == torch.float16 else -7)  # the interpreter truncates bfloat16
    assert ((found.double() - wanted).abs() <= step * wanted.abs() + 1e-6).all()
    pieces = found.float().unflatten(1, (-1, 128 if format == "int4" else 64))
    assert torch.allclose(sums[:, :3].T, pieces.sum(2), rtol=1e-5, atol=1e-5)


@triton.jit
def _activated(x, y, ACTIVATION: tl.constexpr):
    i = tl.arange(0, 8192)
    tl.store(y + i, activate_fast(tl.load(x + i), ACTIVATION))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.share(1)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_activations_by_few_instructions(name):
    """As exact as 16 bits show, small values too; and what is not finite as torch gives it."""
    ends = [float("inf"), -float("inf"), float("nan"), -0.0, 0.0, -40.0, 40.0, -1e4, 1e4]
    x = torch.cat([torch.tensor(ends), torch.linspace(-12, 12, 8192 - len(ends))])
    found = torch.empty_like(x)
    _activated[(1,)](x, found, name)
    wanted = ACTIVATIONS[name](x.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=3e-6, equal_nan=True)
    seen = (x > -6) & (x < 100) & (wanted != 0)
    assert float(((found - wanted) / wanted).abs()[seen].max()) < 7e-5
