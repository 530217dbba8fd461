"""The product of few rows by warpgroups: no interpreter runs it, so here it is emulated, compiled and read."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from functools import partial

from accel_kernels import Norm, Quantized
from accel_kernels.gemm import epilogue_triton as epilogue
from accel_kernels.gemm import gluon_triton
from accel_kernels.gemm.epilogue import Epilogue, EpilogueArguments
from accel_kernels.gemm.quantized import skinny_wgmma_triton as skinny_wgmma
from accel_kernels.gemm.quantized import tile_store_triton as tile_sums
from accel_kernels.gemm.quantized import tile_triton as wgmma_tile
from accel_kernels.gemm.quantized import write_triton as quantized_write
from accel_kernels.gemm.quantized.operands import mma_operands_triton as fragments
from accel_kernels.gemm.quantized.operands import permuted_activations_triton as permute_activations
from accel_kernels.gemm.quantized.operands import wgmma_operands_triton as warpgroup_factor
from accel_kernels.gemm.quantized.quantized_linear import FP8, INT4, INT8, quantized_linear
from accel_kernels.gemm.quantized_weight import PackedWeight, quantize_weight

from support.everything import EVERYTHING
from support.kernels.compiler import in_a_process
from support.kernels.numbers import FORMATS, numbers_of, spread
from support.kernels.warpgroups import Array, Descriptor, Gluon, Pointer, launching, plain, rebuilt


def words(weight):
    return weight.data.view(torch.int32).numpy().astype(np.int64) & 0xFFFFFFFF


def device(format, neighbors, at_once):
    """A machine and the kernel as it runs there."""
    machine, middle = Gluon(at_once), 136 if format == "int4" else 0
    wait = SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)
    names = rebuilt(
        (gluon_triton, fragments, warpgroup_factor, epilogue, quantized_write, tile_sums, skinny_wgmma), gl=machine,
        mbarrier=machine, start_load=machine.start_load,
        warpgroup_mma=machine.warpgroup_mma, warpgroup_mma_wait=machine.warpgroup_mma_wait,
        fence_async_shared=lambda: None, all_threads=lambda: None, zero_point=lambda *_: middle, _spread=spread,
        pairs=numbers_of(format, neighbors, middle), tl=machine.triton(wait),
        half_layout=lambda *_: None, piece_layout=lambda *_: None, flat_layout=lambda *_: None,
        range=lambda *to: map(Array, range(*map(int, to))),
        activate=lambda y, kind: Array(np.maximum(y.data, 0)) if kind == "relu" else y,
    )  # fmt: skip
    return machine, names["skinny_wgmma_kernel"]


def emulate(x, weight, up, bias, residual, tile, processors, at_once, neighbors=False, order=None):
    """What the kernel gives in float64, its programs run in `order`, and how often split counters were taken."""
    format = {INT8: "int8", INT4: "int4", FP8: "fp8"}[weight.data.dtype]
    (n, k), rows, gate = weight.shape, x.shape[0], up is not None
    box, half, other = permute_activations.box_columns(format), tile.rows // 2, up or weight
    boxes, block_m = -(-k // box), tile.x_rows or max(8, 1 << (rows - 1).bit_length())
    tiles, blocks_m = -(-n // (half if gate else tile.rows)), -(-rows // block_m)
    share = -(-tiles * boxes // max(1, processors * tile.programs // blocks_m))
    programs = -(-tiles * boxes // share) * blocks_m
    machine, kernel = device(format, neighbors, at_once)
    column = permute_activations.column_of.fn(np.arange(boxes * box), format == "int4", neighbors)
    placed = np.pad(x, ((0, 0), (0, boxes * box - k)))[:, column]
    sums = np.full((2 * boxes, blocks_m * block_m), np.nan)
    sums[:, :rows] = placed.reshape(rows, 2 * boxes, box // 2).sum(2).T
    y, parts = np.full(rows * n, np.nan), np.full(programs * 2 * tile.rows * block_m, np.nan)
    split_counters = np.zeros(tiles * blocks_m, np.int64)

    def pointer(tensor):
        return None if tensor is None else Pointer(plain(tensor).reshape(-1))

    def scaling(one):
        scales, zeros = (None if part is None else part.double().numpy() for part in (one.scales, one.zeros))
        return PackedWeight(None, pointer(scales), pointer(zeros))

    after = EpilogueArguments(pointer(bias), pointer(bias), pointer(residual), 0.5)
    for program in range(programs) if order is None else order(programs):
        machine.program = program
        kernel(
            Descriptor(placed, (block_m, box // 2), 2), Descriptor(words(weight), (half, 32), 4),
            Descriptor(words(other), (half, 32), 4), scaling(weight), scaling(other), after, pointer(y), pointer(parts),
            pointer(split_counters), pointer(sums), rows, n, tiles * boxes, share, blocks_m, K=k,
            GROUPS=weight.scales.shape[1], FORMAT=format, DTYPE="dtype", GATE=gate, ACTIVATION="relu", BLOCK_M=block_m,
            BLOCK_N=tile.rows, STAGES=tile.stages, X_STAGES=tile.x_stages, AT_ONCE=wgmma_tile.at_once(tile, block_m),
            PDL=True, num_warps=tile.warps,
        )  # fmt: skip
    return y.reshape(rows, n), split_counters


CASES = {
    "int8": ("int8", 17, 640, 200, 0, False, False),
    "int8 one row": ("int8", 1, 384, 130, 0, False, False),
    "int4 128 gate zeros, three rows": ("int4", 3, 768, 70, 128, True, True),
    "int8 groups of 64": ("int8", 9, 320, 130, 64, False, False),
    "int8 by whole tiles": ("int8", 64, 128, 300, 0, False, False),
    "int8 padded, groups of 16, zeros": ("int8", 33, 208, 130, 16, True, False),
    "int8 gate": ("int8", 20, 384, 100, 0, False, True),
    "int4 128": ("int4", 40, 1280, 200, 128, False, False),
    "int4 32 gate zeros, padded": ("int4", 64, 672, 70, 32, True, True),
    "int4 64": ("int4", 32, 512, 513, 64, False, False),
    "int8 zeros": ("int8", 24, 384, 90, 0, True, False),
    "int4 gate by row": ("int4", 48, 768, 64, 0, False, True),
    "fp8 gate": ("fp8", 64, 512, 64, 0, False, True),
}


def backwards(many: int):
    return reversed(range(many))


def same_as_exact(case, biased, tiles, ways, at_once):
    format, rows, k, n, group, zeros, gate = case
    random = torch.Generator().manual_seed(0)

    def rand(*size):
        return torch.randn(*size, generator=random)

    def weight():
        return quantize_weight(rand(n, k) + (0.5 if zeros else 0.0), FORMATS[format], group, zeros)

    x, w, up = rand(rows, k).double().numpy(), weight(), weight() if gate else None
    bias, residual = rand(n).double().numpy() if biased else None, rand(rows, n).double().numpy()
    shift = bias if biased else 0
    wanted = np.maximum(x @ exact(w).T + shift, 0)
    wanted = 0.5 * (wanted * (x @ exact(up).T + shift) if gate else wanted) + residual
    for tile in tiles:
        for processors, order in ways:
            found, split_counters = emulate(
                x, w, up, bias, residual, tile, processors, at_once, neighbors=format == "fp8", order=order
            )
            assert np.abs(found - wanted).max() < 1e-9 * np.abs(wanted).max()
            # Shared tiles.
            assert processors == 1 or (n > 250 and not tile.x_rows) or split_counters.max() > 1


@pytest.mark.parametrize("at_once", [True, False], ids=["loads at once", "loads late"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.share(3)
@pytest.mark.turns(2)
def test_emulated(case, at_once):
    tiles = (wgmma_tile.WgmmaTile(128, 8, 4, 2, 1), wgmma_tile.WgmmaTile(64, 4, 3, 3, 2))
    same_as_exact(case, True, tiles, ((1, None), (5, None), (5, backwards), (64, None)), at_once)


MANY = {
    "int8": ("int8", 100, 256, 300, 0, False, False, 128),
    "int8 four parts": ("int8", 130, 256, 70, 0, False, False, 256),
    "int8 gate, three blocks": ("int8", 150, 384, 70, 0, False, True, 64),
    "int4 32 gate zeros, padded": ("int4", 129, 288, 40, 32, True, True, 128),
    "int4 128, scaled products, blocks": ("int4", 20, 768, 130, 128, True, False, 8),
    "fp8 groups of 64": ("fp8", 260, 192, 70, 64, False, False, 128),
}


@pytest.mark.parametrize("case", MANY.values(), ids=list(MANY))
def test_emulated_with_rows_in_blocks(case):
    """Programs of one block of rows share tiles among themselves alone; what no row is there for is not written."""
    *case, x_rows = case
    tile = wgmma_tile.WgmmaTile(128, 8, 3, 2, 1, x_rows)
    same_as_exact(case, False, [tile], ((1, None), (13, backwards)), False)


def exact(weight: Quantized) -> np.ndarray:
    numbers = weight.numbers().double().unflatten(1, (-1, weight.group))
    numbers = numbers if weight.zeros is None else numbers - weight.zeros[:, :, None]
    return (numbers * weight.scales.double()[:, :, None]).flatten(1).numpy()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize(
    "format, group, gate, x_rows", [("int8", 0, False, 0), ("int4", 64, True, 16), ("fp8", 0, True, 0)]
)
def test_the_call(format, group, gate, x_rows, monkeypatch, as_good_as_torch):
    """From the op's arguments: x permute_activations by its kernel, in the interpreter, and the product emulated."""
    rows, k, n = 37, 704, 150
    x, bias = torch.randn(1, rows, k).half(), torch.randn(n).half()
    weight, up = (quantize_weight(torch.randn(n, k).half() * k**-0.5, FORMATS[format], group) for _ in range(2))
    more = {"norm": Norm(torch.rand(k).half(), None, 1e-5), "residual": torch.randn(1, rows, n).half(), "scale": 0.5}
    if format == "int4":
        order = torch.randperm(k).int()
        weight, up = weight._replace(order=order), up._replace(order=order)
    more |= {"activation": "relu"} | ({"up": up, "up_bias": torch.randn(n).half()} if gate else {})
    monkeypatch.setattr(skinny_wgmma, "launch", launching(lambda: device(format, True, False)))
    tile = wgmma_tile.WgmmaTile(64, 4, 3, 2, 3, x_rows)
    op = SimpleNamespace(triton=partial(quantized_linear.triton, shape=tile), reference=quantized_linear.reference)
    as_good_as_torch(op, (x, weight, bias), more, torch.float16)


