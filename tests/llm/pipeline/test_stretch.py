"""Graphs of stretches: when they are looked at again, and when one is replayed without."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from accel.llm.pipeline.stretch import Called, ChainedStep, Stale, Stretch, StretchGraphs, Unchained


class Runner:
    """A graph per variant, from its second call on; `looks` counts the calls in which it looks at its module."""

    def __init__(self):
        self.graphs: dict = {}
        self.looks = self.replays = 0
        self.gone, self.fingerprint = False, SimpleNamespace(versions=lambda: 1)

    def begin(self, args, kwargs, variant):
        if self.gone or self.graphs.get(variant, 0) < 2:
            return None
        self.replays += 1
        return SimpleNamespace(outputs="replayed")

    def __call__(self, run, args, kwargs, variant):
        self.looks += 1
        self.graphs[variant] = self.graphs.get(variant, 0) + 1
        return run(*args)


def stretch_of(count: int) -> Stretch:
    layers = [SimpleNamespace(path=f"layers.{n}", kernels=None, bound=add(n + 1)) for n in range(count)]
    return Stretch(layers, torch.device("cpu"))


def add(number):
    return lambda kernels, step, x, kwargs: x + number * kwargs["cos"]


class Stores:
    def metadata(self, stretch):
        return (torch.zeros(1),)

    def turn(self, stretch):
        return nullcontext()

    def kvs(self, stretch, x, metadata):
        return {}


@pytest.fixture
def graphs():
    found = StretchGraphs([], None, None, keep=False)
    found.stretches = [stretch_of(2), stretch_of(1)]
    found.runners = [Runner(), Runner()]
    found.held, found.ways = [None, None], [{}, {}]
    return found


def replay(graphs, number, seen, places=({"cos": 0},)):
    return graphs.replay(graphs.stretches[number], lambda: "eager", (), (), list(places), seen)


def test_a_model_that_was_looked_at_is_replayed_at_once(graphs):
    first, second = object(), object()
    runner = graphs.runners[0]
    assert [replay(graphs, 0, first) for _ in range(4)] == ["eager", "eager", "replayed", "replayed"]
    assert (runner.looks, runner.replays) == (2, 2)
    assert replay(graphs, 0, second) == "eager" and runner.looks == 3  # another model: the runner looks itself
    assert replay(graphs, 0, second) == "replayed"


def test_without_a_look_there_must_be_a_graph(graphs):
    seen = object()
    with pytest.raises(Stale):
        replay(graphs, 0, None)
    for _ in range(2):
        replay(graphs, 0, seen)
    assert replay(graphs, 0, None) == "replayed"
    graphs.runners[0].gone = True
    with pytest.raises(Stale):
        replay(graphs, 0, None)


def test_over_weights_whose_changes_nobody_counts_every_step_looks(graphs):
    graphs.runners[0].fingerprint = SimpleNamespace(versions=lambda: None)
    seen = object()
    for _ in range(3):
        replay(graphs, 0, seen)
    replay(graphs, 1, seen)
    assert graphs(lambda *args, graphs, variant, trusted: trusted, (), {}, trusted=True) is False


def test_a_stale_step_is_computed_again_with_a_look(graphs):
    graphs.held = [object(), object()]
    asked = []

    def eager(*args, graphs, variant, trusted=False):
        asked.append(trusted)
        if trusted:
            raise Stale
        return "looked"

    assert graphs(eager, (), {}, trusted=True) == "looked" and asked == [True, False]


def test_a_stretch_that_was_never_replayed_is_looked_at(graphs):
    graphs.held = [object(), None]
    assert graphs(lambda *args, graphs, variant, trusted: trusted, (), {}, trusted=True) is False


def test_layers_that_are_handed_other_things_have_a_graph_of_their_own(graphs):
    seen = object()
    for places in (({"cos": 0}, {"cos": 0}), ({"cos": 0}, {"cos": 1})):
        assert [replay(graphs, 0, seen, places) for _ in range(3)] == ["eager", "eager", "replayed"]
    replay(graphs, 1, seen)
    assert len(graphs.runners[0].graphs) == 2 and graphs.runners[1].looks == 1


def chained(read=frozenset({"cos"})):
    stretch = stretch_of(3)
    stretch.read = read
    return stretch, ChainedStep(Stores(), None, (), None)


def test_the_last_layer_computes_for_all():
    stretch, step = chained()
    one, two, three = stretch.layers
    x, cos, other = torch.zeros(1, 1, 2), torch.ones(2), torch.full((2,), 10.0)
    assert step.passes(one, x, {"cos": cos}) is x and step.passes(two, x, {"cos": other}) is x
    assert torch.equal(step.passes(three, x, {"cos": cos}), torch.full((1, 1, 2), 1 + 20 + 3.0))
    assert not step.calls


@pytest.mark.parametrize("case", ["another input", "a layer left out", "the second first", "a layer twice"])
def test_layers_that_are_not_chained(case):
    stretch, step = chained()
    one, two, three = stretch.layers
    x, given = torch.zeros(1, 1, 2), {"cos": torch.ones(2)}
    with pytest.raises(Unchained):
        if case == "the second first":
            step.passes(two, x, given)
        step.passes(one, x, given)
        if case == "a layer twice":
            step.passes(one, x, given)
        if case == "a layer left out":
            step.passes(three, x, given)
        step.passes(two, x.clone(), given)


def test_what_is_read_is_brought_when_it_is_read():
    brought = []
    called = Called({"cos": 1, "mask": 2}, lambda value: brought.append(value) or value)
    assert called["cos"] == 1 and called.get("absent", 5) == 5 and called.get("cos") == 1
    assert brought == [1, 1] and called.read == {"cos"}
