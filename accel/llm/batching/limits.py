"""What continuous batching may use of a device: requests at a time, tokens a step, memory for keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from accel.llm.kv_cache.blocks import BLOCK, Shape
from accel.llm.kv_cache.layer_sets import LayerSet
from accel.llm.kv_cache.pages import page_bytes, pages_for

CPU_BYTES = 2**30  # for keys and values on a CPU, whose free memory is others' too
SPARE = 1.25  # pages by those that the requests at a time can fill: prompts that begin alike stay findable


@dataclass(frozen=True)
class Limits:
    """Bounds of an `Engine`.

    rows: requests that run at a time. tokens: new tokens of one step; longer prompts are read in several. context:
    tokens that a request may come to, prompt and answer. memory: the share of each device's free memory that keys and
    values may take. pages: how many pages of 64 tokens and one set of layers there are, None for as many as fit and can
    be of use. share: whether requests share what their prompts begin with. logprobs: whether log probabilities of the
    drawn tokens are wanted.

    Raises ValueError naming the value that makes no sense.
    """

    rows: int = 512
    tokens: int = 2048
    context: int = 4096
    memory: float = 0.9
    pages: int | None = None
    share: bool = True
    logprobs: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: give a number above 0")
        if not 0 < self.memory <= 1:
            raise ValueError(f"memory={self.memory!r}: give a share of the free memory, above 0 and up to 1")
        if self.pages is not None and self.pages < 1:
            raise ValueError(f"pages={self.pages!r}: give a number above 0, or None")

    @property
    def columns(self) -> int:
        """Blocks that a request may come to."""
        return -(-self.context // BLOCK)

    def page_count(self, shapes: Sequence[Shape], sets: Sequence[LayerSet]) -> int:
        """Pages to allocate, page 0 included: as many as fit on the device that has room for the fewest. Raises
        torch.OutOfMemoryError where not one block fits.
        """
        if self.pages is not None:
            return self.pages + 1
        devices = dict.fromkeys(shape.device for shape in shapes)
        rooms = {one: pages_for(shapes, sets, int(self.memory * free_bytes(one)), one) for one in devices}
        least = min(rooms, key=lambda one: rooms[one])
        room = rooms[least]
        if room <= len(sets):
            need = page_bytes(shapes, sets, least) * (len(sets) + 1) / 2**20
            raise torch.OutOfMemoryError(
                f"no memory for keys and values: {need:.0f} MiB are the least, "
                f"and {self.memory:.0%} of what is free on {'the device' if len(rooms) == 1 else least} is less"
            )
        useful = int(self.rows * self.columns * len(sets) * (SPARE if self.share else 1)) + 1
        return min(room, max(useful, len(sets) + 1))


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated there: those of the device that are free, and those that torch holds unused."""
    if device.type != "cuda":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