def test_a_slot_loaded_too_early_is_seen(monkeypatch):
    """The emulation can fail: x of the product that is under way is overwritten by a load."""
    tile = wgmma_tile.WgmmaTile(128, 8, 4, 2, 1)
    x, w = torch.randn(32, 640).double().numpy(), quantize_weight(torch.randn(128, 640), INT8)
    real, wanted = Gluon.start_load, 0.5 * np.maximum(x @ exact(w).T, 0)

    def early(self, descriptor, place, barrier, ring, pred):
        real(self, descriptor, place, barrier, ring, pred)
        if descriptor.size == 2 and self.pending:
            self.pending[-1][2].data[...] = 0

    assert np.abs(emulate(x, w, None, None, None, tile, 1, True)[0] - wanted).max() < 1e-9
    monkeypatch.setattr(Gluon, "start_load", early)
    assert np.abs(emulate(x, w, None, None, None, tile, 1, True)[0] - wanted).max() > 1


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_tiles_of_many_rows(format):
    """The sums fill at most half of the registers, and the rings leave room for what is written by parts."""
    tile = wgmma_tile.BROAD_TILES[format]
    assert tile.x_rows * tile.rows <= 128 * 32 * tile.warps
    numbers = tile.x_stages * tile.x_rows * permute_activations.box_columns(format) * 2
    assert tile.stages * tile.rows * 128 + numbers + tile.rows // 2 * 64 * 4 <= 232448 - 1024


