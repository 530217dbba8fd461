"""The engine of continuous batching: plans a step, launches it, and meanwhile reads the ids of the step before."""

import contextlib
from collections import deque

from accel.cuda_graphs.runner import GraphRunner
from accel.errors import reason_of
from accel.llm.batching.answers import Answers
from accel.llm.batching.limits import Limits, sets_of
from accel.llm.batching.request import CUT, Request, finish
from accel.llm.batching.sampler import Sampler
from accel.llm.batching.scheduler import IdsWanted, Scheduler, StepPlan
from accel.llm.batching.spread import MicroBatchStreams, head_device, micro_batch_count, step_runner
from accel.llm.batching.step import Flight, head_size
from accel.llm.generation.calling_convention import Unfit
from accel.llm.generation.decoder import DecoderForward
from accel.llm.kv_cache.block_allocator import BlockAllocator
from accel.llm.kv_cache.paged_kv_cache import PagedKVCache
from accel.llm.kv_cache.shape import BLOCK
from accel.llm.pipeline.stretch import StretchGraphs

# Steps between two checks whether the model has changed, while requests run: a check takes the host as long as a step.
# The first step after a pause, and after all requests have ended, is preceded by one too.
CHECK_EVERY = 16


class Engine:
    """Runs requests of one model together, a step at a time. For one thread, without gradients.

    Holds memory for keys and values until `close`. runner: of CUDA graphs, None for none; it may outlive the engine, as
    graphs hold for any pool. Raises torch.OutOfMemoryError where there is no memory, and Unfit where the model cannot
    run so.
    """

    def __init__(self, forward: DecoderForward, limits: Limits, runner: GraphRunner | StretchGraphs | None = None):
        self.forward, self.limits = forward, limits
        shapes, sets = forward.shapes(), sets_of(forward)
        blocks = limits.block_count(shapes, sets)
        rows, columns = limits.rows, limits.columns
        self.allocator = BlockAllocator(sets, blocks, rows, columns, limits.share)
        self.kv_cache = PagedKVCache(shapes, sets, blocks, rows, columns)
        self.answers = Answers(rows)
        self.sampler = Sampler(rows, head_size(forward), head_device(forward))
        self.sampler.prepare(forward.embeddings().dtype)
        self.micro_batches = MicroBatchStreams(
            (*self.kv_cache.tables, forward.embeddings().device, self.sampler.device), micro_batch_count(forward)
        )
        self.scheduler = Scheduler(self.allocator, self.answers, limits, self.micro_batches.count)
        self.steps = step_runner(forward, self.kv_cache, self.sampler, rows, runner, self.micro_batches)
        self.flights: deque[Flight] = deque()  # one a micro-batch, and one more while a step is launched
        self.ids: set[str] = set()
        self.weights = self._weights()  # with which the stored keys and values were computed
        self._unchecked = CHECK_EVERY  # steps since the model was checked
        self._news: dict[Request, None] = {}  # requests with news, in the order of the news
        # Children that do not exist yet. In order of cancellation: ranks that run the same requests must decide alike.
        self._cancelled: dict[str, None] = {}

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do, or to tell."""
        return self.scheduler.busy or bool(self.flights) or bool(self._news)

    def sizes(self) -> dict[str, float]:
        """For the report: requests at a time, micro-batches, tokens a request may come to, blocks, and their MiB."""
        rows, context = self.limits.rows, self.limits.context
        memory = round(self.kv_cache.bytes / 2**20, 1)
        numbers = {
            "requests": rows,
            "groups": self.micro_batches.count,
            "tokens": context,
            "pages": self.allocator.blocks,
        }
        return numbers | {"memory_mb": memory}

    def add(self, request: Request) -> None:
        """Takes a request. One that cannot run comes out of the next `step`, failed."""
        if not self.busy:  # it may have been changed since the last step
            self._unchecked = CHECK_EVERY
        reason = self._refusal(request)
        if reason is not None:
            self._fail(request, reason)
        elif self._complete(request):
            ended = bool(request.tokens) and request.tokens[-1] in request.eos
            for one in (request, *request.further()):
                self._note(finish(one) if ended else self._full(one))
        else:
            self.ids.add(request.id)
            self.ids.update(map(request.child_id, range(request.children)))
            self.scheduler.waiting.append(request)

    def _complete(self, request: Request) -> bool:
        """Whether no token is wanted behind those that it begins with."""
        begun, most, room = request.tokens, request.max_new_tokens, self.scheduler.room(request)
        ended = bool(begun) and begun[-1] in request.eos
        return ended or len(begun) >= (room if most is None else min(most, room))

    def _refusal(self, request: Request) -> str | None:
        tokens, context = len(request.prompt), self.limits.context
        if request.id in self.ids:
            return f"a request with the id {request.id!r} is there already"
        if not tokens:
            return "an empty prompt: give one token or more"
        if request.max_new_tokens is not None and request.max_new_tokens < 0:
            return f"max_new_tokens={request.max_new_tokens!r}: give a number from 0 on, or None"
        if tokens > context:
            return f"a prompt of {tokens} tokens, where a request may come to {context}"
        vocabulary = self.forward.embeddings().shape[0]
        wrong = max(request.prompt) if min(request.prompt) >= 0 else min(request.prompt)
        if not 0 <= wrong < vocabulary:
            return f"token {wrong!r} in the prompt: the vocabulary has ids from 0 to {vocabulary - 1}"
        columns, most = -(-tokens // BLOCK), (self.allocator.blocks - 1) // len(self.allocator.sets)
        if columns > most:
            return f"a prompt of {tokens} tokens, where all memory for keys and values has room for {most * BLOCK}"
        return None

    def cancel(self, request_id: str) -> None:
        """Drops a request in any state, which `step` then does not return. Unknown ids are ignored.

        Its children that do not exist yet fail with it.
        """
        if request_id not in self.ids:
            return
        self.ids.discard(request_id)
        for request in [request for request in self._news if request.id == request_id and not request.error]:
            del self._news[request]
        if not self._drop(request_id):
            self._cancelled[request_id] = None

    def _drop(self, request_id: str) -> bool:
        """Ends the request, if it is there."""
        running = ((row, self.answers.requests[row]) for row in self.scheduler.running)
        row, request = next(
            ((row, one) for row, one in running if one is not None and one.id == request_id), (-1, None)
        )
        if request is None:
            request = next((one for one in self.scheduler.waiting if one.id == request_id), None)
            if request is None:
                return False
            self.scheduler.waiting.remove(request)
        else:
            self._leave(row, keep=True)
        self._fail(request, "the request was cancelled")
        del self._news[request]
        return True

    def step(self) -> list[Request]:
        """Runs one step, or reads one under way. Returns requests that ended or failed, and those that stream a token.

        Raises what the GPU cannot recover from.
        """
        look = self._unchecked >= CHECK_EVERY
        if look:
            if self.forward.ranks is None and self.changed():
                self.allocator.forget()
            self._unchecked = 0
        plan = self._plan()
        if plan is not None:
            self._launch(plan, look)
            self._unchecked += 1
        # Where nothing could be planned, the tokens of the oldest step may change that.
        most = self.micro_batches.count if plan is not None else len(self.flights) - 1
        while len(self.flights) > max(0, most):
            self._read(self.flights.popleft())
        self._cancelled = {one: None for one in self._cancelled if self.scheduler.busy and not self._drop(one)}
        news, self._news = list(self._news), {}
        return news

    def _plan(self) -> StepPlan | None:
        try:
            plan = self.scheduler.plan(unread=bool(self.flights))
        except IdsWanted:
            self._read_all()
            plan = self.scheduler.plan(unread=False)
        for request, reason in self.scheduler.failed:
            self.ids.discard(request.id)
            self._fail(request, reason)
        self.scheduler.failed.clear()
        if plan is not None and self.sampler.waits(plan.drawn):
            while any(flight.plan.micro_batch == plan.micro_batch for flight in self.flights):
                self._read(self.flights.popleft())
        return plan

    def resumed(self) -> None:
        """A pause is over, in which the model may have been changed."""
        self.forget()
        self._unchecked = CHECK_EVERY

    def changed(self) -> bool:
        """Whether the weights have changed since the last check: new requests must not find what was stored."""
        with contextlib.suppress(Unfit):  # which the step will raise
            self.forward.ready()
        before, self.weights = self.weights, self._weights()
        return before is not None and before != self.weights

    def survey(self) -> tuple[str, bool]:
        """Before a step that ranks run together: why this one cannot, or "", and whether its weights have changed."""
        reason = self.forward.mode()
        if self.busy and self._unchecked < CHECK_EVERY:
            return reason or "", False
        try:
            self.forward.ready()
        except Unfit as unfit:
            reason = reason or str(unfit)
        return reason or "", self.changed()

    def forget(self) -> None:
        """New requests find nothing that was stored before."""
        self.allocator.forget()

    def _weights(self) -> tuple[object, int | None] | None:
        """Identifies the weights: their addresses, and how often they were edited as far as autograd counts."""
        seen = self.forward.seen
        return None if seen is None else (seen, seen.versions())

    def _launch(self, plan: StepPlan, look: bool) -> None:
        try:
            reason = self.forward.mode()
            if reason is not None:
                raise Unfit(reason)
            for row in plan.opened:
                request = self.answers.requests[row]
                assert request is not None
                self.sampler.set(row, request.sampling, self._tokens(row), drawn=int(self.answers.count[row]))
            self.steps.upload(*self.allocator.changes())
            self.flights.append(self.steps.launch(plan, self._tokens, self.limits.logprobs, look))
        except Exception as error:  # of this step: those in it end, the others go on
            if (
                self.forward.ranks is not None
            ):  # which may not have failed on another rank, and waits there for this one
                raise
            self._fail_step(plan, reason_of(error, memory=True))

    def _fail_step(self, plan: StepPlan, reason: str) -> None:
        """The prompts of a step that raised fail; all its requests, where it had no prompts."""
        self._read_all()
        begun = [*plan.rows[plan.decodes :].tolist(), *plan.opened]
        for row in dict.fromkeys(begun or plan.rows.tolist()):
            if self.answers.requests[row] is not None:
                self._fail(self._leave(row, keep=False), reason)
        self.scheduler.undo(plan)

    def _tokens(self, row: int) -> list[int]:
        """Prompt and answer, as far as they are known."""
        request = self.answers.requests[row]
        assert request is not None
        return request.prompt + self.answers.known(row).tolist()

    def _read_all(self) -> None:
        while self.flights:
            self._read(self.flights.popleft())

    def _read(self, flight: Flight) -> None:
        """Takes in the ids of a step, but for rows that another request has taken since."""
        ids, logprobs = flight.read()
        plan = flight.plan
        current = self.scheduler.serial[plan.drawn] == plan.serials
        rows = plan.drawn[current]
        if not len(rows):
            return
        outcome = self.answers.add(rows, ids[current], None if logprobs is None else logprobs[current])
        for request in outcome.streamed:
            self._note(request)
        for row, reason in outcome.failed.items():
            known = str(self.sampler.error(row)) if reason is None else reason
            self._fail(self._leave(row, keep=False), known)
        for row in outcome.ended:
            request = self._leave(row, keep=True)
            self._note(self._full(request) if row in outcome.full else finish(request))

    def _full(self, request: Request) -> Request:
        """Ends a request at its limit of tokens; it has failed where more were asked for."""
        tokens, asked = len(request.tokens), request.max_new_tokens
        if asked is None or tokens >= asked:
            return finish(request)
        room = f"a prompt of {len(request.prompt)}, where a request may come to {self.limits.context}"
        return finish(request, f"{CUT} {tokens} of max_new_tokens={asked} tokens: {room}")

    def _leave(self, row: int, keep: bool) -> Request:
        self.sampler.clear(row)
        request = self.scheduler.close(row, keep)
        self.ids.discard(request.id)
        return request

    def _note(self, request: Request) -> None:
        self._news[request] = None

    def _fail(self, request: Request, reason: str) -> None:
        """The request fails, and its children that do not exist yet."""
        children, request.children = request.further(), 0
        self.ids.difference_update(one.id for one in children)
        for one in (request, *children):
            self._note(finish(one, reason))

    def fail(self, error: Exception) -> list[Request]:
        """All requests fail with this error; the engine is empty afterwards."""
        self.flights.clear()
        failed = [self._leave(row, keep=False) for row in self.scheduler.running] + list(self.scheduler.waiting)
        self.scheduler.waiting.clear()
        for request in failed:
            self._fail(request, str(error) or repr(error))
        self.ids.clear()
        self.allocator.forget()
        news, self._news = list(self._news), {}
        return news

    def close(self) -> None:
        """Gives the memory back; the engine cannot be used any more."""
        self.flights.clear()
        self.micro_batches.join()
        del self.kv_cache, self.steps, self.sampler
