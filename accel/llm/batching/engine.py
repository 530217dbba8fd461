"""The engine of continuous batching: plans a step, launches it, and meanwhile reads the ids of the step before."""

import contextlib
from collections import deque

from accel.cuda_graphs.adapter_group import AdaptersNotByToken, adapted_layers, known_adapter
from accel.cuda_graphs.runner import GraphRunner
from accel.errors import Unfit, reason_of
from accel.llm.batching.limits import Limits, limits_prompts, sets_of
from accel.llm.batching.request import CUT, Request, failed, finish
from accel.llm.batching.rows import RunningRows
from accel.llm.batching.sampler import Sampler
from accel.llm.batching.scheduler import Scheduler, StepPlan, TokensUnknown
from accel.llm.batching.spread import MicroBatchStreams, head_device, micro_batch_count, step_runner
from accel.llm.batching.step import LaunchedStep, StepRunner, head_size
from accel.llm.generation.decoder import DecoderForward
from accel.llm.kv_cache.block_allocator import BlockAllocator
from accel.llm.kv_cache.paged_kv_cache import PagedKVCache
from accel.llm.kv_cache.shape import BLOCK
from accel.llm.pipeline.stretch import StretchGraphs
from accel.offload.call_hooks import one_call, streamed_model

# Steps between two checks whether the model has changed, while requests run: a check takes the host as long as a step.
# The first step after a pause, and after all requests have ended, is preceded by one too.
CHECK_EVERY = 16
CANCELLED = "the request was cancelled"


