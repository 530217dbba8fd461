"""Layers on several devices: where they are placed, and stretches of them in one process."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_submodules,
)

import accel
from accel.errors import PatchConflict
from accel.libraries.hooks import HOOK
from accel.llm.pipeline.device_hooks import moved_to
from accel.llm.pipeline.forward import SpreadForward
from accel.llm.pipeline.placement import Placement, layer_placement
from accel.llm.pipeline.stretch import ChainedStep, ReadKeywords, Stale, Stretch, StretchGraphs, Unchained
from support.llm.families import layers, make, padded
from support.llm.outputs import generate, same
from support.patched import fast_forwards, sites
from support.spread import DEVICES, spread
from support.state import assert_same_state, snapshot


class Loud(ModelHook):
    pass


class Alike(AlignDevicesHook):
    """As its base, for all anybody knows."""


def reason_of(model) -> str:
    return sites(model, "language model")[""][1]


def test_restore_is_exact():
    model = spread(make("llama", num_hidden_layers=4))
    before = snapshot(model)
    accel.optimize(model)
    assert fast_forwards(model)
    inside = [m for layer in layers(model).values() for m in layer.modules() if m is not layer]
    assert not any(HOOK in vars(module) for module in inside)
    assert all(HOOK in vars(layer) for layer in layers(model).values())
    generate(model, *padded((5, 3)))
    accel.restore(model)
    assert_same_state(before, snapshot(model))


def test_stretches():
    a, b = DEVICES
    found = Placement((), (a, a, b, a, a))
    assert found.stretches() == [range(2), range(2, 3), range(3, 5)]
    assert found.description() == "layers 0-1 on cpu, 2-2 on cpu:0, 3-4 on cpu"


def test_without_hooks_there_is_nothing_to_place():
    assert layer_placement(make("llama")) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: add_hook_to_module(m.model.norm, Loud()), "of another kind, Loud, on model.norm"),
        (
            lambda m: add_hook_to_module(m.model.layers[0], Alike(execution_device="cpu")),
            "of another kind, Alike, on model.layers.0",
        ),
        (
            lambda m: add_hook_to_module(m.lm_head, SequentialHook(Loud(), Loud())),
            "of another kind, SequentialHook, on lm_head",
        ),
        (lambda m: setattr(m.lm_head._hf_hook, "execution_device", None), "names no device, on lm_head"),
        (
            lambda m: setattr(m.lm_head._hf_hook, "execution_device", 0),
            "another device than its weights are on, on lm_head",
        ),
        (lambda m: setattr(m._hf_hook, "io_same_device", False), "gives its logits back"),
        (lambda m: setattr(m.model.layers[1]._hf_hook, "io_same_device", True), "model.layers.1 has no hook"),
        (
            lambda m: setattr(m.model.layers[1].mlp.up_proj._hf_hook, "execution_device", DEVICES[0]),
            "model.layers.1 is on several devices",
        ),
        (lambda m: setattr(m.lm_head, "_old_forward", torch.nn.Identity()), "around a replaced forward, on lm_head"),
    ],
)
def test_other_hooks_stay_and_the_model_is_stock(change, reason):
    model = spread(make("llama"), first=1)
    change(model)
    before = snapshot(model)
    accel.optimize(model)
    assert reason in reason_of(model)
    assert not isinstance(vars(model)["forward"], SpreadForward)
    accel.restore(model)
    assert_same_state(before, snapshot(model))


def test_offloaded_weights_stay_stock(tmp_path):
    stock = make("llama")
    ours = copy.deepcopy(stock)
    where = {"model.layers.1": "disk"} | dict.fromkeys(
        ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
    )
    dispatch_model(ours, where, main_device="cpu", offload_dir=str(tmp_path))
    accel.optimize(ours)
    assert "loads offloaded weights, on model.layers.1" in reason_of(ours)
    same(generate(ours, *padded((5, 3))), generate(stock, *padded((5, 3))))


def test_weights_offloaded_later():
    stock = make("llama")
    ours = accel.optimize(spread(copy.deepcopy(stock), first=1))
    remove_hook_from_submodules(ours)
    cpu_offload(ours, execution_device=torch.device("cpu"))
    same(generate(ours, *padded((5, 3))), generate(stock, *padded((5, 3))))


def test_hooks_that_are_taken_off_later_stay_off():
    stock = make("llama", num_hidden_layers=4)
    ours = accel.optimize(spread(copy.deepcopy(stock)))
    remove_hook_from_submodules(ours)
    same(generate(ours, *padded((5, 3))), generate(stock, *padded((5, 3))))
    accel.restore(ours)
    assert not any(HOOK in vars(module) for module in ours.modules())
    assert not fast_forwards(ours)


def test_a_hook_put_on_later_is_not_thrown_away():
    stock = make("llama", num_hidden_layers=4)
    ours = accel.optimize(spread(copy.deepcopy(stock)))
    norm = ours.model.layers[3].input_layernorm
    add_hook_to_module(norm, Loud())
    same(generate(ours, *padded((5, 3))), generate(stock, *padded((5, 3))))
    assert any("hook" in reason for _, reason, _ in accel.report(ours).fallbacks)
    with pytest.raises(PatchConflict, match="a hook was put on a LlamaRMSNorm"):
        accel.restore(ours)


def test_brought():
    a, b = torch.ones(2), torch.zeros(1)
    given = {"x": (a, [b, 3]), "y": None}
    assert moved_to(given, DEVICES[0]) is given
    moved = moved_to(given, DEVICES[1])
    assert moved["x"][0] is not a and torch.equal(moved["x"][0], a) and moved["x"][1][1] == 3 and moved["y"] is None
    assert type(moved["x"]) is tuple and type(moved["x"][1]) is list


class Runner:
    """A graph per variant, from its second call on; `looks` counts the calls in which it looks at its module."""

    def __init__(self):
        self.graphs: dict = {}
        self.looks = self.replays = 0
        self.gone, self.fingerprint = False, SimpleNamespace(versions=lambda: 1)

    def begin(self, args, kwargs, variant, at_once=True):
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


@pytest.mark.parametrize("case", ["all replayed", "one never replayed", "weights whose changes nobody counts"])
def test_a_step_is_trusted_where_all_was_replayed_and_computed_again_where_it_is_stale(graphs, case):
    if case == "weights whose changes nobody counts":
        graphs.runners[0].fingerprint = SimpleNamespace(versions=lambda: None)
        for number in (0, 0, 0, 1):
            replay(graphs, number, object())
    else:
        graphs.held = [object(), object() if case == "all replayed" else None]
    asked = []

    def eager(*args, graphs, variant, trusted=False):
        asked.append(trusted)
        if trusted:
            raise Stale
        return "looked"

    assert graphs(eager, (), {}, trusted=True) == "looked"
    assert asked == ([True, False] if case == "all replayed" else [False])


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
    moved_to = []
    called = ReadKeywords({"cos": 1, "mask": 2}, lambda value: moved_to.append(value) or value)
    assert called["cos"] == 1 and called.get("absent", 5) == 5 and called.get("cos") == 1
    assert moved_to == [1, 1] and called.read == {"cos"}
