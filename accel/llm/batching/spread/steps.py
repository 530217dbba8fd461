"""One step of a group of requests over stretches of layers, each on its device with its part of all pages.

Hidden states alone go from device to device, and what layers read besides, such as the cosines of positions. The
numbers of a step are copied to every device from the host. Tokens are drawn where the head is, and the ids that a group
drew last are brought from there to where its next step begins.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from accel_kernels import KV
from accel_kernels.attention.paged.ragged import Pointers, Ragged

from accel.llm.batching.sampler import Sampler
from accel.llm.batching.scheduler import LATEST, StepPlan
from accel.llm.batching.spread.lanes import LaneStreams, Shared
from accel.llm.batching.step import MIXED, Flight, Numbers, StepRunner, StepSize, bucket_of
from accel.llm.generation.decoder import DecoderForward
from accel.llm.kv_cache.pages import PagePool
from accel.llm.pipeline.forward import SpreadForward
from accel.llm.pipeline.stretch import Stretch, StretchGraphs

# Tokens of steps with prompts that a graph is made for. While one launches a large step, other devices wait for theirs:
# a stretch keeps its device busy for a part of the time only in which a whole model would.
LARGER = (*MIXED, 1280, 1536, 1792, 2048)


class PagesInTurns:
    """The pages of all groups, of which each step has its turn on every device.

    What changes in the tables is written as the turn begins. Before, the step's stream on that device has other things
    to do that must not wait for the steps before.
    """

    def __init__(self, pages: PagePool, lanes: LaneStreams):
        self.pages, self.lanes = pages, lanes
        self.changes: dict[torch.device, list[tuple[np.ndarray, np.ndarray]]] = {device: [] for device in pages.places}

    def change(self, places: np.ndarray, values: np.ndarray) -> None:
        """To be written on every device, as `PagePool.upload` takes it."""
        for changes in self.changes.values() if len(places) else ():
            changes.append((places, values))

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        with self.lanes.turn(device, Shared.PAGES):
            changes = self.changes[device]
            while changes:
                self.pages.upload(*changes[0], device)
                del changes[0]
            yield

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        for device in self.pages.places if pairs else ():
            with self.turn(device):
                self.pages.copy(pairs, device)


class PagesOfOneStep:
    """The `Stores` of a step: pages on each device, and which sequences it is about, there too."""

    def __init__(self, shared: PagesInTurns, size: StepSize, sequences: Mapping[torch.device, list]):
        self.shared, self.size, self.sequences = shared, size, sequences

    def metadata(self, stretch: Stretch) -> tuple[torch.Tensor, ...]:
        """That of KV, and the tensors of a `Ragged`."""
        return (self.shared.pages.places[stretch.device].metadata, *self.sequences[stretch.device])

    def kvs(self, stretch: Stretch, x: torch.Tensor, metadata: tuple[torch.Tensor, ...]) -> dict[int, KV]:
        ragged = Ragged(*Pointers(*metadata[1:]), self.size.decodes, self.size.prefills)
        layers = [layer.spec.attention.index for layer in stretch.layers]
        return self.shared.pages.of_step(layers, x.shape[1], metadata[0], ragged)

    def turn(self, stretch: Stretch) -> AbstractContextManager:
        return self.shared.turn(stretch.device)


class SpreadStepRunner(StepRunner):
    """Runs steps of a model whose layers are spread. lanes: of the groups that the plans are of."""

    forward: SpreadForward
    runner: StretchGraphs | None  # type: ignore[assignment]

    def __init__(
        self, forward: SpreadForward, pages: PagePool, sampler: Sampler, rows: int, runner: Any, lanes: LaneStreams
    ):
        super().__init__(forward, pages, sampler, rows, runner)
        self.lanes, self.shared = lanes, PagesInTurns(pages, lanes)

    def upload(self, places: np.ndarray, values: np.ndarray) -> None:
        self.shared.change(places, values)

    def launch(
        self, plan: StepPlan, tokens_of: Callable[[int], list[int]], logprobs: bool, look: bool = True
    ) -> Flight:
        with self.lanes.taken(plan.lane):
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
        sequences = {device: numbers.narrow_on(device) for device in self.pages.places}
        stores = PagesOfOneStep(self.shared, size, sequences)
        eager = partial(self.forward.over_stores, stores)
        if not by_graph or self.runner is None:
            return eager(tokens, positions, keep)
        variant = ("batch", size.decodes, size.prefills)
        return self.runner(eager, (tokens, positions, keep), {}, variant, trusted=not look)

    def _draw(self, *args: Any) -> Flight:
        with self.lanes.turn(self.sampler.device, Shared.DRAWS):
            return super()._draw(*args)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        self.shared.copy(pairs)


def step_runner(
    forward: DecoderForward, pages: PagePool, sampler: Sampler, rows: int, runner: Any, lanes: LaneStreams
) -> StepRunner:
    """Of the kind that the model needs. runner: of CUDA graphs, or None."""
    if isinstance(forward, SpreadForward):
        return SpreadStepRunner(forward, pages, sampler, rows, runner, lanes)
    return StepRunner(forward, pages, sampler, rows, runner)


def lane_count(forward: DecoderForward) -> int:
    """Into how many groups requests are divided: one for each stretch."""
    return len(forward.stretches) if isinstance(forward, SpreadForward) else 1


def head_device(forward: DecoderForward) -> torch.device:
    """Where logits come out."""
    head = forward.module.get_output_embeddings()
    return next(chain(head.parameters(), head.buffers()), forward.embeddings()).device
