"""The sum over ranks in one launch, as one of two ranks in Triton's interpreter: the other's part and signals are there
already; and compiled for GPUs that no machine here has.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from accel_kernels.collective.symmetric_memory import INSIDE, OUTSIDE, PIECE, SymmetricMemory

from support.kernels.compiler import in_a_process

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


CHECK = """
import triton
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget
from accel_kernels.collective.symmetric_sum_triton import symmetric_sum_kernel as kernel

names = kernel.arg_names
tensors = ("part_ptr", "bias_ptr", "residual_ptr", "y_ptr")
kinds = dict.fromkeys(tensors, "*bf16") | dict.fromkeys(("buffers_ptr", "signals_ptr"), "*i64")
kinds |= dict.fromkeys(("place", "count", "columns", "rank"), "i32") | {"scale": "fp32"}
even = {(names.index(name),): [["tt.divisibility", 16]] for name in kinds if name not in ("scale", "rank")}
for arch, several in ((80, (4,)), (90, (2, 4)), (100, (2,))):
    for ranks in several:
        given = {"RANKS": ranks, "BLOCK": 1024, "PDL": arch >= 90}
        signature = kinds | dict.fromkeys(given, "constexpr")
        constants = {(names.index(name),): value for name, value in given.items()}
        source = ASTSource(kernel, signature, constants, even)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
        ptx = compiled.asm["ptx"]
        assert compiled.asm["cubin"]
        assert ptx.count("ld.global.cg.v4") == ranks, "parts are read 16 bytes at a time"
        assert ptx.count("release.sys") == ptx.count("acquire.sys") == ranks
print("compiled")
"""


def test_it_compiles_for_gpus_with_wide_reads(tmp_path: Path):
    assert "compiled" in in_a_process(CHECK, tmp_path)
