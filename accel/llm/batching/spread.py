"""One step of a group of requests over stretches of layers, each on its device with its part of all blocks.

Hidden states alone go from device to device, and what layers read besides, such as the cosines of positions. The
numbers of a step are copied to every device from the host. Tokens are drawn where the head is, and the ids that a group
drew last are brought from there to where its next step begins.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum, auto
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from accel_kernels import KV
from accel_kernels.attention.paged.ragged import Pointers, Ragged

from accel.llm.batching.sampler import Sampler
from accel.llm.batching.scheduler import LATEST, StepPlan
from accel.llm.batching.step import MIXED, Flight, Numbers, StepRunner, StepSize, bucket_of
from accel.llm.generation.decoder import DecoderForward
from accel.llm.kv_cache.paged_kv_cache import PagedKVCache
from accel.llm.pipeline.forward import SpreadForward
from accel.llm.pipeline.stretch import Stretch, StretchGraphs


class Shared(Enum):
    """What the steps of all groups use on a device, each in its turn."""

    KV_CACHE = auto()  # keys and values, their tables, and the memory of graphs
    DRAWS = auto()  # settings of requests, and the ids that were drawn last


class MicroBatchStreams:
    """`count` groups of requests. Steps are launched by one thread, one after another, each with all that it does.

    On CUDA every group has a stream on each device, so a step waits for nothing but itself: a device begins that of the
    next group while another device goes on with this one. What steps share they use in turns, in the order in which
    they were launched; so a block that changes hands is as it would be in one stream. One group has the streams of its
    caller.
    """

    def __init__(self, devices: Iterable[torch.device], count: int):
        self.count = count
        found = dict.fromkeys(device for device in devices if device.type == "cuda")
        self.devices = list(found) if count > 1 else []
        self.streams = [[_stream(device, micro_batch) for device in self.devices] for micro_batch in range(count)]
        whose = [(device, what) for device in self.devices for what in Shared]
        self.done = {one: torch.cuda.Event() for one in whose}  # the last turn

    @contextmanager
    def taken(self, micro_batch: int) -> Iterator[None]:
        """Inside, what is launched belongs to a step of this group, behind all that the caller's streams have to do."""
        with ExitStack() as stack:
            for stream in self.streams[micro_batch]:
                stream.wait_stream(torch.cuda.current_stream(stream.device))
            here = torch.cuda.device(torch.cuda.current_device()) if self.devices else None
            for stream in self.streams[micro_batch]:
                stack.enter_context(torch.cuda.stream(stream))
            if here is not None:
                stack.enter_context(here)
            yield

    @contextmanager
    def turn(self, device: torch.device, what: Shared) -> Iterator[None]:
        """Inside, what is launched on the device waits for the turns before, and those that follow wait for it."""
        done = self.done.get((device, what))
        if done is None:
            yield
            return
        stream = torch.cuda.current_stream(device)
        stream.wait_event(done)
        try:
            yield
        finally:
            done.record(stream)

    def join(self) -> None:
        """The caller's streams wait for all groups: what these read may be freed, or written by others, after that."""
        for streams in self.streams:
            for stream in streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)


@functools.cache
def _stream(device: torch.device, micro_batch: int) -> torch.cuda.Stream:
    """That of a group, the same from engine to engine: torch keeps freed memory for the stream it was used on."""
    return torch.cuda.Stream(device)


# Tokens of steps with prompts that a graph is made for. While one launches a large step, other devices wait for theirs:
# a stretch keeps its device busy for a part of the time only in which a whole model would.
LARGER = (*MIXED, 1280, 1536, 1792, 2048)


class KVCacheInTurns:
    """The blocks of all groups, of which each step has its turn on every device.

    What changes in the tables is written as the turn begins. Before, the step's stream on that device has other things
    to do that must not wait for the steps before.
    """

    def __init__(self, kv_cache: PagedKVCache, micro_batches: MicroBatchStreams):
        self.kv_cache, self.micro_batches = kv_cache, micro_batches
        self.changes: dict[torch.device, list[tuple[np.ndarray, np.ndarray]]] = {
            device: [] for device in kv_cache.tables
        }

    def change(self, places: np.ndarray, values: np.ndarray) -> None:
        """To be written on every device, as `PagedKVCache.upload` takes it."""
        for changes in self.changes.values() if len(places) else ():
            changes.append((places, values))

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        with self.micro_batches.turn(device, Shared.KV_CACHE):
            changes = self.changes[device]
            while changes:
                self.kv_cache.upload(*changes[0], device)
                del changes[0]
            yield

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        for device in self.kv_cache.tables if pairs else ():
            with self.turn(device):
                self.kv_cache.copy(pairs, device)


