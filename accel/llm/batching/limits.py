"""What continuous batching may use of a device: requests at a time, tokens a step, memory for what layers keep."""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accel_kernels.device import free_memory
from transformers import ContinuousBatchingConfig

from accel.libraries.batching import page_size
from accel.llm.generation.decoder import DecoderForward
from accel.llm.kv_cache.layer_sets import LayerSet, layer_sets
from accel.llm.kv_cache.paged_kv_cache import block_bytes
from accel.llm.kv_cache.shape import BLOCK, LayerShape, StateShape
from accel.llm.recording.inputs import most_configured
from accel.offload.call_hooks import streamed_model

CPU_BYTES = 2**30  # for keys and values on a CPU, whose free memory is others' too
SPARE = 1.25  # blocks by those that the requests at a time can fill: prompts that begin alike stay findable
SLOTS = 2  # of states that a request needs: one is read and another written
STATES = 0.5  # of that memory at most, but for what blocks of keys and values have no use for


@dataclass(frozen=True)
class Limits:
    """Bounds of an `Engine`.

    rows: requests that run at a time; fewer where there is no memory for the states of so many. tokens: new tokens of
    one step; longer prompts are read in several. context: tokens that a request may come to, prompt and answer. memory:
    the share of each device's free memory for what layers keep. blocks: of 64 tokens and one set of layers each, None
    for as many as fit and can be of use. share: whether requests share what their prompts begin with. logprobs: whether
    log probabilities of drawn tokens are wanted. slots: for states, None for as many as fit and can be of use. most:
    bytes for what layers keep, None for all that is free.

    Raises ValueError naming the value that makes no sense.
    """

    rows: int = 512
    tokens: int = 2048
    context: int = 4096
    memory: float = 0.9
    blocks: int | None = None
    share: bool = True
    logprobs: bool = False
    slots: int | None = None
    most: int | None = None

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

    def fitted(self, shapes: Sequence[LayerShape], sets: Sequence[LayerSet]) -> "Limits":
        """With rows, slots and blocks as there is room. Raises torch.OutOfMemoryError where one request has none."""
        slots = self.slot_count(shapes, sets)
        rows = self.rows if slots is None else min(self.rows, max(1, int(slots / (SLOTS * self._spare))))
        fitted = replace(self, rows=rows, slots=slots)
        return replace(fitted, blocks=fitted.block_count(shapes, sets) - 1)

    def slot_count(self, shapes: Sequence[LayerShape], sets: Sequence[LayerSet]) -> int | None:
        """Slots to allocate for states; None where no layer keeps any."""
        sizes = _slot_bytes(shapes)
        if not sizes or self.slots is not None:
            return self.slots if sizes else None
        rooms, least = {}, 0.0 if self.blocks is not None else STATES
        blocks = self._useful(sets) if self.blocks is None else self.blocks + 1
        for device, size in sizes.items():
            free = self._free(device)
            rooms[device] = max(int(least * free), free - blocks * block_bytes(shapes, sets, device)) // size
        if min(rooms.values()) < SLOTS:
            raise self._no_memory("states", SLOTS * max(sizes.values()), rooms)
        return min(*rooms.values(), int(self.rows * SLOTS * self._spare) + 1)

    def block_count(self, shapes: Sequence[LayerShape], sets: Sequence[LayerSet]) -> int:
        """Blocks to allocate, block 0 included, that fit beside `slots` on each device; raises as `fitted`."""
        if self.blocks is not None:
            return self.blocks + 1
        useful, states, rooms = self._useful(sets), _slot_bytes(shapes), {}
        for device in dict.fromkeys(shape.device for shape in shapes):
            free = self._free(device) - (self.slots or 0) * states[device]
            size = block_bytes(shapes, sets, device)
            rooms[device] = free // size if size else useful
        least = min(rooms, key=lambda one: rooms[one])
        if rooms[least] <= len(sets):
            raise self._no_memory("keys and values", block_bytes(shapes, sets, least) * (len(sets) + 1), rooms)
        return min(rooms[least], useful)

    def _free(self, device: torch.device) -> int:
        free = int(self.memory * free_bytes(device))
        return free if self.most is None else min(free, self.most)

    @property
    def _spare(self) -> float:
        return SPARE if self.share else 1

    def _useful(self, sets: Sequence[LayerSet]) -> int:
        """Blocks that can be of use, and block 0."""
        return max(int(self.rows * self.columns * len(sets) * self._spare), len(sets)) + 1

    def _no_memory(self, what: str, need: int, rooms: dict[torch.device, int]) -> torch.OutOfMemoryError:
        where = "the device" if len(rooms) == 1 else min(rooms, key=lambda one: rooms[one])
        free = f"and {self.memory:.0%} of what is free on {where} is less"
        if self.most is not None:
            free = f"{self.most / 2**20:.0f} are left of memory= beside the weights, {free}"
        return torch.OutOfMemoryError(f"no memory for {what}: {need / 2**20:.0f} MiB are the least, {free}")


