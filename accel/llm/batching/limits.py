"""What continuous batching may use of a device: requests at a time, tokens a step, memory for keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig

from accel.libraries.batching import page_size
from accel.llm.generation.decoder import DecoderForward
from accel.llm.kv_cache.layer_sets import LayerSet, layer_sets
from accel.llm.kv_cache.paged_kv_cache import block_bytes
from accel.llm.kv_cache.shape import BLOCK, LayerShape, StateShape
from accel.llm.recording.inputs import most_configured

CPU_BYTES = 2**30  # for keys and values on a CPU, whose free memory is others' too
SPARE = 1.25  # blocks by those that the requests at a time can fill: prompts that begin alike stay findable


@dataclass(frozen=True)
class Limits:
    """Bounds of an `Engine`.

    rows: requests that run at a time. tokens: new tokens of one step; longer prompts are read in several. context:
    tokens that a request may come to, prompt and answer. memory: the share of each device's free memory for keys and
    values. blocks: of 64 tokens and one set of layers each, None for as many as fit and can be of use. share: whether
    requests share what their prompts begin with. logprobs: whether log probabilities of drawn tokens are wanted.

    Raises ValueError naming the value that makes no sense.
    """

    rows: int = 512
    tokens: int = 2048
    context: int = 4096
    memory: float = 0.9
    blocks: int | None = None
    share: bool = True
    logprobs: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: give a number above 0")
        if not 0 < self.memory <= 1:
            raise ValueError(f"memory={self.memory!r}: give a share of the free memory, above 0 and up to 1")
        if self.blocks is not None and self.blocks < 1:
            raise ValueError(f"blocks={self.blocks!r}: give a number above 0, or None")

    @property
    def columns(self) -> int:
        """Blocks of one set that a request may come to."""
        return -(-self.context // BLOCK)

    def block_count(self, shapes: Sequence[LayerShape], sets: Sequence[LayerSet]) -> int:
        """Blocks to allocate, block 0 included: as many as fit on the device that has room for the fewest. Raises
        torch.OutOfMemoryError where not one block fits.
        """
        if self.blocks is not None:
            return self.blocks + 1
        devices = dict.fromkeys(shape.device for shape in shapes)
        rooms = {one: int(self.memory * free_bytes(one)) // block_bytes(shapes, sets, one) for one in devices}
        least = min(rooms, key=lambda one: rooms[one])
        room = rooms[least]
        if room <= len(sets):
            need = block_bytes(shapes, sets, least) * (len(sets) + 1) / 2**20
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


def limits_of(forward: DecoderForward, config: ContinuousBatchingConfig, hints: Any = None) -> Limits:
    """What stock's configuration says of an engine's size. Raises ValueError for numbers that make no sense.

    hints: of the requests to come, those of `generate_batch`. Without, a request may be as long as the model's texts.
    """
    known = hints is not None and hints.max_prompt_length and hints.max_generated_length
    context = most_configured(forward.module) or Limits.context
    if known:
        context = hints.max_prompt_length + hints.max_generated_length
    context = min(context, forward.most_positions or context)
    rows = config.max_requests_per_batch
    if rows is None:
        rows = min(Limits.rows, (hints.num_requests if hints is not None else 0) or Limits.rows)
    blocks = None if config.num_blocks is None else max(1, config.num_blocks * page_size(config) // BLOCK)
    return Limits(
        rows=rows,
        tokens=Limits.tokens if config.max_batch_tokens is None else config.max_batch_tokens,
        context=context,
        memory=Limits.memory if config.max_memory_percent is None else config.max_memory_percent,
        blocks=None if blocks is None else blocks * len(sets_of(forward)),
        share=config.allow_block_sharing,
        logprobs=config.return_logprobs,
    )


def sets_of(forward: DecoderForward) -> tuple[LayerSet, ...]:
    """The sets of layers that share blocks. Raises ValueError where a layer keeps no keys and values."""
    shapes = [shape for shape in forward.shapes() if not isinstance(shape, StateShape)]
    if len(shapes) < len(forward.shapes()):
        raise ValueError("requests are not batched where a layer keeps a state of a row")
    windows = {layer.spec.place: layer.spec.window for layer in forward.layers}
    some = windows[forward.places[0]]  # for places where nothing is kept
    return layer_sets(shapes, [windows.get(place, some) for place in range(len(shapes))])
