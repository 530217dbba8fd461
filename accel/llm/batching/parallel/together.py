"""What ranks that share a model tell each other between two steps of continuous batching.

All ranks run the same engine over the same requests: who takes which row, page and place in a step follows from the
requests and from the ids that are drawn, and from nothing that one rank alone knows. So only what comes from outside is
told, by the first rank, before the step in which all take it in. Where nothing came, that is a few numbers.
"""

import io
import pickle
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from accel.errors import RanksApart, reason_of, told
from accel.llm.batching.answers import finish
from accel.llm.batching.ending import Stop
from accel.llm.batching.request import Request
from accel.llm.batching.submission import stand_in
from accel.parallel.lockstep import Lockstep

PLACE = "generate_batch"
UNFIT, ENDED = 1, 2  # what may be wrong on a rank: it could run no step now; its loop has ended by an error


class Settings(Protocol):
    """How tokens are chosen where a request does not say; see `accel.llm.batching.sampling.SamplingDefaults`."""

    def request(self, prompt: list[int], max_new_tokens: int | None, eos_token_id: Any, **given: Any) -> Any: ...


class Surveyed(Protocol):
    """What ranks ask their engines before a step; see `accel.llm.batching.engine.Engine`."""

    @property
    def busy(self) -> bool: ...
    def survey(self) -> tuple[str, bool]: ...
    def forget(self) -> None: ...


class Turn(NamedTuple):
    """What a loop takes in between two steps. added: requests; cancelled: ids; refused: requests that have failed
    before an engine saw them; how: how soon the loop is to end; pausing: whether no step may run.
    """

    added: Sequence[Request] = ()
    cancelled: Sequence[str] = ()
    refused: Sequence[Request] = ()
    how: Stop = Stop.NO
    pausing: bool = False


class Alone:
    """A loop that no other follows."""

    leads = True
    settings: Settings

    def free(self) -> None:
        """Nothing stands against an engine."""

    def begin(self) -> None:
        """The loop has begun."""

    def meet(self, turn: Turn, engine: Any) -> Turn:
        """What is to be taken in."""
        return turn

    def end(self, error: BaseException | None) -> None:
        """The loop has ended, by this error if by one."""


class Together:
    """Loops of the ranks that share a model, which meet before every step.

    settings: of this rank's requests, which may have processors that only the rank itself can make.
    """

    settings: Settings

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
        """Lets the others know of an error that they have not heard of. Raises nothing."""
        try:
            if error is not None and not self.over and self.lockstep.ways.whole:
                self.over = True
                self.lockstep.most((0, 0, 0, ENDED, 0))
                self.lockstep.reasons(told(error))
        except RanksApart as worse:
            told(worse)
        finally:
            self.lockstep.ranks.taken, self.lockstep.ranks.paused = "", False

    def meet(self, turn: Turn, engine: Surveyed) -> Turn:
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


def family(request: Request) -> list[Request]:
    """A request, and what stands for its children until the engine has made them."""
    return [request, *(stand_in(request, number) for number in range(request.children))]


def failed(requests: Iterable[Request], reason: str) -> list[Request]:
    """All of them, ended for this reason."""
    return [finish(one, reason) for one in requests]


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