def _slot_bytes(shapes: Sequence[LayerShape]) -> Counter[torch.device]:
    """Of the states of all layers, by device."""
    sizes: Counter[torch.device] = Counter()
    for shape in shapes:
        if isinstance(shape, StateShape) and shape.keeps:
            sizes[shape.device] += shape.slot_bytes
    return sizes


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated there: those of the device that are free, and those that torch holds unused."""
    if device.type != "cuda":
        return CPU_BYTES
    return free_memory(device) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


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
    placed = streamed_model(forward.module)
    limits = Limits(
        rows=rows,
        tokens=Limits.tokens if config.max_batch_tokens is None else config.max_batch_tokens,
        context=context,
        memory=Limits.memory if config.max_memory_percent is None else config.max_memory_percent,
        blocks=None if blocks is None else blocks * len(sets_of(forward)),
        share=config.allow_block_sharing,
        logprobs=config.return_logprobs,
    )
    if placed is None:
        return limits
    shapes, sets = forward.shapes(), sets_of(forward)
    device, blocks = forward.embeddings().device, limits.columns * len(sets) + 1
    wanted = block_bytes(shapes, sets, device) * blocks + SLOTS * _slot_bytes(shapes)[device]
    return replace(limits, most=placed.sizes.beside(placed.room(), wanted))


def within_budget(
    forward: DecoderForward,
    generation_config: Any = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    **others: Any,
) -> dict[str, ContinuousBatchingConfig]:
    """What stock's own batching is given otherwise where the model has a budget: a share of the free memory that leaves
    room for the weights, and no graphs, which would read those that stream where they no longer are.
    """
    placed = streamed_model(forward.module)
    if placed is None:
        return {}
    given = continuous_batching_config or getattr(generation_config, "continuous_batching_config", None)
    config = copy.copy(given) if isinstance(given, ContinuousBatchingConfig) else ContinuousBatchingConfig()
    share = placed.sizes.beside(placed.room()) / max(1, free_bytes(forward.embeddings().device))
    config.max_memory_percent = min(config.max_memory_percent or Limits.memory, share)
    config.use_cuda_graph = False
    return {"continuous_batching_config": config}


def sets_of(forward: DecoderForward) -> tuple[LayerSet, ...]:
    """The sets of layers that share blocks."""
    shapes = forward.shapes()
    windows = {layer.spec.place: layer.spec.window for layer in forward.layers}
    some = windows[forward.places[0]]  # for places where nothing is kept
    return layer_sets(shapes, [windows.get(place, some) for place in range(len(shapes))])


def limits_prompts(forward: DecoderForward) -> bool:
    """Whether a layer computes something else of a token in a prompt than of one in an answer."""
    return any(layer.spec.attention is not None and layer.spec.attention.limits_prompts for layer in forward.layers)
