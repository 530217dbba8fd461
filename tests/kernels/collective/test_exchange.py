"""Ranks that exchange rows and sum them in memory they share."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from accel_kernels.collective.exchange import Layout, aligned, alike, unwritable
from accel_kernels.collective.symmetric_memory import INSIDE, OUTSIDE, PIECE, Shared, SymmetricMemory
from accel_kernels.device import replayed

from support.kernels.cards import made_up
from support.kernels.compiler import in_a_process

PROGRAMS = 3
TOKENS, HEADS, DIM = 37, 3, 24  # of one piece
PLACE = 64


def layouts(wide: int) -> list[Layout]:
    """Of two tensors (tokens, ranks, heads, dim), the second's rows `wide` numbers apart, to (ranks, tokens, heads,
    dim); heads and dim are one dimension.
    """
    inner = HEADS * DIM
    return [Layout((TOKENS, inner), (row, 1), (inner, 1), inner, TOKENS * inner) for row in (2 * inner, wide)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("dtype", "waits"), [(torch.float32, True), (torch.float16, False)])
def test_pieces_come_to_their_places(rank, dtype, waits):
    from accel_kernels.collective.exchange_triton import exchange

    inner, wide = HEADS * DIM, 3 * HEADS * DIM + 8
    count = TOKENS * inner
    generator = torch.Generator().manual_seed(rank)
    first = torch.randn(TOKENS, 2 * inner, generator=generator).to(dtype)
    second = torch.randn(TOKENS, wide, generator=generator).to(dtype)[:, : 2 * inner]
    each = aligned(2 * count)
    rooms = [torch.full((PLACE + 2 * each,), float("nan"), dtype=dtype) for _ in range(2)]
    cells = [torch.zeros(2 * PROGRAMS, 2, dtype=torch.int32) for _ in range(2)]
    cells[rank][:, 1 - rank] = 1  # the other has come, and has written
    addresses = (torch.tensor([one.data_ptr() for one in held]) for held in (rooms, cells))
    exchange([first, second], *addresses, PLACE, each, layouts(wide), rank, PROGRAMS, waits)
    for number, tensor in enumerate((first, second)):
        begin = PLACE + number * each
        for peer in range(2):
            sent = tensor[:, peer * inner : (peer + 1) * inner].flatten()
            came = rooms[peer][begin : begin + 2 * count].view(2, count)
            assert torch.equal(came[rank], sent), (number, peer)
            assert came[1 - rank].isnan().all(), "nothing else is written to"
    assert cells[rank].tolist() == [[0, 0]] * 2 * PROGRAMS if waits else cells[rank][::2].sum() == PROGRAMS
    assert cells[1 - rank][:, rank].tolist() == [int(waits), 1] * PROGRAMS, "signals are given, and were taken"


def test_in_three_dimensions():
    """Heads that are not next to each other where they are read: (heads, tokens, dim) to (tokens, heads, dim)."""
    from accel_kernels.collective.exchange_triton import exchange

    x = torch.randn(HEADS, 2, TOKENS, DIM)
    layout = Layout(
        (HEADS, TOKENS, DIM), (2 * TOKENS * DIM, DIM, 1), (DIM, 2 * HEADS * DIM, 1), TOKENS * DIM, HEADS * DIM
    )
    rooms = [torch.full((2 * x.numel(),), float("nan")) for _ in range(2)]
    cells = [torch.zeros(2 * PROGRAMS, 2, dtype=torch.int32) for _ in range(2)]
    cells[0][:, 1] = 1
    addresses = (torch.tensor([one.data_ptr() for one in held]) for held in (rooms, cells))
    exchange([x], *addresses, 0, x.numel(), [layout], 0, PROGRAMS, True)
    for peer in range(2):
        came = rooms[peer][: x.numel()].view(TOKENS, 2, HEADS, DIM)
        assert torch.equal(came[:, 0], x[:, peer].transpose(0, 1)) and came[:, 1].isnan().all()


def test_what_is_not_for_the_kernel():
    one, other = layouts(500)
    assert (
        unwritable(torch.float32, one) is None
        and alike([one, other])
        and not alike([one, other._replace(target_rank=8)])
    )
    assert "dtype" in unwritable(torch.float64, one)
    assert "gaps" in unwritable(torch.bfloat16, one._replace(source=(1, 2)))
    assert "dimensions" in unwritable(torch.bfloat16, one._replace(sizes=(2, 2, 2, 2)))
    assert "numbers" in unwritable(torch.bfloat16, one._replace(sizes=(2**16, 2**16)))


CHECK = """
import triton
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget
from accel_kernels.collective.exchange_triton import exchange_kernel
from accel_kernels.collective.symmetric_sum_triton import symmetric_sum_kernel

EVEN = [["tt.divisibility", 16]]

def ptx(kernel, kinds, given, even, arch, warps):
    names = kernel.arg_names
    kinds = {name: "i32" for name in names} | kinds | dict.fromkeys(given, "constexpr")
    kinds |= dict.fromkeys(("buffers_ptr", "signals_ptr"), "*i64")
    constants = {(names.index(name),): value for name, value in given.items()}
    even = {(names.index(name), *more): EVEN for name, *more in even}
    source = ASTSource(kernel, kinds, constants, even)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]

