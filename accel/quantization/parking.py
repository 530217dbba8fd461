"""Copies weights from a GPU into the CPU's memory while the GPU goes on working.

A plain copy into ordinary memory is slow: one driver thread carries it, and touches every page for the first time. Here
pieces go through a few page-locked buffers, from which all of torch's threads copy them on. The weights end in ordinary
memory: page-locking takes long, and keeps memory from other programs.
"""

import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch

from accel.patching.rule import set_data

PIECE = 2**25  # bytes of a buffer
BUFFERS = 4
WAITING = 2  # weights in the queue; these and the one that is being copied are still on the GPU


class Parking:
    """`park(weight)` moves a tensor to the CPU, with the same values and strides; all are there at the end of the
    `with` block.

    An error of a copy is raised by the next call, or at the end; weights not copied by then stay where they are.
    """

    def __init__(self, piece: int = PIECE):
        self.piece = piece
        self.jobs: queue.Queue = queue.Queue(WAITING)
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def __enter__(self) -> "Parking":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.thread is not None:
            self.jobs.put(None)
            self.thread.join()
            self.thread = None
        if error is None:
            self._raise()

    def park(self, weight: torch.Tensor) -> None:
        """Copies what is in it once all is done that the current stream was given before."""
        self._raise()
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()
        ready = torch.cuda.current_stream(weight.device).record_event() if weight.is_cuda else None
        self.jobs.put((weight, ready))

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        jobs = iter(self.jobs.get, None)
        try:
            with torch.inference_mode(False), torch.no_grad():
                _carry(jobs, self.piece)
        except BaseException as error:  # raised where it can be caught
            self.error = error
            for _ in jobs:  # whoever waits for room in the queue must not wait for ever
                pass


class Piece(NamedTuple):
    """Bytes of a weight, and their place on the CPU. whole: that memory as the weight is to have it, with its last."""

    source: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor
    whole: torch.Tensor | None


def _carry(jobs: Iterator[tuple], size: int) -> None:
    cuda = torch.cuda.is_available()
    buffers = deque(torch.empty(size, dtype=torch.uint8, pin_memory=cuda, device="cpu") for _ in range(BUFFERS))
    streams: dict[torch.device, torch.cuda.Stream] = {}
    pending: deque[tuple] = deque()

    def finish_oldest() -> None:
        piece, buffer, copied = pending.popleft()
        if copied is not None:
            copied.synchronize()
        piece.target.copy_(buffer[: len(piece.target)])
        buffers.append(buffer)
        if piece.whole is not None:
            set_data(piece.weight, lambda data: piece.whole)

    for weight, ready in jobs:
        stream = None
        if ready is not None:
            stream = streams.get(weight.device) or streams.setdefault(weight.device, torch.cuda.Stream(weight.device))
            stream.wait_event(ready)
        for piece in _pieces(weight, size):
            if not buffers:
                finish_oldest()
            buffer = buffers.popleft()
            with torch.cuda.stream(stream) if stream else nullcontext():
                buffer[: len(piece.source)].copy_(piece.source, non_blocking=True)
            pending.append((piece, buffer, stream.record_event() if stream else None))
    while pending:
        finish_oldest()


def _pieces(weight: torch.Tensor, size: int) -> Iterator[Piece]:
    weight_now = weight.detach()
    whole = torch.empty_like(weight_now, device="cpu")
    if whole.stride() != weight_now.stride():  # gaps in its memory
        set_data(weight, torch.Tensor.cpu)
        return
    source, target = (one.as_strided((one.numel(),), (1,)).view(torch.uint8).split(size) for one in (weight_now, whole))
    for number, (one, other) in enumerate(zip(source, target, strict=True), 1):
        yield Piece(one, other, weight, whole if number == len(source) else None)
