"""Which requests are under way, and where their outputs go: to a handler, or to a queue that callers read."""

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from accel.errors import logged
from accel.libraries.batching import GenerationOutput, logger
from accel.llm.batching.request import Request

Handler = Callable[[GenerationOutput], object]
Deliveries = list[tuple[Handler, GenerationOutput]]


class Results:
    """Outputs of requests, from the time these are expected. For any thread.

    A request with a handler has its outputs given to the handler, on the event loop that it was registered on. All
    others wait in a queue, in the order they came in. unasked: how many may wait there of requests that nobody here has
    asked for, as on a rank that follows another one's; None for any number.
    """

    def __init__(self, unasked: int | None = None) -> None:
        self.unasked, self._asked = unasked, set[str]()
        self._changed = threading.Condition()
        self._queue: OrderedDict[int, GenerationOutput] = OrderedDict()  # by a number that counts up
        self._numbers: dict[str, deque[int]] = {}  # of the outputs of one request in the queue
        self._count = 0
        self._handlers: dict[str, tuple[Handler, asyncio.AbstractEventLoop]] = {}
        self._under_way: dict[str, Request] = {}

    def expect(self, requests: Sequence[Request]) -> None:
        """Outputs of these will come. Raises ValueError for an id that is under way."""
        with self._changed:
            taken = next((one.id for one in requests if one.id in self._under_way), None)
            if taken is not None:
                raise ValueError(f"request_id={taken!r}: a request with this id is under way; give another id")
            self._under_way |= {one.id: one for one in requests}

    def ask(self, ids: Iterable[str]) -> None:
        """Somebody here is to read the outputs of these, which may be expected, or there, already."""
        with self._changed:
            self._asked.update(ids)

    def under_way(self) -> list[Request]:
        """Requests whose last output has not come yet."""
        with self._changed:
            return list(self._under_way.values())

    def is_under_way(self, request_id: str) -> bool:
        """Also of one that was asked for, and of which nothing has been heard yet."""
        with self._changed:
            return request_id in self._under_way or request_id in self._asked

    def put(self, requests: Iterable[Request]) -> list[str]:
        """Delivers what they have come to, and lets all who wait ask again whether more may come.

        Of requests that are not under way only a handler is told, where there is one. Returns the ids of those that
        nobody can be told of any more: their event loop is closed.
        """
        waiting: dict[asyncio.AbstractEventLoop, Deliveries] = {}
        lost: list[str] = []
        with self._changed:
            for request in requests:
                expected = self._under_way.get(request.id)
                if expected is not request and (expected is not None or request.id not in self._handlers):
                    continue
                if request.id in self._handlers:
                    handler, loop = self._handlers[request.id]
                    waiting.setdefault(loop, []).append((handler, request.output()))
                else:
                    self._enqueue(request.output())
                if request.finished:
                    self._under_way.pop(request.id, None)
                    self._handlers.pop(request.id, None)
            self._changed.notify_all()
        for loop, deliveries in waiting.items():  # one call a loop: waking it from another thread costs most
            try:
                loop.call_soon_threadsafe(_call, deliveries)
            except RuntimeError:  # it is closed
                lost += [output.request_id for _, output in deliveries]
        with self._changed:
            for request_id in lost:
                self._handlers.pop(request_id, None)
                self._under_way.pop(request_id, None)
        return lost

    def handle(self, request_id: str, callback: Handler, loop: asyncio.AbstractEventLoop) -> None:
        """The callback gets this request's outputs, queued ones first. Raises ValueError where it has a handler."""
        with self._changed:
            if request_id in self._handlers and request_id in self._under_way:
                raise ValueError(
                    f"request_id={request_id!r}: this request is under way and has a result handler already"
                )
            earlier = [self._queue.pop(number) for number in self._numbers.pop(request_id, ())]
            if not any(output.is_finished() for output in earlier):
                self._handlers[request_id] = callback, loop
        if earlier:
            loop.call_soon_threadsafe(_call, [(callback, output) for output in earlier])

    def take(
        self, request_id: str | None, timeout: float | None, goes_on: Callable[[], bool]
    ) -> GenerationOutput | None:
        """The first output, or this request's. Waits up to `timeout` seconds, for ever if None, while one may come."""

        def first() -> int | None:
            return next(iter(self._queue if request_id is None else self._numbers.get(request_id, ())), None)

        def ready() -> bool:
            expected = goes_on() and (request_id is None or self.is_under_way(request_id))
            return first() is not None or not expected

        with self._changed:
            self._changed.wait_for(ready, timeout)
            number = first()
            return None if number is None else self._dequeue(number)

    def _enqueue(self, output: GenerationOutput) -> None:
        self._queue[self._count] = output
        self._numbers.setdefault(output.request_id, deque()).append(self._count)
        self._count += 1
        if self.unasked is not None and len(self._queue) > self.unasked:
            oldest = next((number for number, one in self._queue.items() if one.request_id not in self._asked), None)
            if oldest is not None:
                self._dequeue(oldest)

    def _dequeue(self, number: int) -> GenerationOutput:
        """Takes out the first output of its request."""
        output = self._queue.pop(number)
        numbers = self._numbers[output.request_id]
        numbers.popleft()
        if not numbers:
            del self._numbers[output.request_id]
        if output.is_finished():
            self._asked.discard(output.request_id)
        return output


def _call(deliveries: Deliveries) -> None:
    """On the event loop. One handler that raises takes nothing from the others."""
    for handler, output in deliveries:
        try:
            handler(output)
        except Exception as error:
            logger.error(f"The result handler of request {output.request_id} raised {logged(error)}", exc_info=True)
