"""One step of a micro-batch over stretches of layers, each on its device with its part of all blocks.

Hidden states alone go from device to device, and what layers read besides, such as the cosines of positions. The
numbers of a step are copied to every device from the host. Tokens are drawn where the head is, and the ids drawn last
are brought from there to where the next step of the micro-batch begins.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum, auto
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from accel_kernels import KV

from accel.llm.batching.sampler import Sampler
from accel.llm.batching.scheduler import StepPlan
from accel.llm.batching.step import MIXED_SIZES, LaunchedStep, StepInputs, StepRunner, StepSize, bucket_of
from accel.llm.generation.decoder import DecoderForward
from accel.llm.kv_cache.paged_kv_cache import PagedKVCache
from accel.llm.pipeline.forward import SpreadForward
from accel.llm.pipeline.stretch import Stretch, StretchGraphs


class Shared(Enum):
    """What the steps of all micro-batches use on a device, each in its turn."""

    KV_CACHE = auto()  # keys and values, their tables, and the memory of graphs
    DRAWS = auto()  # settings of requests, and the ids that were drawn last


class MicroBatchStreams:
    """CUDA streams of `count` micro-batches. One thread launches steps, one after another, each with all that it does.

    Every micro-batch has a stream on each device. So a device begins the step of the next one while another device goes
    on with this one. What steps share they use in turns, in the order in which they were launched. So a block that
    changes hands is as it would be in one stream. A single micro-batch has the streams of its caller.
    """

    def __init__(self, devices: Iterable[torch.device], count: int):
        self.count = count
        found = dict.fromkeys(device for device in devices if device.type == "cuda")
        self.devices = list(found) if count > 1 else []
        self.streams = [[_stream(device, micro_batch) for device in self.devices] for micro_batch in range(count)]
        whose = [(device, what) for device in self.devices for what in Shared]
        self.done = {one: torch.cuda.Event() for one in whose}  # the last turn

    @contextmanager
    def use(self, micro_batch: int) -> Iterator[None]:
        """Inside, launches belong to a step of this micro-batch, behind all that the caller's streams have to do."""
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
        """The caller's streams wait for all others: what these read may be freed, or written by others, after that."""
        for streams in self.streams:
            for stream in streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)


@functools.cache
def _stream(device: torch.device, micro_batch: int) -> torch.cuda.Stream:
    """That of a micro-batch, the same from engine to engine: torch keeps freed memory for the stream it was used on."""
    return torch.cuda.Stream(device)


# Tokens of steps with prompts that a graph is made for. While one launches a large step, other devices wait for theirs:
# a stretch keeps its device busy for a part of the time only in which a whole model would.
SPREAD_SIZES = (*MIXED_SIZES, 1280, 1536, 1792, 2048)


class StoresOfStep:
    """The `Stores` of a step: blocks on each device, and which sequences it is about, there too."""

    def __init__(self, runner: "SpreadStepRunner", size: StepSize, inputs: StepInputs):
        self.runner, self.size = runner, size
        self.sequences = {device: tuple(inputs.int32_on(device)) for device in runner.kv_cache.tables}

    def metadata(self, stretch: Stretch) -> tuple[torch.Tensor, ...]:
        """That of KV, and the tensors of the sequences."""
        return (self.runner.kv_cache.tables[stretch.device].metadata, *self.sequences[stretch.device])

    def kvs(self, stretch: Stretch, x: torch.Tensor, metadata: tuple[torch.Tensor, ...]) -> dict[int, KV]:
        ragged = self.size.ragged(metadata[1:])
        layers = [place for layer in stretch.layers for place in layer.spec.places]
        return self.runner.kv_cache.of_step(layers, x.shape[1], metadata=metadata[0], by_address=True, ragged=ragged)

    def turn(self, stretch: Stretch) -> AbstractContextManager:
        return self.runner.turn(stretch.device)


class SpreadStepRunner(StepRunner):
    """Runs steps of a model whose layers are spread. micro_batches: those that the plans are of.

    changes: by device, what is to be written into its table of blocks. It is written as a step's turn on the device
    begins: before, the step's stream there has other things to do that must not wait for the steps before.
    """

    forward: SpreadForward
    runner: StretchGraphs | None  # type: ignore[assignment]

    def __init__(self, *args: Any, micro_batches: MicroBatchStreams):
        super().__init__(*args)
        self.micro_batches = micro_batches
        self.keep_device = self.forward.stretches[-1].device
        self.changes: dict[torch.device, list[tuple[np.ndarray, np.ndarray]]]
        self.changes = {device: [] for device in self.kv_cache.tables}

    def upload(self, places: np.ndarray, values: np.ndarray) -> None:
        if len(places):
            for changes in self.changes.values():
                changes.append((places, values))

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Inside, the step that is being launched uses the blocks on this device."""
        with self.micro_batches.turn(device, Shared.KV_CACHE):
            changes = self.changes[device]
            while changes:
                self.kv_cache.upload(*changes[0], device)
                del changes[0]
            yield

    def launch(self, plan: StepPlan, *args: Any) -> LaunchedStep:
        with self.micro_batches.use(plan.micro_batch):
            return super().launch(plan, *args)

    def _filled(self, plan: StepPlan) -> StepSize | None:
        """With no more draws than there are, about: the head is in no graph."""
        size = StepSize.filled(plan, self.rows, SPREAD_SIZES)
        return size if size is None or not size.prefills else size._replace(draws=bucket_of(len(plan.draw_rows)))

    def _logits(self, inputs: StepInputs, size: StepSize, by_graph: bool, check: bool) -> torch.Tensor:
        arguments, stores = self._arguments(inputs, size), StoresOfStep(self, size, inputs)
        eager = partial(self.forward.over_stores, stores)
        if not by_graph or self.runner is None:
            return eager(*arguments)
        return self.runner(eager, arguments, {}, size.variant, trusted=not check)

    def _draw(self, *args: Any) -> LaunchedStep:
        with self.micro_batches.turn(self.sampler.device, Shared.DRAWS):
            return super()._draw(*args)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        for device in self.kv_cache.tables if pairs else ():
            with self.turn(device):
                self.kv_cache.copy(pairs, device)


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
        return SpreadStepRunner(forward, kv_cache, sampler, rows, runner, micro_batches=micro_batches)
    return StepRunner(forward, kv_cache, sampler, rows, runner)


def micro_batch_count(forward: DecoderForward) -> int:
    """How many micro-batches requests are divided into: one for each stretch."""
    return len(forward.stretches) if isinstance(forward, SpreadForward) else 1


def head_device(forward: DecoderForward) -> torch.device:
    """Where logits come out."""
    head = forward.module.get_output_embeddings()
    return next(chain(head.parameters(), head.buffers()), forward.embeddings()).device
