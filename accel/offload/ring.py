"""Buffers on the card that the weights of blocks come to in turns, each to the same one at every call."""

import torch
from accel_kernels.device import card
from torch.utils._python_dispatch import _disable_current_modes

from accel.errors import logged

STAGED = 2**25  # bytes of each buffer of a `Staging`: beside what may be pinned, so little
NOT_IN_A_GRAPH = "weights beyond what could be pinned (host_memory) are copied by the CPU, which a graph does not"


def repeated(nbytes: int, bus: float) -> list[int]:
    """Bytes of copies that take as long as one of nbytes at that share of the bus's speed: it again, and a part."""
    again, rest = divmod(int(nbytes / bus), nbytes) if nbytes else (0, 0)
    return [nbytes] * again + [rest] * (rest > 0)


class Staging:
    """Pinned memory through which blocks go, a part after the other, that lie in memory that is not."""

    def __init__(self, nbytes: int, number: int = 2):
        self.size = min(nbytes, STAGED)
        with torch.inference_mode(False):
            self.buffers = [torch.empty(self.size, dtype=torch.uint8, device="cpu").pin_memory() for _ in range(number)]
        self.free = [torch.cuda.Event() for _ in self.buffers]
        self.next = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """On the current stream. The CPU waits until the copy before the last has left its buffer."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(NOT_IN_A_GRAPH)
        for part, there in zip(source.split(self.size), target.split(self.size), strict=True):
            buffer, free = self.buffers[self.next][: part.nbytes], self.free[self.next]
            self.next = (self.next + 1) % len(self.buffers)
            free.synchronize()
            buffer.copy_(part)
            there.copy_(buffer, non_blocking=True)
            free.record()


class Ring:
    """Block number i of those that stream has buffer i modulo their number.

    sources: their bytes on the CPU, in the order of the calls. pinned: numbers of those that the GPU copies by itself;
    others go through `Staging`. stream: for copies, None without a GPU. Any order is right; in this one the next blocks
    are on their way while a block is computed. Copies are ordered by events, in a capture too.
    """

    def __init__(
        self,
        buffers: list[torch.Tensor],
        sources: list[torch.Tensor],
        pinned: set[int],
        stream: torch.cuda.Stream | None,
    ):
        self.buffers, self.sources, self.pinned = buffers, sources, pinned
        self.held: list[int | None] = [None] * len(buffers)  # the block whose bytes are there, or on their way
        self.begun = False
        self.stream = stream
        self.bus = 1.0 if stream is None else card(stream.device).bus
        self.ready = [] if self.stream is None else [torch.cuda.Event() for _ in buffers]
        self.pending: set[int] = set()  # buffers whose copies nobody has waited for
        self.staging: Staging | None = None
        if self.stream is not None and len(pinned) < len(sources):
            try:
                self.staging = Staging(max(source.nbytes for i, source in enumerate(sources) if i not in pinned))
            except RuntimeError as error:  # nothing at all can be pinned: the driver copies, and waits
                logged(error)

    def begin(self, first: int, ahead: bool = True) -> None:
        """The blocks from this one on are on their way, unless some are already, or no other than one is wanted."""
        if not self.begun:
            self.begun, self.held = True, [None] * len(self.buffers)
            for i in range(first, min(first + len(self.buffers), len(self.sources)) if ahead else first):
                self._fill(i)

    def take(self, i: int) -> None:
        """What the current stream is given from now on finds block i in its buffer."""
        self.begin(i)
        slot = i % len(self.buffers)
        if self.held[slot] != i:
            self._fill(i)
        self._wait(slot)

    def leave(self, i: int) -> None:
        """What reads block i has been given to the current stream: its buffer may be filled with the next one."""
        if i + len(self.buffers) < len(self.sources):
            self._fill(i + len(self.buffers))

    def end(self) -> None:
        """A run of the model is over or was given up, after which what is in the buffers does not count, and no other
        waits for its events: the current stream waits for copies that nobody took, since a capture must be one whole.
        """
        self.begun = False
        try:
            for slot in tuple(self.pending):
                self._wait(slot)
        finally:
            self.pending.clear()

    def _wait(self, slot: int) -> None:
        if self.stream is not None and slot in self.pending:
            torch.cuda.current_stream(self.stream.device).wait_event(self.ready[slot])
            self.pending.remove(slot)

    def _fill(self, i: int) -> None:
        slot = i % len(self.buffers)
        self.held[slot] = None
        self._copy(i, slot)  # which may raise
        self.held[slot] = i

    def _copy(self, i: int, slot: int) -> None:
        source, target = self.sources[i], self.buffers[slot][: self.sources[i].nbytes]
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():  # who notes copies notes none here
            if self.stream is None:
                target.copy_(source)
                return
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))  # which reads what was there
            with torch.cuda.stream(self.stream):
                for part in repeated(source.nbytes, self.bus):
                    if self.staging is None or i in self.pinned:
                        target[:part].copy_(source[:part], non_blocking=True)
                    else:
                        self.staging.copy(target[:part], source[:part])
                self.ready[slot].record()
        self.pending.add(slot)
