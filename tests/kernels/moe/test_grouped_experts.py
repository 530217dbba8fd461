"""Experts and their products."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from accel_kernels.moe import experts_triton
from accel_kernels.moe.experts import CASES, experts
from accel_kernels.moe.grouped_triton import group_kernel
from accel_kernels.moe.rows_triton import expert_rows_down_kernel
from accel_kernels.moe.tiles import GEMV, Tile, likely_tile

from support.kernels.waiting import NothingWaits
from support.noted import noted

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")


def given(name: str, dtype: torch.dtype = torch.float32) -> tuple:
    args, _ = next(case for case in CASES if case.name == name).make(torch.device("cpu"), dtype)
    return args


@pytest.mark.parametrize(("pairs", "many", "rows"), [(2500, 7, 16), (33, 40, 32), (128, 2, 64), (129, 3, 16)])
@pytest.mark.parametrize("kind", ["random", "one", "missing"])
def test_every_pair_has_one_place(pairs, many, rows, kind):
    index = torch.randint(many, (pairs,), generator=torch.Generator().manual_seed(0))
    if kind == "one":
        index.fill_(many - 1)
    if kind == "missing":  # experts of another rank
        index[::3], index[1::5] = many, -1
    numbers = pairs // rows + many
    order, starts, tiles = (torch.full((n,), -7, dtype=torch.int32) for n in (pairs, many + 1, numbers))
    block = 128 if pairs < 1000 else 1024
    group_kernel[(many,)](index, order, starts, tiles, pairs, many, rows, ONCE=pairs <= block, BLOCK=block, PDL=False)
    there = (index >= 0) & (index < many)
    counts = torch.bincount(index[there], minlength=many)
    assert starts.tolist() == [0, *counts.cumsum(0).tolist()]
    wanted = torch.where(there, index, many).argsort(stable=True)[: int(there.sum())]
    assert order[: len(wanted)].tolist() == wanted.tolist()  # by expert, and then in the order of the tokens
    assert set(order[len(wanted) :].tolist()) <= {-7}
    covered = []
    for tile, expert in enumerate(tiles.tolist()):
        assert -1 <= expert < many
        if expert >= 0:
            first = int(starts[expert]) + (tile - int(starts[expert]) // rows - expert) * rows
            covered += range(first, min(first + rows, int(starts[expert + 1])))
    assert covered == list(range(len(wanted)))


TILED = [
    *(("several", tile, False) for tile in (GEMV, "32", "64", "128")),
    *(("gpt-oss", tile, False) for tile in ("16", "64", "128")),
    *((name, "written 64", False) for name in ("int8-zeros", "int4-zeros")),
    *itertools.product(("gpt-oss", "interleaved", "transposed", "all", "int8-zeros"), ("16", GEMV), [True]),
    ("int4-zeros", "32", True),
]


@pytest.mark.parametrize(("name", "tile", "missing"), TILED)
@pytest.mark.turns(2)
def test_every_tile_gives_the_same(name, tile, missing, poisoned):
    """missing: choices of experts that there are none of, which add nothing."""
    x, index, shares, weights = given(name)
    if missing:
        index[0, 0], index[1] = weights.experts, -1
    wanted = experts.reference(x, index, shares, weights)
    assert wanted[0].any() and (not missing or not wanted[1].any())
    found = experts_triton.experts(x, index, shares, weights, tile=tile)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, experts_triton.experts(x, index, shares, weights, tile=tile))


@pytest.mark.parametrize("name", ["grouped", "grouped-gpt-oss", "grouped-int8"])
def test_a_short_tail_has_a_product_of_its_own(name, monkeypatch, poisoned):
    x, index, shares, weights = given(name)
    index[:, 0] = 1  # as many pairs as fill a tile and leave some, or no tail; the others' are few
    rows = noted(monkeypatch, experts_triton, "launch", lambda *args, **meta: (meta.get("ROWS"), meta.get("TAIL")))
    for long in (32, 16):
        y = experts_triton.experts(x, index, shares, weights, tile=Tile(long, 32, 32, 64, 4, 2, long // 2))
        torch.testing.assert_close(y, experts.reference(x, index, shares, weights), rtol=1e-5, atol=1e-5)
    assert rows.count((32, 16)) == rows.count((16, 8)) == (0 if "int8" in name else 2)


@pytest.mark.parametrize("name", ["gpt-oss", "grouped-gpt-oss", "grouped-int8"])
def test_what_is_no_number_stays_none(name):
    """Though a clamp stands after it."""
    x, *rest = given(name)
    x[1] = torch.nan
    found = experts_triton.experts(x, *rest)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("name", ["tiny", "grouped", "grouped-gpt-oss"])
def test_nothing_waits_for_the_device(name, monkeypatch):
    """What launches hold is no business of torch's; all that stands around them is."""
    launched = []
    monkeypatch.setattr(experts_triton, "launch", lambda kernel, grid, *args, **meta: launched.append((kernel, grid)))
    args = given(name)
    with NothingWaits() as mode:
        assert experts.supports(*args) is None
        experts_triton.experts(*args)
    assert mode.seen and len(launched) == (2 if name == "tiny" else 4)
    assert all(type(n) is int for _, grid in launched for n in grid)
    with pytest.raises(AssertionError, match="waits"), NothingWaits():
        experts.reference(*args)