def test_refusals():
    tile, x = wgmma_tile.WgmmaTile(128, 8, 4, 2, 1), torch.randn(32, 256).bfloat16()

    def refused(weight, x=x, tile=tile):
        with pytest.raises(ValueError) as raised:
            skinny_wgmma.skinny_wgmma(x, weight, None, Epilogue(), tile, x)
        return str(raised.value)

    fine = quantize_weight(torch.randn(64, 256).bfloat16(), INT4, 128)
    assert "scales of torch.float32" in refused(fine._replace(scales=fine.scales.float()))
    assert "513 rows" in refused(fine, torch.randn(513, 256).bfloat16())
    assert "multiple of 16 bytes" in refused(
        quantize_weight(torch.randn(64, 264).bfloat16(), INT8), torch.randn(32, 264)
    )
    assert "96 rows of x" in refused(fine, tile=tile._replace(x_rows=96))
    assert "at most 256" in refused(fine, torch.randn(300, 256).bfloat16())
    assert "96 rows to 8 warps" in refused(fine, tile=tile._replace(rows=96))


CHECK = """
import re
import sys
import torch
from accel_kernels import quantized_linear
from accel_kernels.gemm.quantized.quantized_linear import FP8, INT4, INT8
from accel_kernels.gemm.quantized.tile_triton import BROAD_TILES, post_scale, wgmma_tile
from accel_kernels.gemm.quantized_weight import BY_DTYPE, quantize_weight
from support.kernels.absent_gpu import absent_gpu

WAYS = (
    (INT8, 64, False, 0, False, torch.bfloat16), (INT4, 200, True, 128, False, torch.bfloat16),
    (FP8, 32, False, 0, False, torch.float16), (INT4, 64, False, 32, True, torch.bfloat16),
    (INT8, 32, True, 32, True, torch.bfloat16), (INT8, 128, False, 0, False, torch.bfloat16),
    (INT4, 32, True, 128, False, torch.bfloat16),
)
for kind, rows, gate, group, zeros, dtype in WAYS if sys.argv[1:] == ["all"] else WAYS[:3]:
    format = BY_DTYPE[kind].name
    tile = BROAD_TILES[format] if rows > 64 else wgmma_tile(rows, format, gate)
    with absent_gpu(90) as launches:
        weight, up = (quantize_weight(torch.randn(4096, 4096).to(dtype), kind, group, zeros) for _ in range(2))
        x = torch.randn(rows, 4096).to(dtype)
        more = {"up": up, "activation": "silu"} if gate else {"residual": x}
        quantized_linear.triton(x, weight, shape=tile, **more)
    launch = launches[-1]
    assert launch.name == "skinny_wgmma_kernel"
    compiled = launch.compiled()
    assert compiled.metadata.shared <= 232448, format
    ptx = compiled.asm["ptx"]
    walk = ptx[ptx.index("mbarrier.try_wait"):ptx.rindex("wgmma.mma_async")]
    each = tile.rows // 16 // tile.warps  # blocks of 64 rows to a warpgroup
    # From the ring into registers by 16 bytes, and nothing back; the left factor is in registers.
    assert re.findall("ld.shared[.a-z0-9]*", walk) == ["ld.shared.v4.b32"] * (4 * each), format
    assert "st.shared" not in walk and "stmatrix" not in walk and "shfl" not in walk, format
    products = re.findall(r"wgmma.mma_async[^;]*;", ptx)
    assert len(products) == each * (16 if format == "int4" else 8), format
    assert all(re.search(r"}, *{(%r[0-9]+, *){3}%r[0-9]+}, *%rd", one) for one in products), products[0]
    scaled = post_scale(4096, 4096 // group if group else 1, format, zeros, rows)
    assert walk.count("wgmma.wait_group.sync.aligned 1;") == (0 if scaled else 1), format
print("registers")
"""


