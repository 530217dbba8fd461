"""What waits for what on several GPUs, told by streams that only note it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from accel.llm.batching import spread
from accel.llm.batching.spread import MicroBatchStreams, Shared

CARDS = tuple(torch.device("cuda", number) for number in range(2))


class Stream:
    """Work in order. before: what is done before whatever comes next; done: by name what each work came behind."""

    def __init__(self, device, done):
        self.device, self.done, self.before = device, done, frozenset()

    def work(self, name):
        self.done[name] = self.before
        self.before |= {name}

    def wait_stream(self, other):
        self.before |= other.before

    def wait_event(self, event):
        self.before |= event.before


class Event:
    before = frozenset()

    def record(self, stream):
        self.before = stream.before


class Cuda:
    """In place of torch.cuda: a current stream a device, and a current device."""

    def __init__(self):
        self.done: dict[object, frozenset] = {}
        self.current = {card: Stream(card, self.done) for card in CARDS}
        self.number = 0
        self.Event = Event

    def Stream(self, device):  # noqa: N802
        return Stream(device, self.done)

    def current_stream(self, device):
        return self.current[device]

    def current_device(self):
        return self.number

    @contextmanager
    def device(self, number):
        before, self.number = self.number, number
        yield
        self.number = before

    @contextmanager
    def stream(self, stream):
        before, self.current[stream.device] = self.current[stream.device], stream
        with self.device(stream.device.index):
            yield
        self.current[stream.device] = before


@pytest.fixture
def cuda(monkeypatch):
    found = Cuda()
    monkeypatch.setattr(spread, "torch", SimpleNamespace(cuda=found, device=torch.device))
    spread._stream.cache_clear()
    yield found
    spread._stream.cache_clear()


def moved(cuda, source, target):
    """As torch copies from card to card: the current streams of both wait for each other."""
    cuda.current[target].wait_stream(cuda.current[source])
    cuda.current[source].wait_stream(cuda.current[target])


def step(cuda, streams, number):
    """Through both cards; ids are drawn on the second and brought to where the next step of the group begins."""
    with streams.use(number % 2):
        assert cuda.number == 0
        moved(cuda, CARDS[1], CARDS[0])
        cuda.current[CARDS[0]].work(("words", number))
        for card in CARDS:
            if card.index:
                moved(cuda, CARDS[0], card)
            with streams.turn(card, Shared.KV_CACHE):
                cuda.current[card].work((card.index, number))
        with streams.turn(CARDS[1], Shared.DRAWS):
            cuda.current[CARDS[1]].work(("draw", number))


def test_what_a_step_waits_for(cuda):
    streams, done = MicroBatchStreams((*CARDS, CARDS[0]), 2), cuda.done
    outer = cuda.current[CARDS[1]]
    outer.work("weights")
    for number in range(6):
        step(cuda, streams, number)
    for number in range(1, 6):
        for card in range(2):  # blocks and tables are used in the order of steps
            assert (card, number - 1) in done[card, number]
        assert ("draw", number - 1) in done["draw", number]
        # The first card does not wait for the second, which has the step before.
        assert (1, number - 1) not in done[0, number] and ("draw", number - 1) not in done[0, number]
    for number in range(2, 6):
        assert ("draw", number - 2) in done["words", number]
        assert (0, number - 1) not in done["words", number]
    # All come behind what the caller began before, and before what he does once they are joined.
    assert cuda.current[CARDS[1]] is outer and cuda.number == 0
    assert "weights" in done[1, 0] and (1, 0) not in outer.before
    streams.join()
    outer.work("freed")
    assert {(1, 0), ("draw", 5)} <= done["freed"]
    assert MicroBatchStreams(CARDS, 2).streams == streams.streams  # those of the next engine
    assert len({id(one) for row in streams.streams for one in row}) == 4


def test_one_group_has_the_streams_of_its_caller(cuda):
    streams = MicroBatchStreams(CARDS, 1)
    with streams.use(0), streams.turn(CARDS[0], Shared.KV_CACHE):
        cuda.current[CARDS[0]].work("a")
    assert cuda.current[CARDS[0]].before == {"a"} and cuda.done == {"a": frozenset()}


def test_a_turn_in_which_something_is_raised_is_one(cuda):
    streams = MicroBatchStreams(CARDS, 2)
    with pytest.raises(ValueError), streams.use(0), streams.turn(CARDS[0], Shared.KV_CACHE):
        cuda.current[CARDS[0]].work("half")
        raise ValueError
    with streams.use(1), streams.turn(CARDS[0], Shared.KV_CACHE):
        cuda.current[CARDS[0]].work("next")
    assert "half" in cuda.done["next"]
