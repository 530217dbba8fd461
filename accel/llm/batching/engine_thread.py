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
from accel.llm.batching.ranks import Inbox, OneRank, Stop
from accel.llm.batching.request import Request, failed
from accel.llm.batching.results import Results

FAILURES = 3  # steps in a row that raise, after which the loop gives up
CHECK = 1.0  # seconds between two checks of an idle thread whether its manager is gone, and between meetings of ranks
NAP = 0.05  # seconds from one meeting to the next while another rank pauses
PATIENCE = 10.0  # seconds that adding a request waits for room in a bounded queue, as in stock
AT_EXIT = 10.0  # seconds that the process waits for a step that is under way
UNFINISHED = "the generation loop ended before this request was finished"
ELSEWHERE = "the manager of another rank that shares the model ended before this request was finished"
DELETED = "the manager of this request was deleted before the request was finished; keep a reference to it"


class Ending:
    """How soon the thread is to end, and what requests are told that it leaves unfinished.

    Knows neither engine nor model: what the garbage collector calls for a manager must not keep them alive.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None  # the last one that was started and has not been joined
        self.stop, self.reason = Stop.NO, UNFINISHED

    def ask(self, stop: Stop) -> None:
        """It only ever becomes sooner. Waits for no lock."""
        self.stop = max(self.stop, stop)

    def abandon(self) -> None:
        """Nobody is left who could ask for results. The garbage collector may call it, on any thread."""
        if self.stop is not Stop.STOPPED:
            self.reason = DELETED
            self.ask(Stop.NOW)
        if self.thread is not None and not threading.main_thread().is_alive():  # the process is about to exit
            self.thread.join(AT_EXIT)


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
        most_waiting: int,
        ranks: OneRank,
    ) -> None:
        self.build, self.devices, self.results, self.most_waiting = build, devices, results, most_waiting
        self.ranks = ranks
        self.engine: Engine | None = None
        self.ending = Ending()
        self.fatal_error: Exception | None = None
        self.keeps = False  # the engine, once the loop has ended
        self.steps = 0
        self._changed = threading.Condition()
        self._added: deque[Request] = deque()
        self._cancelled: dict[str, None] = {}
        self._pauses: Counter[int] = Counter()  # by thread
        self._parked = False
        self._failures = 0

    # -- for callers, from any thread ----------------------------------------------------------------------------------

    def refusal(self) -> str | None:
        """Why no more requests are accepted, in stock's words."""
        if self.fatal_error is not None:
            return "The background thread died with a fatal error."
        return None if self.ending.stop is Stop.NO else "The background thread is stopping."

    def add(self, request: Request) -> bool:
        """Puts a request in line for the engine. Whether it was taken; else a warning says why. Raises queue.Full where
        there is no room for seconds, ValueError for an id that is under way.
        """
        with self._changed:
            if self.most_waiting and not self._changed.wait_for(self._has_room, PATIENCE):
                raise queue.Full
            refusal = self.refusal()
            if refusal is None:
                self.results.expect(request.family)
                self._added.append(request)
                self._changed.notify_all()
                return True
        begin, end = f"{request.prompt[:3]}"[:-1], f"{request.prompt[-3:]}"[1:]
        logger.warning(f"{refusal}. Request with ids {begin}, ..., {end} will be dropped.")
        self.results.put(failed(request.family, refusal))
        return False

    def _has_room(self) -> bool:
        return len(self._added) < self.most_waiting or self.refusal() is not None

    def cancel(self, request_id: str) -> None:
        if self.ranks.leads:
            with self._changed:
                self._cancelled[request_id] = None
                self._changed.notify_all()

    @property
    def goes_on(self) -> bool:
        """Whether more results may come."""
        return self.ending.thread is not None and self.ending.stop is not Stop.STOPPED

    @property
    def running(self) -> bool:
        return self.ending.thread is not None and self.ending.thread.is_alive()

    def start(self) -> None:
        self.ranks.begin()
        self.ending.stop, self.ending.reason = Stop.NO, UNFINISHED
        self.fatal_error, self.keeps = None, False
        self._pauses.clear()
        self._parked, self._failures = False, 0
        self.ending.thread = threading.Thread(target=self._run, name="accel-batching", daemon=True)
        self.ending.thread.start()

    def stop(self, stop: Stop, reason: str | None = None) -> None:
        """Asks the loop to end. reason: what requests are told that are not finished."""
        with self._changed:
            self.ending.ask(stop)
            if reason is not None:
                self.ending.reason = reason
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
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._parked or self.ending.stop is Stop.STOPPED)
                if not self._parked:
                    raise RuntimeError("The generation loop stopped before it could pause.") from self.fatal_error
            yield
        finally:
            with self._changed:
                self._pauses[thread] -= 1
                self._pauses += Counter()  # forgets threads that hold none
                self._parked = self._parked and bool(self._pauses)
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
            inbox = self.ranks.meet(self._received(engine), engine)
            if inbox.stop > self.ending.stop:
                self.stop(inbox.stop, ELSEWHERE if inbox.stop >= Stop.NOW else None)
            if inbox.stop >= Stop.NOW:
                return False
            if paused and not inbox.pausing:
                engine.resumed()
            for request in inbox.added:
                if not self.ranks.leads:
                    self.results.expect(request.family)
                self._deliver(request.family if request.finished else engine.add(request))
            for request_id in inbox.cancelled:
                self._deliver(engine.cancel(request_id))
            if inbox.pausing:
                self._park(first=not paused)
            elif engine.busy:
                return True
            elif inbox.stop:
                return False
            paused = inbox.pausing

    def _received(self, engine: Engine) -> Inbox:
        """What came in here, once there is something to tell or to do; a rank that follows waits where ranks meet."""
        with self._changed:
            while self.ranks.leads and not (
                self._added or self._cancelled or self._pauses or self.ending.stop or engine.busy
            ):
                self._changed.wait(CHECK)
                if not self.ranks.alone:  # the others wait for no longer
                    break
            inbox = Inbox(list(self._added), list(self._cancelled), self.ending.stop, bool(self._pauses))
            self._added.clear()
            self._cancelled.clear()
            self._changed.notify_all()
            return inbox

    def _park(self, first: bool) -> None:
        """Waits until nobody here pauses, or for the others that are to be met. first: devices may still compute."""
        if first:
            _synchronize(self.devices)
        with self._changed:
            if self._pauses:  # where one pause follows another, it parks for each
                self._parked = True
                self._changed.notify_all()
            alone = self.ranks.alone
            if self.ranks.leads and (self._pauses or not alone) and self.ending.stop < Stop.NOW:
                self._changed.wait(CHECK if alone else NAP)

    def _step(self, engine: Engine) -> list[Request]:
        """One step; where it raises, the requests in it fail, and the others go on. Raises fatal errors."""
        try:
            updates = engine.step()
        except Exception as error:
            self._failures += 1
            if not self.ranks.alone:  # of which others may know nothing: they wait for this one
                raise
            if self._failures >= FAILURES or (fatal(error) and not out_of_memory(error)):
                raise
            logger.error(f"Error in generation loop: {error}", exc_info=True)
            return engine.fail(error)
        self.steps += 1
        self._failures = 0
        return updates

    def _deliver(self, requests: Sequence[Request]) -> None:
        if requests:
            for request_id in self.results.put(requests):
                self.cancel(request_id)  # nobody is there to hear of it

    def _end(self) -> None:
        """Fails what is left, and gives back what the engine holds unless it is kept. Nothing here may raise."""
        error = RuntimeError(self.ending.reason) if self.fatal_error is None else self.fatal_error
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
            self.ending.stop = Stop.STOPPED
            self._changed.notify_all()
        left = self.results.under_way()
        failed((one for one in left if not one.finished), str(error))  # others wait here with a reason of their own
        self.results.put(left)


@contextmanager
def _computing(device: torch.device) -> Iterator[None]:
    """Inside, this thread computes on the device and keeps no graph for gradients."""
    with torch.inference_mode(), torch.cuda.device(device if device.type == "cuda" else -1):
        yield


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