for arch, several in ((80, (3,)), (90, (1, 3)), (100, (1,))):
    for tensors in several:
        given = {"RANKS": 2, "TENSORS": tensors, "ROWS": 8, "COLUMNS": 512, "WAITS": True, "PDL": arch >= 90}
        kinds = {"sources": ("*bf16",) * tensors, "strides": (("i32",) * 3,) * tensors}
        even = [(name,) for name in exchange_kernel.arg_names if name not in ("rank", "middle", *given, *kinds)]
        even += [("sources", i) for i in range(tensors)]
        even += [("strides", i, j) for i in range(tensors) for j in range(3)]
        text = ptx(exchange_kernel, kinds, given, even, arch, 8)
        assert "ld.global.v4" in text and "st.global.v4" in text, "numbers are moved 16 bytes at a time"
        assert text.count("release.sys") == text.count("acquire.sys") == 2 * 2
for arch, several in ((80, (4,)), (90, (2, 4)), (100, (2,))):
    for ranks in several:
        given = {"RANKS": ranks, "BLOCK": 1024, "PDL": arch >= 90}
        kinds = dict.fromkeys(("part_ptr", "bias_ptr", "residual_ptr", "y_ptr"), "*bf16") | {"scale": "fp32"}
        even = [(name,) for name in symmetric_sum_kernel.arg_names if name not in ("rank", "scale", *given)]
        text = ptx(symmetric_sum_kernel, kinds, given, even, arch, 4)
        assert text.count("ld.global.cg.v4") == ranks, "parts are read 16 bytes at a time"
        assert text.count("release.sys") == text.count("acquire.sys") == ranks
print("compiled")
"""


@pytest.mark.turns(4)
def test_both_compile_for_gpus_with_wide_moves(tmp_path: Path):
    assert "compiled" in in_a_process(CHECK, tmp_path)


COUNT = (3, 700)  # in three pieces, the last of them short
ROOM = 4096


class TwoRanks:
    """Memory of both, on a CPU; this is `rank`."""

    def __init__(self, rank: int, other: torch.Tensor, place: int):
        self.rank, pieces = rank, -(-other.numel() // PIECE)
        self.parts = [torch.full((ROOM,), float("nan"), dtype=other.dtype) for _ in range(2)]
        self.parts[1 - rank][place : place + other.numel()] = other.flatten()
        self.cells = [torch.zeros(pieces, 2, dtype=torch.int32) for _ in range(2)]
        self.cells[rank][:, 1 - rank] = 1  # the other has told so
        self.buffers, self.signals = (
            torch.tensor([one.data_ptr() for one in held]) for held in (self.parts, self.cells)
        )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sum_bias_and_residual(rank, dtype):
    from accel_kernels.collective.symmetric_sum_triton import symmetric_sum

    generator = torch.Generator().manual_seed(rank)
    part, other, residual = (torch.randn(COUNT, generator=generator).to(dtype) for _ in range(3))
    bias = torch.randn(COUNT[1], generator=generator).to(dtype)
    two = TwoRanks(rank, other, place=64)
    got = symmetric_sum(part, bias, residual, 0.5, two.buffers, two.signals, 64, rank)
    wanted = residual.double() + 0.5 * (part.double() + other.double() + bias.double())
    assert (got.double() - wanted).abs().max() <= torch.finfo(dtype).eps * wanted.abs().max()
    assert torch.equal(two.parts[rank][64 : 64 + part.numel()], part.flatten())  # where the other reads it
    assert two.cells[rank].sum() == 0, "signals are taken"
    assert two.cells[1 - rank][:, rank].tolist() == [1] * len(two.cells[0]), "and given"


def test_gpus_that_no_test_ran_on_leave_it_to_nccl():
    with replayed(made_up(80)), pytest.raises(RuntimeError, match="no test of shared memory ran on a sm_80"):
        Shared.zeros(None, torch.device("cuda", 0), 8, torch.int32)


def test_sum_alone():
    from accel_kernels.collective.symmetric_sum_triton import symmetric_sum

    part, other = torch.randn(COUNT), torch.randn(COUNT)
    two = TwoRanks(0, other, place=0)
    assert torch.equal(symmetric_sum(part, None, None, 1.0, two.buffers, two.signals, 0, 0), part + other)


class Places(SymmetricMemory):
    """Notes the places that sums take."""

    def __init__(self):
        self.inside, self.turn, self.nothing, self.taken = False, 0, torch.zeros(8), []

    def sum(self, part):
        self.taken.append(self._place())

    def since(self) -> list[int]:
        found, self.taken = self.taken, []
        return found


def test_no_two_sums_after_another_take_one_place():
    """In a forward of any number of sums, behind any other, replayed in any order, or outside of one."""
    memory, forwards = Places(), []
    for sums in (1, 2, 3, 4, 7):
        with memory.forward():
            for _ in range(sums):
                memory.sum(None)
        forwards.append(memory.since())
    for _ in range(3):
        memory.sum(None)
    outside = memory.since()
    for one in (*forwards, outside):
        assert all(a != b for a, b in pairwise(one)), one
    for before in (*forwards, outside):
        for after in forwards:
            assert before[-1] != after[0], (before, after)
    assert set(outside) == set(OUTSIDE) and not set(OUTSIDE) & set(INSIDE)
