"""What meets stock's token loop at its stopping criteria: it hands over to `StoreLoop`, or the next step is launched.

generate() looks its decoding method up in the class, so `_sample` cannot be replaced for one model. But between two
steps it calls methods of the model, and shows its tensor of tokens to the stopping criteria. So stock's `_sample` reads
the prompt and chooses the first token. `_has_unfinished_sequences` then runs `StoreLoop`, puts all tokens into that
tensor, and reports that no row is unfinished. Stock ends with `streamer.end()` and returns the tensor.
`returns_what_criteria_saw` checks that with the installed transformers.

Calls that `StoreLoop` cannot take over, as with processors of the user's own, are looked ahead of. After every token
generate() reads whether all rows have ended. That waits for the GPU, and then the GPU waits for Python. But the inputs
of the next forward are known: its token is chosen, mask and positions advance by one. So its graph is launched beside
the stopping criteria, on a stream of its own. The next forward takes the result if it is given exactly these inputs,
and computes otherwise. A wrong speculation is harmless: it wrote only beyond the stored length.
"""

import weakref
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from accel.cuda_graphs.runner import PATIENCE, GraphRunner
from accel.libraries.cache import NAMES
from accel.libraries.code import comes_from
from accel.libraries.generation import STEP, defers_stop_check, predictable, returns_what_criteria_saw
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.loop.choice import draws_as_torch, pure
from accel.llm.generation.loop.store_loop import StoreLoop, undisturbed
from accel.llm.generation.loop.token_loop import GenerateRequest
from accel.llm.kv_cache.pending_step import PendingStep
from accel.llm.kv_cache.store import Store
from accel.llm.pipeline.stretch import StretchGraphs
from accel.offload.call_hooks import streamed_model

DEVICES = ("cuda",)  # where the loop runs; nowhere, if this is empty
MOST_MISSED = 4  # unused steps in a row, after which a generate() call stops launching ahead
MOST_WAITED = PATIENCE + 4  # or steps without a graph, which comes once its products are chosen


def asks_for_tokens_alone(config: GenerationConfig, kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for tokens alone, and so each step follows from the one before. kwargs: of the model."""
    returned = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    others = (value for name, value in kwargs.items() if name not in STEP and name not in NAMES)
    said = any(value is not None and value is not False for value in others)
    return not (said or returned or config.output_attentions or config.output_hidden_states or config.is_assistant)


class Handover:
    """Of one generate() call: `note` follows the tokens that stock chooses, `run` generates the rest if it can."""

    def __init__(self, forward: DecoderForward, store: Store, request: GenerateRequest, criteria: StoppingCriteriaList):
        self.forward, self.known_store, self.request, self.criteria = forward, weakref.ref(store), request, criteria
        self.ids: torch.Tensor | None = None  # stock's own, (rows, so far), while the loop may take over
        self.unfinished: torch.Tensor | None = None
        self.prompt = 0

    def ready(self, ids: torch.Tensor) -> bool:
        """Whether the loop can continue these tokens, (rows, so far), of which all but the last are stored."""
        store = self.known_store()
        if store is None or store.latest is None or not store.consistent or not store.length:
            return False
        device = store.shapes[0].device
        if device.type not in DEVICES or ids.device != device or ids.shape[0] != store.rows:
            return False
        if device.type == "cuda" and (self.forward.runner is None or torch.cuda.is_current_stream_capturing()):
            return False
        if not (pure(self.request.processors) and undisturbed(self.forward) and returns_what_criteria_saw()):
            return False
        if defers_stop_check(device, self.request.kwargs):  # it would end the stream with the wrong token
            return False
        return not self.request.config.do_sample or draws_as_torch(device)

    def note(self, ids: torch.Tensor, ended: torch.Tensor, ready: bool) -> None:
        """ids: the tokens so far, in stock's own tensor; ended: (rows,) bool, what the criteria said of them."""
        if self.unfinished is None:
            self.prompt = ids.shape[1] - 1
            self.unfinished = torch.ones(ids.shape[0], dtype=torch.long, device=ids.device)
        self.unfinished = self.unfinished & ~ended
        self.ids = ids if ready else None

    def run(self) -> bool:
        """Generates all further tokens into the noted tensor. False if that is no longer possible."""
        ids, store, self.ids = self.ids, self.known_store(), None
        # A streamer may have changed something since.
        if ids is None or store is None or self.unfinished is None or not self.ready(ids):
            return False
        # A second tensor over the same memory: `set_` below changes the noted one.
        known = ids.view_as(ids)
        loop = StoreLoop(self.forward, store, self.request, self.criteria, known, self.unfinished, self.prompt)
        ids.set_(loop.run())  # type: ignore[call-overload]
        return True


def begin(forward: DecoderForward, runner: GraphRunner, store: Store, ids: torch.Tensor) -> PendingStep | None:
    """Launches the step for the last of ids, (rows, tokens), if there is a graph for it; `store.pending` holds it."""
    latest, rows, model = store.latest, store.rows, forward.module
    if latest is None:
        return None
    if not (store.consistent and 0 < store.length < store.capacity):
        return None
    if not (ids.is_cuda and ids.shape[0] == rows and predictable(model, forward.convention.prepared)):
        return None
    if vars(model)["_forward_pre_hooks"] or torch.cuda.is_current_stream_capturing():
        return None
    if getattr(streamed_model(model), "hot", None) is not None:  # a call may exchange experts while the step reads them
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

    handover: to `StoreLoop`, where it may take over; then no step is launched here.
    """

    def __init__(
        self, criteria: StoppingCriteriaList, forward: DecoderForward, store: Store, handover: Handover | None = None
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
            self.pending = begin(self.forward, runner, store, input_ids)