def test_tiles_follow_the_pairs_of_an_expert():
    found = [likely_tile(tokens * 8, 128) for tokens in (17, 32, 192, 193, 512, 1536, 1537)]
    assert found == ["16", "16", "16", "64", "64", "64", "128/64"]
    assert likely_tile(17 * 2, 8) == "16" and likely_tile(512 * 2, 8) == "128/64"
    assert likely_tile(512 * 2, 8, 1) == likely_tile(512 * 2, 8, 4) == "128"
    assert likely_tile(0, 8) == "16"


def test_weights_that_no_kernel_reads_are_named():
    x, index, shares, weights = given("grouped-gpt-oss")
    quantized = given("grouped-int8")[3]

    def refused(x=x, index=index, shares=shares, **changed) -> str:
        reason = experts.supports(x, index, shares, weights._replace(**changed))
        assert isinstance(reason, str)
        return reason

    assert experts.supports(x, index, shares, weights) is None
    assert "different dtypes" in refused(x.half())
    assert "different dtypes" in refused(down=weights.down.half())
    assert "channels" in refused(x[:, :64].contiguous())
    assert "do not fit" in refused(gate_up=weights.gate_up[:, :72])
    assert "gate_up not contiguous" in refused(gate_up=weights.gate_up.repeat(1, 1, 2)[:, :, ::2])
    assert "one bias" in refused(down_bias=None)
    assert "a bias of down" in refused(down_bias=weights.down_bias[:, :8])
    assert "activation 'tan'" in refused(gating=weights.gating._replace(activation="tan", alpha=1.0))
    assert "alpha with 'gelu'" in refused(gating=weights.gating._replace(activation="gelu"))
    assert "int64" in refused(index=index.int())
    assert "other shapes" in refused(index=index[:5])
    assert "shares not contiguous" in refused(shares=shares.t().contiguous().t())
    assert "one stack of two" in refused(down=quantized.down)
    by_groups = quantized.gate_up._replace(scales=quantized.gate_up.scales.repeat(1, 2))
    args = given("grouped-int8")
    assert experts.supports(*args) is None
    assert "8 bits by groups" in experts.supports(*args[:3], args[3]._replace(gate_up=by_groups))
    zeros = torch.zeros_like(args[3].down.scales, dtype=torch.int8)
    assert "different numbers" in experts.supports(*args[:3], args[3]._replace(down=args[3].down._replace(zeros=zeros)))


@pytest.mark.parametrize(("name", "block"), [("all", 16), ("all", 64), ("interleaved", 8)])
def test_any_number_of_steps_gives_the_same(name, block, monkeypatch, poisoned):
    x, index, shares, weights = given(name)
    index[0, 0] = weights.experts  # there is none of that number
    launched = noted(monkeypatch, experts_triton, "launch", lambda kernel, grid, *args, **meta: (kernel, meta))
    monkeypatch.setattr(experts_triton, "ALONG", block * x.itemsize)
    found = experts_triton.experts(x, index, shares, weights)
    kernel, meta = launched[-1]
    assert kernel is expert_rows_down_kernel and meta["BLOCK_K"] == block
    torch.testing.assert_close(found, experts.reference(x, index, shares, weights), rtol=1e-5, atol=1e-5)
