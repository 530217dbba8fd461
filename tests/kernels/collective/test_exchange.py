"""Pieces that ranks write into each other's rooms, as one of two ranks in Triton's interpreter, to which the other has
given its signals already; and compiled for GPUs that no machine here has.
"""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from accel_kernels.collective.exchange import Layout, aligned, alike, unwritable

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
from accel_kernels.collective.exchange_triton import exchange_kernel as kernel

names = kernel.arg_names
for arch, several in ((80, (3,)), (90, (1, 3)), (100, (1,))):
    for tensors in several:
        given = {"RANKS": 2, "TENSORS": tensors, "ROWS": 8, "COLUMNS": 512, "WAITS": True, "PDL": arch >= 90}
        kinds = {name: "i32" for name in names} | dict.fromkeys(given, "constexpr")
        kinds |= {"sources": ("*bf16",) * tensors, "strides": (("i32",) * 3,) * tensors}
        kinds |= dict.fromkeys(("buffers_ptr", "signals_ptr"), "*i64")
        even = {}
        for at, name in enumerate(names):
            if name in ("rank", *given):
                continue
            if name == "sources":
                even |= {(at, i): [["tt.divisibility", 16]] for i in range(tensors)}
            elif name == "strides":
                even |= {(at, i, j): [["tt.divisibility", 16]] for i in range(tensors) for j in range(3)}
            elif name != "middle":
                even[(at,)] = [["tt.divisibility", 16]]
        constants = {(names.index(name),): value for name, value in given.items()}
        source = ASTSource(kernel, kinds, constants, even)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 8})
        ptx = compiled.asm["ptx"]
        assert compiled.asm["cubin"]
        assert "ld.global.v4" in ptx and "st.global.v4" in ptx, "numbers are moved 16 bytes at a time"
        assert ptx.count("release.sys") == ptx.count("acquire.sys") == 2 * 2
print("compiled")
"""


def test_it_compiles_for_gpus_with_wide_moves(tmp_path: Path):
    assert "compiled" in in_a_process(CHECK, tmp_path)
