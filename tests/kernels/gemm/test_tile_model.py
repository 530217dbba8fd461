"""The tiles that are chosen by counting, beside those that were the fastest where they were measured."""

import json
import math
from pathlib import Path

import pytest
from accel_kernels.gemm.tile_model import reads_registers, tile_cost

from support.kernels.cards import CARDS, made_up

pytest.importorskip("triton")

from accel_kernels.gemm.int8_linear_triton import NARROW_SHAPES, SHAPES
from accel_kernels.gemm.quantized.many_rows_triton import TILES

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
H200, REGISTERS = made_up(90), made_up(89)
SIZES = {"qkv": 6144, "out": 4096, "gate-up": 28672, "down": 4096, "head": 128256}  # outputs


def many_rows():
    for product, by_format in json.loads((RESULTS / "nvidia-h200-many-rows.json").read_text())["us"].items():
        name, rows = product.split()
        for ways in (by_format["int8"], by_format["int4"], by_format["fp8"]):
            tiles = {tuple(map(int, way.split()[1:])): us for way, us in ways.items() if way.startswith("ManyRowsTile")}
            yield tiles, (int(rows), SIZES[name], False, 2, 1)


def int8_linear():
    for product, found in json.loads((RESULTS / "nvidia-h200-int8-linear.json").read_text())["products"].items():
        name, rows = product.split()
        gate = name == "gate-up"
        ways = found["tiles_us"].items()
        tiles = {tuple(map(int, way.split()[:5])): us for way, us in ways if way.endswith(" 8 False") and way[0] != "w"}
        yield tiles, (int(rows), SIZES[name] // (1 + gate), gate, 1, 1)


@pytest.mark.parametrize(("measured", "usual"), [(many_rows, TILES), (int8_linear, SHAPES)])
@pytest.mark.share(1)
def test_it_finds_what_was_the_fastest(measured, usual):
    count = 0
    for tiles, sizes in measured():
        cost = {tile: tile_cost(tile, *sizes, H200) for tile in tiles}
        ours = [tile for tile in tiles if any(tile == tuple(one)[:5] for one in usual)]
        for known in (tiles, ours):
            assert tiles[min(known, key=cost.get)] <= 1.05 * min(tiles[tile] for tile in known), sizes
        count += 1
    assert count >= 16


@pytest.mark.parametrize("kind", ["int8-rows", "int8", "int4"])
def test_where_tensor_cores_read_registers(kind):
    """Of the tiles that are tried there; of all that were measured they have one that is as fast as the fastest."""
    usual = NARROW_SHAPES if kind == "int8-rows" else [tile for tile in TILES if tile.warps == 4]
    given = (1, 1) if kind == "int8-rows" else (2, 1)
    for product, ways in json.loads((RESULTS / "nvidia-h200-made-8.9-tiles.json").read_text())["us"][kind].items():
        name, rows = product.split()
        gate = name == "gate-up"
        us = {tuple(map(int, way.split())): us for way, us in ways.items() if way[0].isdigit()}
        ours = [tile for tile in us if tile in {tuple(one)[:5] for one in usual}]
        sizes = int(rows), SIZES[name] // (1 + gate), gate, *given, REGISTERS
        assert us[min(ours, key=lambda tile: tile_cost(tile, *sizes))] <= 1.09 * min(us.values()), product


@pytest.mark.parametrize("known", CARDS, ids=lambda one: f"{one.name}-{one.processors}")
def test_every_card_has_a_tile(known):
    shapes = NARROW_SHAPES if reads_registers(known) else SHAPES
    for tiles, itemsize in ((TILES, 2), (TILES, 4), (shapes, 1)):
        for rows, n in ((65, 4096), (512, 28672), (4096, 320)):
            costs = [tile_cost(one, rows, n, False, itemsize, 1, known) for one in tiles]
            assert min(costs) < math.inf
