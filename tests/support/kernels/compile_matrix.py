"""Every configuration of every kernel that is chosen for a card, for all cases of all operations: whether it compiles,
how much shared memory it takes and how much it spills. To be imported as `absent_gpu` is.
"""

import contextlib
import hashlib
import io
import os
import re
from collections.abc import Iterable, Sequence
from unittest import mock

import torch
import triton
from accel_kernels import OPS, Op, experts
from accel_kernels.device import Card
from accel_kernels.moe.chooser import itemsize_of, possible_ways
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

from support.kernels.absent_gpu import GPU, Launch, absent_gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GOLDEN = 0.6180339887  # as in tests/conftest.py
MOST_SPILLED = 2048  # bytes of a thread
Ways = dict[tuple, Launch]
make_llir = CUDABackend.make_llir


def configurations(cards: Sequence[Card], ops: Iterable[Op] = OPS, dtypes: int = 3, share: int = 1) -> Ways:
    """What launchers choose for cards of one generation, by what is compiled. dtypes: how many a case runs in. share:
    of the cases of an op one in so many. Raises what launchers raise.
    """
    ways: Ways = {}
    for op in ops:
        for number, case in enumerate(op.cases):
            left = dtypes if number * GOLDEN % 1 < 1 / share else 0
            for turn in range(3 if left else 0):
                with absent_gpu(cards[0]):
                    args, more = case.make(GPU, DTYPES[(number + turn) % 3])
                    if not left or op.supports(*args, **more) is not None:
                        continue
                left -= 1
                for card in cards:
                    with absent_gpu(card) as found:
                        op.triton(*args, **more)
                        for way in raced(op, *args):
                            op.triton(*args, **more, tile=way)
                        if op.instead is not None:
                            op.instead(*args, **more)
                    ways |= {launch.way: launch for launch in found}
    return ways


def raced(op: Op, x: torch.Tensor, *given) -> list[str]:
    """What a chooser may take instead of the likely way, once it has timed them."""
    if op is not experts:
        return []
    index, _, weights = given
    return possible_ways(*index.shape, weights.experts, itemsize_of(x.dtype, weights))[1:]


def sampled(ways: Ways, count: int) -> list[Launch]:
    """So many of them, others when a kernel or what it calls has changed."""

    def turn(launch: Launch) -> str:
        return hashlib.sha256(f"{launch.kernel.cache_key}{launch.way}".encode()).hexdigest()

    return sorted(ways.values(), key=turn)[:count]


class _Enough(Exception):
    pass


def _written_out(self, src, metadata, *_):
    raise _Enough(metadata["shared"])


def _read(*_):
    raise _Enough


def read(launch: Launch) -> None:
    """Compiles it up to the compiler's own passes. Raises what the compiler raises."""
    with mock.patch.multiple(CUDABackend, make_ttir=_read, gluon_to_ttgir=_read), contextlib.suppress(_Enough):
        launch.compiled()


def shared_bytes(launch: Launch) -> int:
    """Of shared memory, compiled as far as says so. Raises what the compiler raises."""
    with mock.patch.object(CUDABackend, "make_ptx", _written_out), mock.patch.dict(os.environ, DISABLE_LLVM_OPT="1"):
        try:
            return launch.compiled().metadata.shared
        except _Enough as enough:
            return enough.args[0]


def assembled(launch: Launch) -> tuple[int, int]:
    """Bytes of shared memory, and those that a thread spills. ptxas refuses instructions that the card lacks."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), mock.patch.object(knobs.nvidia, "dump_ptxas_log", True):
        compiled = launch.compiled()
    spilled = map(int, re.findall(r"(\d+) bytes spill stores", told.getvalue()))
    return compiled.metadata.shared, max(spilled, default=0)


def examined(launches: Iterable[Launch], card: Card, whole: bool) -> list[tuple[str, int, int]]:
    """Kernel, bytes of shared memory, and of spills (0 where not `whole`). Raises AssertionError naming all that
    are not compiled, do not fit, or spill more than is usual and than on 9.0, where it was measured.
    """
    rows, wrong, driver = [], [], triton.runtime.driver.active
    for launch in launches:
        try:
            shared, spilled = assembled(launch) if whole else (shared_bytes(launch), 0)
        except Exception as error:
            wrong.append((launch.way, error))
            continue
        rows.append((launch.name, shared, spilled))
        usual = spilled <= MOST_SPILLED
        if not usual:
            with absent_gpu(90):
                usual = spilled <= assembled(launch)[1]
            triton.runtime.driver.set_active(driver)
        if shared > card.shared_memory or not usual:
            wrong.append((launch.way, shared, spilled))
    assert not wrong, wrong
    return rows