@pytest.mark.turns(4)
def test_between_the_products_nothing_passes_through_shared_memory(tmp_path):
    many = "all" if EVERYTHING else "some"  # each format, with a gate and without, few rows and many
    assert in_a_process(CHECK, tmp_path, many).strip() == "registers"


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("block_m", [8, 16, 32, 64])
def test_what_programs_share(format, block_m):
    """All run at once and none has nothing to do; narrow products are not cut into more sums than are worth adding."""
    found = {}
    for width, columns in (
        (64, 64),
        (896, 896),
        (1536, 1024),
        (1024, 4096),
        (6144, 4096),
        (28672, 4096),
        (4096, 14336),
    ):
        tile = wgmma_tile.wgmma_tile(block_m, format, width == 28672)
        tiles, boxes = -(-width // tile.rows), -(-columns // permute_activations.box_columns(format))
        share = wgmma_tile.steps_of_a_program(tile, block_m, format, tiles, boxes, 132)
        programs = -(-tiles * boxes // share)
        assert 1 <= programs <= 132 * tile.programs and share <= max(boxes, -(-tiles * boxes // (132 * tile.programs)))
        found[width, columns] = programs / tiles
    assert found[28672, 4096] < 2 < found[4096, 14336]  # as many as the card runs where each has enough to do
    assert block_m < 64 or found[1536, 1024] == 1
