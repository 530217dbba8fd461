"""The thread of an engine: takes requests in, runs steps, and hands results out until it is stopped."""

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from accel.errors import fatal, logged, out_of_memory
from accel.libraries.batching import logger
from accel.llm.batching.engine import Engine
from accel.llm.batching.ranks import AllRanks, Ending, OneRank, Stop, Turn
from accel.llm.batching.request import Request, failed, family, finish
from accel.llm.batching.results import Results

FAILURES = 3  # steps in a row that raise, after which the loop gives up
LOOK = 1.0  # seconds between two checks of an idle thread whether its manager is gone, and between meetings of ranks
NAP = 0.05  # seconds from one meeting to the next while another rank pauses
PATIENCE = 10.0  # seconds that adding a request waits for room in a bounded queue, as in stock
CANCELLED = "the request was cancelled"
ELSEWHERE = "the manager of another rank that shares the model ended before this request was finished"


class EngineThread:
    """An engine, the requests that wait for it, and its thread. Knows no manager, so that an abandoned one is freed.

    build: makes the engine. devices: where it computes, the first is the current one there. results: takes what comes
    out. most_waiting: how many requests may wait to be taken in, 0 for no bound. ranks: what this loop does in step
    with those of other ranks.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        devices: Sequence[torch.device],
        results: Results,
        most_waiting: int = 0,
        ranks: OneRank | None = None,
    ) -> None:
        self.ranks = ranks or OneRank()
        self.build, self.devices, self.results, self.most_waiting = build, devices, results, most_waiting
        self.engine: Engine | None = None
        self.ending = Ending()
        self.fatal_error: Exception | None = None
        self.keeps = False  # the engine, once the loop has ended
        self.steps = 0
        self._changed = threading.Condition()
        self._added: deque[Request] = deque()
        self._cancelled: deque[str] = deque()
        self._refused: deque[Request] = deque()
        self._pauses: Counter[int] = Counter()  # by thread
        self._parked = False
        self._failures = 0

    # -- for callers, from any thread ----------------------------------------------------------------------------------

    def refusal(self) -> str | None:
        """Why no more requests are accepted, in stock's words."""
        if self.fatal_error is not None:
            return "The background thread died with a fatal error."
        return None if self.ending.how is Stop.NO else "The background thread is stopping."

    def add(self, requests: Sequence[Request]) -> bool:
        """Puts the first in line for the engine; the others are its children. Whether they were taken. Raises
        queue.Full where there is no room for seconds, ValueError for an id that is under way.
        """
        with self._changed:
            if self.most_waiting and not self._changed.wait_for(self._has_room, PATIENCE):
                raise queue.Full
            if self.refusal() is not None:
                return False
            self.results.expect(requests)
            self._added.append(requests[0])
            self._changed.notify_all()
            return True

    def refuse(self, requests: Sequence[Request]) -> None:
        """Delivers requests that failed before an engine saw them."""
        self.results.expect(requests)
        self.results.put(requests)
        if isinstance(self.ranks, AllRanks):
            with self._changed:
                self._refused += requests
                self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        if self.ranks.leads:
            with self._changed:
                self._cancelled.append(request_id)
                self._changed.notify_all()

    def goes_on(self) -> bool:
        """Whether more results may come."""
        return self.ending.thread is not None and self.ending.how is not Stop.STOPPED

    def start(self) -> None:
        self.ranks.begin()
        self.ending.reset()
        self.fatal_error, self.keeps = None, False
        self._pauses.clear()
        self._parked, self._failures = False, 0
        self.ending.thread = threading.Thread(target=self._run, name="accel-batching", daemon=True)
        self.ending.thread.start()

    @property
    def thread(self) -> threading.Thread | None:
        """The last one that was started and has not been joined."""
        return self.ending.thread

    def stop(self, how: Stop, error: str | None = None) -> None:
        """Asks the loop to end. error: what requests are told that are not finished."""
        with self._changed:
            self.ending.ask(how)
            if error is not None:
                self.ending.why = error
            self._changed.notify_all()

    def is_pausing(self) -> bool:
        """Whether this thread holds a pause."""
        return self._pauses[threading.get_ident()] > 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, no step runs and the devices are idle. Raises RuntimeError where the loop ends instead."""
        thread = threading.get_ident()
        with self._changed:
            self._pauses[thread] += 1
            try:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._parked or self.ending.how is Stop.STOPPED)
                if not self._parked:
                    raise RuntimeError("The generation loop stopped before it could pause.") from self.fatal_error
            except BaseException:
                self._resume(thread)
                raise
        try:
            yield
        finally:
            with self._changed:
                self._resume(thread)

    def _resume(self, thread: int) -> None:
        self._pauses[thread] -= 1
        self._pauses += Counter()  # forgets threads that hold none
        if not self._pauses:
            self._parked = False
        self._changed.notify_all()

    def ready(self) -> Engine:
        """The engine, made where there is none. Not while the loop runs. Raises what making it raises."""
        if self.engine is None:
            with _computing(self.devices[0]):
                self.engine = self.build()
                _synchronize(self.devices)
        return self.engine

    def close(self) -> None:
        """Gives back what the engine holds. Not while the loop runs."""
        engine, self.engine = self.engine, None
        if engine is not None:
            with _computing(self.devices[0]):
                engine.close()

    def _has_room(self) -> bool:
        return len(self._added) < self.most_waiting or self.refusal() is not None

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ended_by: BaseException | None = None
        try:
            with _computing(self.devices[0]):
                engine = self.ready()
                while self._take_in(engine):
                    self._deliver(self._step(engine))
        except BaseException as error:
            logger.error(f"Error in generation loop: {logged(error)}", exc_info=True)
            self.fatal_error = error if isinstance(error, Exception) else RuntimeError(repr(error))
            ended_by = error
        finally:
            self.ranks.end(ended_by)
            self._end()

    def _take_in(self, engine: Engine) -> bool:
        """Gives the engine what came in, and waits until it has something to do. False once the loop is to end."""
        paused = False
        while True:
            turn = self.ranks.meet(self._turn(engine), engine)
            if turn.how > self.ending.how:
                self.stop(turn.how, ELSEWHERE if turn.how >= Stop.NOW else None)
            if turn.how >= Stop.NOW:
                return False
            if paused and not turn.pausing:
                engine.resumed()
            for request in turn.added:
                if not self.ranks.leads:
                    self.results.expect(family(request))
                engine.add(request)
            for request_id in turn.cancelled:
                engine.cancel(request_id)
            if turn.cancelled:
                gone = set(turn.cancelled)
                self._deliver(failed((one for one in self.results.under_way() if one.id in gone), CANCELLED))
            if turn.refused:
                if not self.ranks.leads:
                    self.results.expect(turn.refused)
                self._deliver(turn.refused)
            if turn.pausing:
                self._park(first=not paused)
            elif engine.busy:
                return True
            elif turn.how:
                return False
            paused = turn.pausing

    def _turn(self, engine: Engine) -> Turn:
        """What came in here, once there is something to tell or to do; a rank that follows waits where ranks meet."""
        with self._changed:
            while self.ranks.leads and not (self._news() or engine.busy):
                self._changed.wait(LOOK)
                if isinstance(self.ranks, AllRanks):  # the others wait for no longer
                    break
            turn = Turn(
                list(self._added), list(dict.fromkeys(self._cancelled)), list(self._refused), self.ending.how,
                bool(self._pauses),
            )  # fmt: skip
            self._added.clear()
            self._cancelled.clear()
            self._refused.clear()
            self._changed.notify_all()
            return turn

    def _news(self) -> bool:
        return bool(self._added or self._cancelled or self._refused or self._pauses or self.ending.how)

    def _park(self, first: bool) -> None:
        """Waits until nobody here pauses, or for the others that are to be met. first: devices may still compute."""
        if first:
            _synchronize(self.devices)
        with self._changed:
            if self._pauses:  # where one pause follows another, it parks for each
                self._parked = True
                self._changed.notify_all()
            alone = not isinstance(self.ranks, AllRanks)
            if self.ranks.leads and (self._pauses or not alone) and self.ending.how < Stop.NOW:
                self._changed.wait(LOOK if alone else NAP)

    def _step(self, engine: Engine) -> list[Request]:
        """One step; where it raises, the requests in it fail, and the others go on. Raises fatal errors."""
        try:
            news = engine.step()
        except Exception as error:
            self._failures += 1
            if isinstance(self.ranks, AllRanks):  # of which others may know nothing: they wait for this one
                raise
            if self._failures >= FAILURES or (fatal(error) and not out_of_memory(error)):
                raise
            logger.error(f"Error in generation loop: {error}", exc_info=True)
            return engine.fail(error)
        self.steps += 1
        self._failures = 0
        return news

    def _deliver(self, requests: Sequence[Request]) -> None:
        if requests:
            for request_id in self.results.put(requests):
                self.cancel(request_id)  # nobody is there to hear of it

    def _end(self) -> None:
        """Fails what is left, and gives back what the engine holds unless it is kept. Nothing here may raise."""
        error = RuntimeError(self.ending.why) if self.fatal_error is None else self.fatal_error
        if self.engine is not None:
            try:
                with _computing(self.devices[0]):
                    self._deliver(self.engine.fail(error))
            except Exception as worse:
                logger.error(f"The engine could not be emptied: {logged(worse)}", exc_info=True)
                self.keeps = False
        if not self.keeps or self.fatal_error is not None:
            try:
                self.close()
            except Exception as worse:
                logger.error(f"The engine could not be closed: {logged(worse)}", exc_info=True)
        with self._changed:
            self._added.clear()
            self._cancelled.clear()
            self._refused.clear()
            self.ending.how = Stop.STOPPED
            self._changed.notify_all()
        self._deliver([finish(request, str(error)) for request in self.results.under_way()])
        self.results.wake()


@contextmanager
def _computing(device: torch.device) -> Iterator[None]:
    """Inside, this thread computes on the device and keeps no graph for gradients."""
    with torch.inference_mode():
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
