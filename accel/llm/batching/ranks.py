"""What the thread of an engine takes in between two steps, alone or in step with ranks that share the model.

All ranks run the same engine over the same requests: who takes which row, block and place in a step follows from the
requests and from the ids that are drawn, and from nothing that one rank alone knows. So only what comes from outside is
told, by the first rank, before the step in which all take it in. Where nothing came, that is a few numbers.
"""

import copy
import enum
import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from accel.errors import RanksApart, logged, reason_of
from accel.llm.batching.engine import Engine
from accel.llm.batching.request import Request, StopStrings, failed
from accel.llm.batching.sampling import SamplingDefaults
from accel.parallel.lockstep import Lockstep

CALL = "generate_batch"
UNFIT, ENDED = 1, 2  # what may be wrong on a rank: it could run no step now; its loop has ended by an error


class Stop(enum.IntEnum):
    """How soon the loop ends. Within a session it only grows."""

    NO = 0
    WHEN_DONE = 1  # all requests are finished first
    NOW = 2  # requests that are not finished fail
    STOPPED = 3  # the loop has ended


class Inbox(NamedTuple):
    """Taken in between two steps: requests, ids of cancelled ones, how soon to end, and whether no step may run."""

    added: Sequence[Request] = ()
    cancelled: Sequence[str] = ()
    stop: Stop = Stop.NO
    pausing: bool = False


class OneRank:
    """The thread of an engine that no other rank follows. settings: how tokens are chosen where requests do not say."""

    leads, alone = True, True
    settings: SamplingDefaults

    def free(self) -> None:
        """Raises where an engine may not compute now; here it always may."""

    def begin(self) -> None:
        """The thread has begun."""

    def meet(self, inbox: Inbox, engine: Engine) -> Inbox:
        """What this loop is to take in."""
        return inbox

    def end(self, error: BaseException | None) -> None:
        """The thread has ended, by this error if by one."""


class AllRanks(OneRank):
    """Threads of ranks that share a model and meet before every step. settings: of the requests of this rank."""

    alone = False

    def __init__(self, lockstep: Lockstep):
        self.lockstep, self.leads = lockstep, lockstep.leads
        self.over = False  # all know that the loops end
        self.tokenizers: list[Any] = []  # that requests came with, each sent once

    def free(self) -> None:
        """Raises RuntimeError where another loop computes with these ranks: their exchanges would mix."""
        if self.lockstep.ranks.taken:
            raise RuntimeError(f"{self.lockstep.ranks.taken} computes with all ranks: stop it before another one")

    def begin(self) -> None:
        """This loop computes with them from now on. As `free`."""
        self.free()
        ranks = self.lockstep.ranks
        ranks.taken, ranks.paused, self.over = "a manager of continuous batching", False, False

    def end(self, error: BaseException | None) -> None:
        """Tells the other ranks of an error that they do not know of yet. Raises nothing."""
        try:
            if error is not None and not self.over and self.lockstep.channel.whole:
                self.over = True
                self.lockstep.most((0, 0, 0, ENDED, 0))
                self.lockstep.reasons(logged(error))
        except RanksApart as worse:
            logged(worse)
        finally:
            self.lockstep.ranks.taken, self.lockstep.ranks.paused = "", False

    def meet(self, inbox: Inbox, engine: Engine) -> Inbox:
        """What all ranks are to take in. Of the ranks that follow, only that they end at once or pause is heard.

        Raises RanksApart on all where one of them cannot go on.
        """
        reason, changed = engine.survey()
        message = self._packed(inbox) if self.leads else b""
        stop = inbox.stop if self.leads or inbox.stop >= Stop.NOW else Stop.NO
        numbers = len(message), stop, inbox.pausing, UNFIT if reason else 0, changed
        size, soonest, pausing, wrong, others = self.lockstep.most(numbers)
        if wrong == ENDED or (wrong == UNFIT and (size or engine.busy) and soonest < Stop.NOW):
            self.over = True
            raise RanksApart(f"{CALL}: {self.lockstep.reasons(reason)}")
        if others:
            engine.allocator.forget()
        self.over = soonest >= Stop.NOW
        self.lockstep.ranks.paused = bool(pausing)
        inbox = inbox._replace(stop=Stop(soonest), pausing=bool(pausing))
        heard = self.lockstep.broadcast(message, size) if size else b""
        return inbox if self.leads or not heard else self._unpacked(heard, inbox)

    def _packed(self, inbox: Inbox) -> bytes:
        """What the other ranks are told; nothing where nothing came. Requests that cannot be sent fail."""
        if not (inbox.added or inbox.cancelled):
            return b""
        known, requests = len(self.tokenizers), []
        for request in inbox.added:
            try:
                requests.append(self._packed_request(request))
            except Exception as error:  # of somebody's own tokenizer
                failed(request.family, f"the other ranks cannot be told of it: {reason_of(error)}")
                requests.append(self._packed_request(request))
        return pickle.dumps((self.tokenizers[known:], requests, list(inbox.cancelled)))

    def _packed_request(self, request: Request) -> bytes:
        """A request without what each rank makes for itself; of one that has failed, what its output says."""
        hosted = not request.finished and request.sampling.host is not None
        sent = replace(request, children=[])
        if request.finished:
            sent.sampling, sent.stopping_criterion, sent.settings = None, None, {}
        elif hosted:
            sent.sampling = request.sampling._replace(host=None)
        if isinstance(sent.stopping_criterion, StopStrings):
            sent.stopping_criterion = copy.copy(sent.stopping_criterion)
            sent.stopping_criterion.tokenizer = self._number(sent.stopping_criterion.tokenizer)
        return pickle.dumps((sent, len(request.children), hosted))

    def _number(self, tokenizer: Any) -> int:
        """Of a tokenizer among those that are sent, once each. Raises what pickling it raises."""
        number = next((number for number, one in enumerate(self.tokenizers) if one is tokenizer), None)
        if number is None:
            number = len(self.tokenizers)
            pickle.dumps(tokenizer)
            self.tokenizers.append(tokenizer)
        return number

    def _unpacked(self, message: bytes, inbox: Inbox) -> Inbox:
        tokenizers, requests, cancelled = pickle.loads(message)
        self.tokenizers += tokenizers
        return inbox._replace(added=[self._unpacked_request(one) for one in requests], cancelled=cancelled)

    def _unpacked_request(self, packed: bytes) -> Request:
        request, children, hosted = pickle.loads(packed)
        if isinstance(request.stopping_criterion, StopStrings):
            request.stopping_criterion.tokenizer = self.tokenizers[request.stopping_criterion.tokenizer]
        if hosted:
            given = request.settings | {"seed": request.sampling.seed}
            found = self.settings.request(request.prompt, request.max_new_tokens, sorted(request.eos), **given)
            request.sampling = request.sampling._replace(host=found.host)
        request.created = time.perf_counter()  # by this process's clock, as all other times of it
        return request.with_children(children)
