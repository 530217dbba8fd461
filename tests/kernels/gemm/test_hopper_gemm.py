"""The product by specialized warps: no interpreter runs it, so here its partitions run as threads over numpy."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from accel_kernels import Quantized, QuantizedRows, hopper_gemm
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.hopper import finish_triton, hopper_gemm_triton
from accel_kernels.gemm.hopper.finish_triton import FinishArguments
from accel_kernels.gemm.hopper.tiles import TILES, HopperTile, by_size, fitting, split

from support.kernels.warp_partitions import MatrixDescriptor, Partitions
from support.kernels.warpgroups import Array, Pointer, rebuilt

OPERANDS = SimpleNamespace(primitive_bitwidth=16)


def emulate(x, weights, bias, modulation, residual, tile, programs, promoted=False, at_once=True, seed=0):
    """What the kernel gives in float64: with two weights relu(x W^T + b) * (x U^T + b), times 0.5 and modulation."""
    machine = Partitions(at_once, OPERANDS, seed)
    names = rebuilt(
        (finish_triton, hopper_gemm_triton), gl=machine, mbarrier=machine, tma=machine,
        start_load=machine.start_load, start_store=machine.start_store, warpgroup_mma=machine.warpgroup_mma,
        warpgroup_mma_wait=machine.warpgroup_mma_wait, fence_async_shared=lambda: None, all_threads=lambda: None,
        activate=lambda y, kind: Array(np.maximum(y.data, 0)), RENAMED=True, WIDTH=64, BUFFERS=2, FIRST=0, SECOND=1,
        WORKER_WARPS=[4, 1], WORKER_REGISTERS=[232, 40], range=lambda *to: map(Array, range(*map(int, to))),
    )  # fmt: skip
    (m, k), n, gate = x.shape, len(weights[0]), len(weights) == 2
    step, box, y = 64, tile.columns // len(weights), np.full((m, n), np.nan)
    described = [
        MatrixDescriptor(data, shape, OPERANDS, 2)
        for data, shape in (
            (x, (tile.height, step)), (weights[0], (box, step)), (weights[-1], (box, step)), (y, (tile.height, 64)),
        )
    ]  # fmt: skip
    shift, factor, added = (None if one is None else Pointer(one.reshape(-1)) for one in (bias, modulation, residual))
    tiles, steps = tile.count(m, n * len(weights)), -(-k // step)
    whole, parts = split(tiles, steps, programs, tile.parts)
    shared, programs = (None, None), min(programs, whole + (tiles - whole) * parts)
    if tile.parts > 1:
        assert parts > 1
        room = Pointer(np.full((tiles - whole) * parts * tile.rows * tile.columns, np.nan))
        shared = room, Pointer(np.zeros(2 * (tiles - whole), np.int64))
    after = FinishArguments(shift, shift, None, None, None, factor, added, 0.5)
    machine.programs = programs
    for machine.program in reversed(range(programs)) if seed else range(programs):
        names["hopper_gemm_kernel"](
            *described, after, m, n // 8, k, n // 8, n // 8, 1 if modulation is None else m // len(modulation),
            tile.group, tile.lead, whole, parts, *shared, GATE=gate, KIND="relu" if gate else None, ROUNDED=False,
            PROMOTED=promoted, TURNS=bool(tile.turns), COLUMNS=tile.columns, STAGES=tile.stages, num_warps=4,
        )  # fmt: skip
    return y


CASES = {  # rows, outputs, inputs, gate, programs, tile, promoted
    "tails": (200, 136, 72, False, 2, HopperTile(128, 128, 3, 2, 2), False),
    "one step, fewer than the lead": (100, 64, 64, False, 1, HopperTile(128, 128, 4, 3, 16), False),
    "one step a tile": (300, 264, 64, False, 1, HopperTile(128, 128, 4, 3, 2), False),
    "no lead": (260, 200, 200, False, 2, HopperTile(128, 64, 2, 0, 2), False),
    "wide": (140, 520, 320, False, 2, HopperTile(128, 256, 4, 2, 1), False),
    "tall": (300, 136, 136, False, 1, HopperTile(256, 128, 3, 1, 2), False),
    "gate": (200, 200, 200, True, 2, HopperTile(128, 256, 3, 2, 2), False),
    "split": (140, 136, 1040, False, 3, HopperTile(128, 128, 3, 2, 2, parts=3), False),
    "split after whole ones, gate": (300, 200, 1100, True, 5, HopperTile(128, 128, 3, 2, 2, parts=4), False),
    "split, all": (60, 56, 1600, False, 5, HopperTile(128, 256, 4, 3, 2, parts=8), True),
    "in turn": (300, 200, 200, False, 2, HopperTile(128, 128, 3, 0, 2, turns=1), False),
    "in turn, one step, one tile": (100, 64, 64, False, 1, HopperTile(128, 64, 2, 0, 2, turns=1), False),
    "in turn, an odd number, gate": (300, 136, 320, True, 3, HopperTile(128, 128, 3, 0, 2, turns=1), False),
    "in turn, split": (300, 200, 1100, True, 5, HopperTile(128, 128, 4, 0, 2, 4, 1), False),
    "promoted": (200, 136, 320, True, 1, HopperTile(128, 128, 3, 2, 2), True),
}


@pytest.mark.parametrize("at_once", [True, False], ids=["loads at once", "loads late"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_emulated(case, at_once):
    m, n, k, gate, programs, tile, promoted = case
    random = np.random.default_rng(0)
    x, weights = random.normal(size=(m, k)), [random.normal(size=(n, k)) for _ in range(1 + gate)]
    bias, modulation, residual = random.normal(size=n), random.normal(size=(2, n)), random.normal(size=(m, n))
    wanted = x @ weights[0].T + bias
    if gate:
        wanted = np.maximum(wanted, 0) * (x @ weights[1].T + bias)
    wanted = residual + 0.5 * wanted * modulation.repeat(m // 2, 0)
    for seed in range(2):
        found = emulate(x, weights, bias, modulation, residual, tile, programs, promoted, at_once, seed)
        assert np.abs(found - wanted).max() < 1e-9 * np.abs(wanted).max()


def test_every_tile_fits_into_shared_memory():
    for tile in TILES:
        assert tile.bytes <= 232448 and tile.lead < tile.stages
    assert all(tile.columns >= 128 for tile in fitting(True, False))
    assert all(tile.columns <= 128 for tile in fitting(False, True))
    assert by_size(4096, 9216, 48, False, False, 132)[1] == 256
    assert by_size(128, 640, 10, False, False, 132).columns == 64


def test_the_last_round_is_split_where_that_is_shorter():
    assert split(432, 240, 132, 1) == (432, 1)
    assert split(432, 240, 132, 8) == (396, 7)  # 36 tiles, 252 items: two rounds of a seventh
    assert split(396, 240, 132, 8) == (396, 1)
    assert split(396 + 131, 48, 132, 8) == (527, 1)
    assert split(80, 80, 132, 8)[0] == 0
    for tiles in range(1, 300, 7):
        for steps in (1, 8, 15, 17, 48, 80, 240):
            whole, parts = split(tiles, steps, 132, 8)
            share = -(-steps // parts)
            assert whole % 132 == 0 or parts == 1
            assert (parts - 1) * share < steps


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


def test_the_fastest_tile_is_measured_later_and_kept(monkeypatch, tmp_path):
    """The race is told: the last tile wins, and the first disagrees with the passes."""
    from accel_kernels.gemm.hopper import chooser as module
    from accel_kernels.trials import Trials

    ran, tiles = [], fitting(True, False)

    def triton(x, weight, bias=None, tile=None, **after):
        ran.append(tile)
        y = hopper_gemm.reference(x, weight, bias, **after)
        return y if tile != tiles[0] else y + 1

    fake = SimpleNamespace(
        name="hopper_gemm", reference=hopper_gemm.reference, instead=hopper_gemm.reference, triton=triton,
        supports=lambda *args, **after: None,
    )  # fmt: skip
    monkeypatch.setattr(module, "hopper_gemm", fake)
    monkeypatch.setattr(module, "race", lambda runs: [9.0, *[8.9] * (len(runs) - 2), 7.0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    choose = module.HopperChooser(tmp_path / "hopper.json")
    x, weight, trials = torch.randn(2, 5, 8), torch.randn(16, 8), Trials()
    given = {"up": torch.randn(16, 8), "activation": "silu"}
    wanted = hopper_gemm.reference(x, weight, **given)
    assert torch.equal(choose(x, weight, **given), wanted) and not choose.choices  # nobody collects
    with trials.noting() as asked:
        assert torch.equal(choose(x, weight, **given), wanted) and not ran
    assert trials.work(asked) == [] and ran == tiles
    key = "10x16x8 float32 activation=silu up"
    assert choose.choices == {key: tiles[-1].name}
    assert torch.equal(choose(x, weight, **given), wanted) and ran[-1] == tiles[-1]
    again = module.HopperChooser(tmp_path / "hopper.json")
    assert again.stored(key) == tiles[-1].name == again.neighbor("11x16x8 float32 activation=silu up", 1.1)
    assert again.neighbor("10x16x8 float32 activation=silu bias up", 1.1) is None