class Engine:
    """Runs requests of one model together, a step at a time. For one thread, without gradients.

    Holds memory for what layers keep until `close`. asked: the limits as given; limits: as there is room for. runner:
    of CUDA graphs, None for none; it may outlive the engine, as graphs hold for any pool. Raises torch.OutOfMemoryError
    where there is no memory, and Unfit where the model cannot run so.
    """

    def __init__(self, forward: DecoderForward, limits: Limits, runner: GraphRunner | StretchGraphs | None = None):
        shapes, sets = forward.shapes(), sets_of(forward)
        self.forward, self.asked, self.limits = forward, limits, limits.fitted(shapes, sets)
        limits, blocks = self.limits, (self.limits.blocks or 0) + 1
        self.allocator = BlockAllocator(sets, blocks, limits.rows, limits.columns, limits.share, limits.slots)
        self.kv_cache = PagedKVCache(shapes, sets, blocks, limits.rows, limits.columns, limits.slots or 0)
        self.rows = RunningRows(limits.rows)
        self.sampler = Sampler(limits.rows, head_size(forward), head_device(forward))
        self.micro_batches = MicroBatchStreams(
            (*self.kv_cache.tables, forward.embeddings().device, self.sampler.device), micro_batch_count(forward)
        )
        apart = limits_prompts(forward)
        self.scheduler = Scheduler(self.allocator, self.rows, limits, self.micro_batches.count, apart)
        self.steps = step_runner(forward, self.kv_cache, self.sampler, limits.rows, runner, self.micro_batches)
        self.launched: deque[LaunchedStep] = deque()  # the oldest first; one a micro-batch, and one more at times
        with one_call(forward.module, None):
            self.weights = self._weights()  # with which the stored keys and values were computed
        self._unchecked = CHECK_EVERY  # steps since the model was checked
        self._updates: dict[Request, None] = {}  # requests that a step tells of, in the order of the updates

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.busy or bool(self.launched)

    def sizes(self) -> dict[str, float]:
        """For the report: requests at a time, micro-batches, tokens a request may come to, blocks, and their MiB."""
        return {
            "requests": self.limits.rows,
            "groups": self.micro_batches.count,
            "tokens": self.limits.context,
            "pages": self.allocator.blocks,
            "memory_mb": round(self.kv_cache.bytes / 2**20, 1),
        }

    def add(self, request: Request) -> list[Request]:
        """Takes a request. Returns it, and its children, where no step is needed: it cannot run, or is complete."""
        if (name := request.adapter) is not None:
            if type(self.steps) is not StepRunner or self.forward.ranks is not None:
                return failed(request.family, f"adapter={name!r}: the model is divided among devices")
            try:
                if name not in self.steps.adapters.numbers:
                    adapted_layers(self.forward.module)
            except ValueError as error:
                return failed(request.family, str(error))
            for one in request.family:
                one.number = self.steps.adapters.number(name)
        if request.given and (reason := self._place(request)) is not None:
            return failed(request.family, reason)
        if not self.busy or self.steps.adapters.seen is None:  # it may have been changed since the last step
            self._unchecked = CHECK_EVERY
        tokens, context = len(request.prompt), self.limits.context
        if tokens > context:
            return failed(request.family, f"a prompt of {tokens} tokens, where a request may come to {context}")
        most = (self.allocator.blocks - 1) // len(self.allocator.sets) * BLOCK
        if tokens > most:
            reason = f"a prompt of {tokens} tokens, where all memory for keys and values has room for {most}"
            return failed(request.family, reason)
        ended = bool(request.tokens) and request.tokens[-1] in request.eos
        if ended or len(request.tokens) >= self.scheduler.most(request):
            return [self._finish(one, full=not ended) for one in request.family]
        self.scheduler.waiting.append(request)
        return []

    def _place(self, request: Request) -> str | None:
        """Counts the positions of a prompt with pictures. Returns why it cannot be read."""
        forward = self.forward
        if type(self.steps) is not StepRunner or forward.ranks is not None:
            return "a prompt with pictures, and the model is divided among devices"
        unknown = next((name for name in request.given if name not in forward.names), None)
        if unknown is not None:
            return f"{unknown} is given, which is no argument of the model"
        if "position_ids" in forward.names:
            try:
                given = request.prompt, request.given
                positions, shift = forward.convention.count_positions(forward.module, *given)
            except Exception as error:  # of the model's own code, about what it was given
                return reason_of(error)
            for one in request.family:
                one.positions, one.shift = positions, shift
        return None

    def cancel(self, request_id: str, reason: str = CANCELLED) -> list[Request]:
        """Ends a request in any state, and its children that do not run yet. Returns them; unknown ids are ignored."""
        running, waiting = self.rows.requests, self.scheduler.waiting
        for row, request in running.items():
            if request.id == request_id:
                return failed(self._leave(row, keep=True).family, reason)
        for requests in (waiting, *(one.children for one in (*running.values(), *waiting))):
            for request in requests:
                if request.id == request_id:
                    requests.remove(request)
                    return failed(request.family, reason)
        return []

    def step(self) -> list[Request]:
        """Runs one step, or reads one under way. Returns requests that ended or failed, and those that stream a token.

        Raises what the GPU cannot recover from.
        """
        check = self._unchecked >= CHECK_EVERY
        if check:
            if self.forward.ranks is None and self.changed():
                self.allocator.forget()
                self._fail_without_adapter()
            self._unchecked = 0
        plan = self._plan()
        if plan is not None:
            self._launch(plan, check)
            self._unchecked += 1
        # Where nothing could be planned, the tokens of the oldest step may change that.
        self._read_until(self.micro_batches.count if plan is not None else len(self.launched) - 1)
        return self._take_updates()

    def _take_updates(self) -> list[Request]:
        updates, self._updates = list(self._updates), {}
        return updates

    def _plan(self) -> StepPlan | None:
        try:
            plan = self.scheduler.plan(unread=bool(self.launched))
        except TokensUnknown:
            self._read_until(0)
            plan = self.scheduler.plan(unread=False)
        self._note(*self.scheduler.failed)
        self.scheduler.failed.clear()
        if plan is not None and self.sampler.waits(plan.draw_rows):
            while any(step.plan.micro_batch == plan.micro_batch for step in self.launched):
                self._read(self.launched.popleft())
        return plan

    def _fail_without_adapter(self) -> None:
        """Requests end whose adapter is gone."""
        asked = [*self.rows.requests.values(), *self.scheduler.waiting]
        for name in {one.adapter for one in asked if one.adapter is not None}:
            try:
                adapted_layers(self.forward.module)
                known_adapter(self.forward.module, name)
            except ValueError as error:
                for one in asked:
                    self._note(*self.cancel(one.id, str(error)) if one.adapter == name else ())

    def resumed(self) -> None:
        """A pause is over, in which the model may have been changed."""
        self.allocator.forget()
        self._unchecked = CHECK_EVERY

    def changed(self) -> bool:
        """Whether the weights have changed since the last check: new requests must not find what was stored."""
        with one_call(self.forward.module, None):
            with contextlib.suppress(Unfit):  # which the step will raise
                self.forward.ready()
            before, self.weights = self.weights, self._weights()
        return before is not None and before != self.weights

    def survey(self) -> tuple[str, bool]:
        """Before a step that ranks run together: why this one cannot, or "", and whether its weights have changed."""
        if self.busy and self._unchecked < CHECK_EVERY:
            return self.forward.mode() or "", False
        return unfit_reason(self.forward) or "", self.changed()

    def _weights(self) -> tuple | None:
        """Identifies the weights: their addresses, and how often they were edited as far as autograd counts."""
        seen, adapters = self.forward.seen, self.steps.adapters
        if seen is None:
            return None
        with adapters.used():
            if not adapters.holds():
                adapters.read()
            return seen, seen.versions(), adapters.written, adapters.versions()

    def _launch(self, plan: StepPlan, check: bool) -> None:
        try:
            reason = self.forward.mode()
            if reason is not None:
                raise Unfit(reason)
            for row in plan.opened:
                tokens, drawn = self.rows.tokens(row), int(self.rows.drawn[row])
                self.sampler.set(row, self.rows.requests[row].sampling, tokens, drawn)
            self.steps.upload(*self.allocator.changes())
            self.launched.append(self.steps.launch(plan, self.rows.tokens, self.limits.logprobs, check))
        except Exception as error:  # of this step: those in it end, the others go on
            if self.forward.ranks is not None:  # another rank may not have failed, and waits there for this one
                raise
            self._fail_step(plan, reason_of(error, memory=True), isinstance(error, AdaptersNotByToken))

    def _fail_step(self, plan: StepPlan, reason: str, named: bool) -> None:
        """The prompts of a step that raised fail; all its requests, where it had no prompts. named: those alone that
        name an adapter; other prompts are read again.
        """
        self._read_until(0)
        rows, begun = plan.rows.tolist(), [*plan.rows[plan.decodes :].tolist(), *plan.opened]
        begun = list(dict.fromkeys([*begun, *(row for row in rows if named and self.rows.adapter[row])] or rows))
        for row in reversed(begun):
            if row in self.rows.requests:
                if named and not self.rows.adapter[row]:
                    self.scheduler.preempt(row, keep=False)
                else:
                    self._fail(row, reason)
        self.scheduler.undo(plan)

    def _read_until(self, count: int) -> None:
        """Reads steps, the oldest first, until only so many are under way."""
        while len(self.launched) > max(0, count):
            self._read(self.launched.popleft())

    def _read(self, step: LaunchedStep) -> None:
        """Takes in the ids of a step, but for rows that another request has taken since."""
        ids, logprobs = step.read()
        plan = step.plan
        current = self.rows.serial[plan.draw_rows] == plan.serials
        rows = plan.draw_rows[current]
        if not len(rows):
            return
        chances = None if logprobs is None else logprobs[current]
        streamed, ended, wrong = self.rows.add(rows, ids[current], chances)
        self._note(*streamed)
        for row, reason in wrong.items():
            self._fail(row, str(self.sampler.error(row)) if reason is None else reason)
        for row, full in ended.items():
            self._note(self._finish(self._leave(row, keep=True), full))

    def _finish(self, request: Request, full: bool) -> Request:
        """Ends a request. full: it is at its limit of tokens; it has failed where more were asked for."""
        tokens, asked = len(request.tokens), request.max_new_tokens
        if not full or asked is None or tokens >= asked:
            return finish(request)
        room = f"a prompt of {len(request.prompt)}, where a request may come to {self.limits.context}"
        return finish(request, f"{CUT} {tokens} of max_new_tokens={asked} tokens: {room}")

    def _leave(self, row: int, keep: bool) -> Request:
        self.sampler.clear(row)
        return self.scheduler.close(row, keep)

    def _note(self, *requests: Request) -> None:
        self._updates |= dict.fromkeys(requests)

    def _fail(self, row: int, reason: str) -> None:
        """The row's request fails, and its children that do not run yet."""
        self._note(*failed(self._leave(row, keep=False).family, reason))

    def fail(self, error: Exception) -> list[Request]:
        """All requests fail with this error; the engine is empty afterwards."""
        self.launched.clear()
        left = [self._leave(row, keep=False) for row in list(self.rows.requests)] + list(self.scheduler.waiting)
        self.scheduler.waiting.clear()
        self._note(*failed((one for request in left for one in request.family), str(error) or repr(error)))
        self.allocator.forget()
        return self._take_updates()

    def close(self) -> None:
        """Gives the memory back; the engine cannot be used any more."""
        self.launched.clear()
        self.micro_batches.join()
        if (placed := streamed_model(self.forward.module)) is not None:
            placed.due = True  # weights may have the room of keys and values
        del self.kv_cache, self.steps, self.sampler


def unfit_reason(forward: DecoderForward) -> str | None:
    """Why the model cannot run fused as it is now."""
    reason = forward.mode()
    if reason is not None:
        return reason
    try:
        with one_call(forward.module, None):
            forward.ready()
    except Unfit as error:
        return str(error)
    return None
