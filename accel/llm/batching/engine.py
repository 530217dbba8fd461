"""The loop of continuous batching: plans a step, launches it, and reads the ids of the step before meanwhile."""

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

# Steps from one look at the model to the next while requests run: a look takes the host about as long as all else that
# it does for a step. Before the first step after a pause, or after all requests have ended, there is one too.
LOOK = 16


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
        self.flights: deque[Flight] = (
            deque()
        )  # as many as there are micro_batches, and one more while a step is launched
        self.ids: set[str] = set()
        self.weights = self._weights()  # that what is stored was made with
        self._unseen = LOOK  # steps since the model was looked at
        self._news: dict[Request, None] = {}  # in the order in which there was news of them
        # Children that are not there yet. In the order in which they were cancelled, as all else that decides who gets
        # which row: ranks that run the same requests must come to the same.
        self._cancelled: dict[str, None] = {}

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do, or to tell."""
        return self.scheduler.busy or bool(self.flights) or bool(self._news)

    def sizes(self) -> dict[str, float]:
        """How many requests at a time there is room for, in how many groups, of how many tokens each, and the memory of
        their keys and values: blocks of BLOCK tokens of one set of layers, and MiB.
        """
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
        """Takes a request. One that cannot run fails, as the next `step` tells."""
        if not self.busy:  # it may have been changed since the last step
            self._unseen = LOOK
        reason = self._refusal(request)
        if reason is not None:
            self._fail(request, reason)
        elif self._complete(request):
            ended = bool(request.tokens) and request.tokens[-1] in request.eos
            for one in (request, *request.further()):
                self._tell(finish(one) if ended else self._full(one))
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
        """Drops a request in any state, and tells nothing more of it. Ids that are not there are ignored.

        Its children that are not there yet fail with it.
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
        """Runs one step, or reads what is under way. Requests of which there is news: ended, or watched, one token on.

        Raises what the GPU cannot recover from.
        """
        look = self._unseen >= LOOK
        if look:
            if self.forward.ranks is None and self.changed():
                self.allocator.forget()
            self._unseen = 0
        plan = self._plan()
        if plan is not None:
            self._launch(plan, look)
            self._unseen += 1
        # Where nothing could be planned, what the oldest step brings may change that.
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
        """The model may be another than before."""
        self.forget()
        self._unseen = LOOK

    def changed(self) -> bool:
        """Whether the weights are others than at the last look: what was stored is not for requests that begin."""
        with contextlib.suppress(Unfit):  # which the step will raise
            self.forward.ready()
        before, self.weights = self.weights, self._weights()
        return before is not None and before != self.weights

    def survey(self) -> tuple[str, bool]:
        """Before a step that ranks run together: why this one could not, and whether its weights have changed."""
        reason = self.forward.mode()
        if self.busy and self._unseen < LOOK:
            return reason or "", False
        try:
            self.forward.ready()
        except Unfit as unfit:
            reason = reason or str(unfit)
        return reason or "", self.changed()

    def forget(self) -> None:
        """Nothing that is stored is for requests that begin from now on."""
        self.allocator.forget()

    def _weights(self) -> tuple[object, int | None] | None:
        """What tells weights from others: where they lie, and how often they were edited as far as autograd counts."""
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
        """Prompts of the step fail, which made it the step it is; where it had none, all that were in it."""
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
        """Takes in the ids of a step; of rows that changed hands since, they were drawn in vain."""
        ids, logprobs = flight.read()
        plan = flight.plan
        current = self.scheduler.serial[plan.drawn] == plan.serials
        rows = plan.drawn[current]
        if not len(rows):
            return
        news = self.answers.add(rows, ids[current], None if logprobs is None else logprobs[current])
        for request in news.told:
            self._tell(request)
        for row, reason in news.failed.items():
            told = str(self.sampler.error(row)) if reason is None else reason
            self._fail(self._leave(row, keep=False), told)
        for row in news.ended:
            request = self._leave(row, keep=True)
            self._tell(self._full(request) if row in news.full else finish(request))

    def _full(self, request: Request) -> Request:
        """It ends with as many tokens as it may come to; it has failed where more were asked for."""
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

    def _tell(self, request: Request) -> None:
        self._news[request] = None

    def _fail(self, request: Request, reason: str) -> None:
        """It, and its children that are not there yet, which nobody else would tell of."""
        children, request.children = request.further(), 0
        self.ids.difference_update(one.id for one in children)
        for one in (request, *children):
            self._tell(finish(one, reason))

    def fail(self, error: Exception) -> list[Request]:
        """All requests that are left fail with this error; the engine is as new."""
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
        """Gives the memory back; nothing can be asked of the engine any more."""
        self.flights.clear()
        self.micro_batches.join()
        del self.kv_cache, self.steps, self.sampler
