"""The next decode step of generate(), launched speculatively while the stopping criteria are evaluated.

After every token generate() reads whether all rows have ended. That waits for the GPU, and then the GPU waits for
Python. But the inputs of the next forward are known: its token is chosen, mask and positions advance by one. So its
graph is launched beside the stopping criteria, on a stream of its own. The next forward takes the result if it is given
exactly these inputs, and computes otherwise. A wrong speculation is harmless: it wrote only beyond the stored length.

This serves calls that `TokenLoop` cannot take over, as with processors of the user's own.
"""

import weakref
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteriaList

from accel.cuda_graphs.runner import PATIENCE, GraphRunner
from accel.libraries.code import comes_from
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.loop.handover import Handover
from accel.llm.generation.loop.methods import predictable
from accel.llm.kv_cache.store import PendingStep, Store
from accel.llm.pipeline.stretch import StretchGraphs

MOST_MISSED = 4  # unused steps in a row, after which a generate() call stops launching ahead
MOST_WAITED = PATIENCE + 4  # or steps without a graph, which comes once its products are chosen


def begin(model: nn.Module, runner: GraphRunner, store: Store, ids: torch.Tensor) -> PendingStep | None:
    """Launches the step for the last of ids, (rows, tokens), if there is a graph for it; `store.pending` holds it."""
    latest, rows = store.latest, store.rows
    if latest is None or not (store.whole and 0 < store.length < store.capacity):
        return None
    if not (ids.is_cuda and ids.shape[0] == rows and predictable(model)):
        return None
    if vars(model)["_forward_pre_hooks"] or torch.cuda.is_current_stream_capturing():
        return None
    with torch.cuda.device(ids.device):
        store.reserve(rows, store.length + 1)
        tokens = ids[:, -1:].clone(memory_format=torch.contiguous_format)
        positions = None if latest.positions is None else latest.positions + 1
        arguments = (tokens, positions, store.metadata, latest.keep)
        before, side = torch.cuda.current_stream(), runner.pool.side(ids.device)
        side.wait_stream(before)
        try:
            with torch.cuda.stream(side):
                step = runner.begin(arguments, {}, ("mask",) if store.padding_mask is not None else ())
                done = side.record_event()
        except torch.OutOfMemoryError:  # the forward that comes may find the room
            before.wait_stream(side)
            return None
        if step is None:
            return None
        for tensor in (tokens, *store.tensors(), *(() if positions is None else (positions,))):
            tensor.record_stream(side)
        for tensor in step.tensors():
            tensor.record_stream(before)
    store.pending = PendingStep(ids, store.length, latest.keep, step, done)
    return store.pending


class Lookahead(StoppingCriteriaList):
    """The stopping criteria of one generate() call, which launch the next step whenever they are asked.

    handover: to `TokenLoop`, where it may take over; then no step is launched here.
    """

    def __init__(
        self,
        criteria: StoppingCriteriaList,
        forward: DecoderForward,
        store: Store,
        handover: Handover | None = None,
    ) -> None:
        super().__init__(criteria)
        self.forward, self.store, self.handover = forward, weakref.ref(store), handover
        self.known = all(comes_from(type(one), "transformers") for one in criteria)
        self.pending: PendingStep | None = None
        self.missed = self.waited = 0

    def __reduce__(self) -> tuple:
        return StoppingCriteriaList, (list(self),)  # a copy is for another call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        if self.handover is None:
            return self._asked(input_ids, scores, **kwargs)
        ready = self.handover.ready(input_ids)
        if ready:  # a tensor of their own, for the loop will put more tokens into the other
            ended = super().__call__(input_ids.view_as(input_ids), scores, **kwargs)
        else:
            ended = self._asked(input_ids, scores, **kwargs)
        self.handover.note(input_ids, ended, ready)
        return ended

    def _asked(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        if not self.known:  # the user's own may change the inputs of the step
            ended = super().__call__(input_ids, scores, **kwargs)
            self._begin(input_ids)
            return ended
        self._begin(input_ids)
        return super().__call__(input_ids, scores, **kwargs)

    def _begin(self, input_ids: torch.Tensor) -> None:
        store, runner, longest = self.store(), self.forward.runner, self.max_length
        if self.pending is None:
            self.waited += 1
        else:
            self.missed, self.waited = 0 if self.pending.taken else self.missed + 1, 0
        self.pending = None
        more = longest is None or input_ids.shape[1] < longest
        if store is None or runner is None or not more or self.missed > MOST_MISSED or self.waited > MOST_WAITED:
            return
        if isinstance(runner, StretchGraphs):  # on streams of several devices, of which only one would be waited for
            return
        if self.forward.mode() is None:
            self.pending = begin(self.forward.module, runner, store, input_ids)
