"""What the thread of an engine takes in between two steps, alone or in step with ranks that share the model.

All ranks run the same engine over the same requests: who takes which row, block and place in a step follows from the
requests and from the ids that are drawn, and from nothing that one rank alone knows. So only what comes from outside is
told, by the first rank, before the step in which all take it in. Where nothing came, that is a few numbers.
"""

import enum
import io
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from accel.errors import RanksApart, logged, reason_of
from accel.llm.batching.engine import Engine
from accel.llm.batching.request import Request, failed, family
from accel.llm.batching.sampling import SamplingDefaults
from accel.parallel.lockstep import Lockstep

AT_EXIT = 10.0  # seconds that the process waits for a step that is under way


class Stop(enum.IntEnum):
    """How soon the loop ends. Within a session it only grows."""

    NO = 0
    WHEN_DONE = 1  # all requests are finished first
    NOW = 2  # requests that are not finished fail
    STOPPED = 3  # the loop has ended


class Ending:
    """How soon a loop is to end, and what requests are told that it leaves unfinished.

    Knows neither engine nor model: what the garbage collector calls for a manager must not keep them alive.
    """

    def __init__(self) -> None:
        self.reset()
        self.thread: threading.Thread | None = None

    def reset(self) -> None:
        self.how, self.why = Stop.NO, "the generation loop ended before this request was finished"

    def ask(self, how: Stop) -> None:
        """It only ever becomes sooner. Waits for no lock."""
        self.how = max(self.how, how)

    def abandon(self) -> None:
        """Nobody is left who could ask for results. The garbage collector may call it, on any thread."""
        if self.how is not Stop.STOPPED:
            self.why = "the manager of this request was deleted before the request was finished; keep a reference to it"
            self.ask(Stop.NOW)
        if self.thread is not None and not threading.main_thread().is_alive():  # the process is about to exit
            self.thread.join(AT_EXIT)


def interrupted() -> bool:
    """Whether the user or the process wants an end while this is called, as in a finally block."""
    return isinstance(sys.exc_info()[1], KeyboardInterrupt | SystemExit)


PLACE = "generate_batch"
UNFIT, ENDED = 1, 2  # what may be wrong on a rank: it could run no step now; its loop has ended by an error


class Turn(NamedTuple):
    """What a loop takes in between two steps. added: requests; cancelled: ids; refused: requests that have failed
    before an engine saw them; how: how soon the loop is to end; pausing: whether no step may run.
    """

    added: Sequence[Request] = ()
    cancelled: Sequence[str] = ()
    refused: Sequence[Request] = ()
    how: Stop = Stop.NO
    pausing: bool = False


class OneRank:
    """The thread of an engine that no other rank follows. settings: how tokens are chosen where requests do not say."""

    leads = True
    settings: SamplingDefaults

    def free(self) -> None:
        """Nothing stands against an engine."""

    def begin(self) -> None:
        """The thread has begun."""

    def meet(self, turn: Turn, engine: Engine) -> Turn:
        """What is to be taken in."""
        return turn

    def end(self, error: BaseException | None) -> None:
        """The thread has ended, by this error if by one."""


class AllRanks(OneRank):
    """The threads of ranks that share a model, which meet before every step. settings: of this rank's requests, which
    may have processors that only the rank itself can make.
    """

    def __init__(self, lockstep: Lockstep):
        self.lockstep, self.leads = lockstep, lockstep.leads
        self.over = False  # all know that the loops end
        self.tokenizers: list[PreTrainedTokenizerBase] = []  # that requests came with, which are told of once

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

    def meet(self, turn: Turn, engine: Engine) -> Turn:
        """What all ranks are to take in. Of the ranks that follow, only that they end at once or pause is heard.

        Raises RanksApart on all where one of them cannot go on.
        """
        reason, changed = engine.survey()
        turn, message = self._told(turn) if self.leads else (turn, b"")
        how = turn.how if self.leads or turn.how >= Stop.NOW else Stop.NO
        numbers = len(message), how, turn.pausing, UNFIT if reason else 0, changed
        size, how_soon, pausing, wrong, others = self.lockstep.most(numbers)
        if wrong == ENDED or (wrong == UNFIT and (size or engine.busy) and how_soon < Stop.NOW):
            self.over = True
            raise RanksApart(f"{PLACE}: {self.lockstep.reasons(reason)}")
        if others:
            engine.forget()
        self.over = how_soon >= Stop.NOW
        self.lockstep.ranks.paused = bool(pausing)
        turn = turn._replace(how=Stop(how_soon), pausing=bool(pausing))
        if not size:
            return turn
        heard = self.lockstep.broadcast(message, size)
        return turn if self.leads else self._heard(heard, turn)

    def _told(self, turn: Turn) -> tuple[Turn, bytes]:
        """The turn without requests that cannot be told of, and what is said of the others; nothing without any."""
        known, packed = len(self.tokenizers), []
        added, refused = list(turn.added), list(turn.refused)
        for request in turn.added:
            try:
                packed.append(self._packed(request))
            except Exception as error:  # of somebody's own tokenizer
                added.remove(request)
                refused += failed(family(request), f"the other ranks cannot be told of it: {reason_of(error)}")
        if not (packed or refused or turn.cancelled):
            return turn, b""
        new = self.tokenizers[known:]
        message = pickle.dumps((new, packed, list(turn.cancelled), refused))
        return turn._replace(added=added, refused=refused), message

    def _packed(self, request: Request) -> bytes:
        """A request without what each rank makes for itself."""
        chosen = request.sampling
        hosted = chosen.host is not None
        file = io.BytesIO()
        _Packer(file, self.tokenizers).dump((replace(request, sampling=chosen._replace(host=None)), hosted))
        return file.getvalue()

    def _heard(self, message: bytes, turn: Turn) -> Turn:
        tokenizers, requests, cancelled, refused = pickle.loads(message)
        self.tokenizers += tokenizers
        added = [self._unpacked(packed) for packed in requests]
        return turn._replace(added=added, cancelled=cancelled, refused=refused)

    def _unpacked(self, packed: bytes) -> Request:
        request, hosted = _Unpacker(io.BytesIO(packed), self.tokenizers).load()
        if hosted:
            given = request.settings | {"seed": request.sampling.seed}
            found = self.settings.request(request.prompt, request.max_new_tokens, sorted(request.eos), **given)
            request.sampling = request.sampling._replace(host=found.host)
        request.created = time.perf_counter()  # by this process's clock, as all other times of it
        return request


class _Packer(pickle.Pickler):
    """Gives a number for a tokenizer, by its place in a list that it grows."""

    def __init__(self, file: io.BytesIO, tokenizers: list[PreTrainedTokenizerBase]):
        super().__init__(file)
        self.tokenizers = tokenizers

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, PreTrainedTokenizerBase):
            return None
        place = next((place for place, one in enumerate(self.tokenizers) if one is obj), len(self.tokenizers))
        if place == len(self.tokenizers):
            self.tokenizers.append(obj)
        return place


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tokenizers: list[PreTrainedTokenizerBase]):
        super().__init__(file)
        self.tokenizers = tokenizers

    def persistent_load(self, number: int) -> PreTrainedTokenizerBase:
        return self.tokenizers[number]