class KVCacheOfOneStep:
    """The `Stores` of a step: blocks on each device, and which sequences it is about, there too."""

    def __init__(self, shared: KVCacheInTurns, size: StepSize, sequences: Mapping[torch.device, list]):
        self.shared, self.size, self.sequences = shared, size, sequences

    def metadata(self, stretch: Stretch) -> tuple[torch.Tensor, ...]:
        """That of KV, and the tensors of a `Ragged`."""
        return (self.shared.kv_cache.tables[stretch.device].metadata, *self.sequences[stretch.device])

    def kvs(self, stretch: Stretch, x: torch.Tensor, metadata: tuple[torch.Tensor, ...]) -> dict[int, KV]:
        ragged = Ragged(*Pointers(*metadata[1:]), self.size.decodes, self.size.prefills)
        layers = [layer.spec.attention.index for layer in stretch.layers]
        given = {"metadata": metadata[0], "by_address": True, "ragged": ragged}
        return self.shared.kv_cache.of_step(layers, x.shape[1], **given)

    def turn(self, stretch: Stretch) -> AbstractContextManager:
        return self.shared.turn(stretch.device)


class SpreadStepRunner(StepRunner):
    """Runs steps of a model whose layers are spread. micro_batches: of the groups that the plans are of."""

    forward: SpreadForward
    runner: StretchGraphs | None  # type: ignore[assignment]

    def __init__(
        self,
        forward: SpreadForward,
        kv_cache: PagedKVCache,
        sampler: Sampler,
        rows: int,
        runner: Any,
        micro_batches: MicroBatchStreams,
    ):
        super().__init__(forward, kv_cache, sampler, rows, runner)
        self.micro_batches, self.shared = micro_batches, KVCacheInTurns(kv_cache, micro_batches)

    def upload(self, places: np.ndarray, values: np.ndarray) -> None:
        self.shared.change(places, values)

    def launch(
        self, plan: StepPlan, tokens_of: Callable[[int], list[int]], logprobs: bool, look: bool = True
    ) -> Flight:
        with self.micro_batches.taken(plan.micro_batch):
            return super().launch(plan, tokens_of, logprobs, look)

    def _filled(self, plan: StepPlan) -> StepSize | None:
        """With no more draws than there are, about: the head is in no graph."""
        size = StepSize.filled(plan, self.nobody, LARGER)
        return size if size is None or not size.prefills else size._replace(draws=bucket_of(len(plan.drawn)))

    def _logits(self, numbers: Numbers, size: StepSize, by_graph: bool, look: bool) -> torch.Tensor:
        wide, where_drawn = numbers.wide_on(self.device), numbers.wide_on(self.sampler.device)
        latest = self.last.index_select(0, where_drawn["taken_from"]).to(self.device, non_blocking=True)
        tokens = torch.where(wide["tokens"] == LATEST, latest, wide["tokens"]).unsqueeze(0)
        positions = wide["positions"].unsqueeze(0) if "position_ids" in self.forward.names else None
        last = self.forward.stretches[-1].device  # where the model's code picks the tokens to keep
        keep = numbers.wide_on(last)["keep"] if size.prefills else 0
        sequences = {device: numbers.narrow_on(device) for device in self.kv_cache.tables}
        stores = KVCacheOfOneStep(self.shared, size, sequences)
        eager = partial(self.forward.over_stores, stores)
        if not by_graph or self.runner is None:
            return eager(tokens, positions, keep)
        variant = ("batch", size.decodes, size.prefills)
        return self.runner(eager, (tokens, positions, keep), {}, variant, trusted=not look)

    def _draw(self, *args: Any) -> Flight:
        with self.micro_batches.turn(self.sampler.device, Shared.DRAWS):
            return super()._draw(*args)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        self.shared.copy(pairs)


def step_runner(
    forward: DecoderForward,
    kv_cache: PagedKVCache,
    sampler: Sampler,
    rows: int,
    runner: Any,
    micro_batches: MicroBatchStreams,
) -> StepRunner:
    """Of the kind that the model needs. runner: of CUDA graphs, or None."""
    if isinstance(forward, SpreadForward):
        return SpreadStepRunner(forward, kv_cache, sampler, rows, runner, micro_batches)
    return StepRunner(forward, kv_cache, sampler, rows, runner)


def micro_batch_count(forward: DecoderForward) -> int:
    """Into how many groups requests are divided: one for each stretch."""
    return len(forward.stretches) if isinstance(forward, SpreadForward) else 1


def head_device(forward: DecoderForward) -> torch.device:
    """Where logits come out."""
    head = forward.module.get_output_embeddings()
    return next(chain(head.parameters(), head.buffers()), forward.embeddings()).device
