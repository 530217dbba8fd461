"""generate_batch of models that accelerate has spread over devices: groups of requests, each in another stretch."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList

import accel
from accel.errors import Unfit
from accel.libraries.hooks import HOOK
from accel.llm.batching import limits
from accel.llm.batching.limits import Limits
from accel.llm.batching.sampling import Sampling
from accel.llm.batching.spread import SpreadStepRunner
from accel.llm.batching.step import LaunchedStep
from accel.llm.batching.trial import refusal
from accel.llm.generation.decoder import DecoderForward
from accel.llm.kv_cache.layer_sets import layer_sets
from accel.llm.kv_cache.paged_kv_cache import block_bytes
from accel.llm.pipeline.stretch import Stretch, StretchStep
from support.llm.batching.engines import (
    alone,
    as_alone,
    engine_of,
    finished,
    forward_of,
    prompts_of,
    request,
    requests,
)
from support.llm.families import layers, make
from support.noted import fails_at, noted
from support.spread import DEVICES, hand_another, pair, spread
from support.state import assert_same_state, snapshot

LENGTHS, NEWS = (1, 5, 64, 17, 100, 40), (9, 28, 1, 5, 12, 7)
FAMILIES = ("gpt2", "gemma2", "gpt-neox", "phi3", "qwen3", "mixtral", "bloom", "gpt-oss")
SIZE = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)


def batch(model, prompts, **given) -> list[list[int]]:
    config = GenerationConfig(**({"max_new_tokens": 6, "eos_token_id": -1, "pad_token_id": 0} | given))
    outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=SIZE)
    assert [one.error for one in outputs.values()] == [None] * len(outputs)
    return [one.generated_tokens for one in outputs.values()]


class Happened(list):
    """In turn: (a group's number, rows) of each step launched, devices of stretches, and groups whose ids were read."""

    def __init__(self, monkeypatch):
        super().__init__()
        noted(
            monkeypatch,
            SpreadStepRunner,
            "launch",
            lambda _, plan, *rest: (plan.micro_batch, set(plan.rows.tolist())),
            self,
        )
        noted(monkeypatch, Stretch, "run", lambda stretch, *rest: stretch.device, self)
        noted(monkeypatch, LaunchedStep, "read", lambda step: step.plan.micro_batch, self)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    ours, stock = pair(name)
    assert refusal(forward_of(ours)) is None
    asked = requests(LENGTHS, NEWS)[1:5]
    asked = [replace(one, prompt=one.prompt[:40], max_new_tokens=5) for one in asked]
    engine = engine_of(ours, tokens=30)
    finished(engine, asked)
    as_alone(stock, asked)
    assert engine.micro_batches.count == 2 and forward_of(ours).chained


def test_stretches_work_on_different_groups(both, monkeypatch):
    """Each step goes through all stretches; before its ids are read, one of the other group's requests is launched."""
    ours, stock = both
    asked = requests((9, 5, 7, 3), 8)
    engine, happened = engine_of(ours), Happened(monkeypatch)
    finished(engine, asked)
    groups = ({0, 1}, {2, 3})
    step = [[(lane, rows), *DEVICES] for lane, rows in enumerate(groups)]
    # Both prompts of a group in a step, then tokens; as many launched and not read as there are stretches.
    assert happened == [*step[0], *step[1], *([*step[0], 0, *step[1], 1] * 7), 0, 1]
    as_alone(stock, asked)


class Replays:
    """In place of graphs of stretches: computes what is there, of the size that the graphs have."""

    def __init__(self):
        self.sizes, self.trusted = [], 0

    def __call__(self, eager, args, kwargs, variant, trusted):
        self.sizes.append((args[0].shape[1], *variant[1:]))
        self.trusted += trusted
        return eager(*args, graphs=None, variant=variant, trusted=trusted)


def test_steps_of_the_sizes_of_graphs(both):
    """What fills them up is nobody's. Steps with more tokens than on one device are replayed too."""
    ours, stock = both
    engine, rows_of_heads = engine_of(ours, rows=40, tokens=2048, blocks=100), []
    draw = engine.sampler.draw
    engine.sampler.draw = lambda logits, *rest: (rows_of_heads.append(len(logits)), draw(logits, *rest))[1]
    engine.steps.runner = replays = Replays()
    asked = requests((59,) * 38, 4)
    finished(engine, asked)
    as_alone(stock, asked[::9])
    assert replays.sizes == [(1280, 40, 32)] * 2 + [(24, 24, 0)] * 6
    assert rows_of_heads == [24] * 8  # which are in no graph, so that no more logits are computed than are wanted
    assert replays.trusted == len(replays.sizes) - 1


def test_the_host_waits_for_ids_of_one_group_alone_where_it_must_know_them(both, monkeypatch):
    ours, _ = both

    def forbids(ids, scores):
        return scores.index_fill(1, ids[0, -1:], -torch.inf)

    host = Sampling(host=LogitsProcessorList([forbids]))
    asked = requests((9, 5), 4, sampling=host)
    engine, happened = engine_of(ours), Happened(monkeypatch)
    finished(engine, asked)
    order = [one for one in happened if isinstance(one, int | tuple)]
    assert order == [(0, {0}), (1, {1}), *[0, (0, {0}), 1, (1, {1})] * 3, 0, 1]
    assert all(a != b for one in asked for a, b in zip([one.prompt[-1], *one.tokens], one.tokens, strict=False))


def test_requests_go_to_the_group_that_has_less(both):
    ours, stock = both
    engine = engine_of(ours, rows=7)
    asked = requests((4,) * 9, [12, 3] * 4 + [12])
    for one in asked[:3]:
        engine.add(one)
    counts = []
    while engine.busy:
        engine.step()
        counts.append(tuple(engine.rows.size_of(lane) for lane in range(2)))
        if len(counts) == 3:
            for one in asked[3:]:
                engine.add(one)
    assert counts[1] == (2, 1) and max(map(sum, counts)) == 7
    assert max(max(one) for one in counts) <= 4
    as_alone(stock, asked)


@pytest.mark.turns(2)
def test_three_stretches_two_of_them_on_one_device(monkeypatch):
    stock = make("llama", num_hidden_layers=4)
    ours = spread(copy.deepcopy(stock), first=1)
    for layer in list(layers(ours).values())[2:]:
        for module in layer.modules():
            if HOOK in vars(module):
                vars(module)[HOOK].execution_device = DEVICES[0]
    accel.optimize(ours)
    asked, engine, happened = requests(LENGTHS, NEWS), engine_of(ours, rows=6), Happened(monkeypatch)
    finished(engine, asked)
    as_alone(stock, asked)
    assert engine.micro_batches.count == 3 and {one[0] for one in happened if isinstance(one, tuple)} == {0, 1, 2}
    assert [one for one in happened if isinstance(one, torch.device)][:3] == [DEVICES[0], DEVICES[1], DEVICES[0]]


def test_pages_lie_with_their_layers(both):
    ours, _ = both
    engine = engine_of(ours)
    pages = engine.kv_cache
    assert list(pages.tables) == list(DEVICES)
    assert [len(several[0]) for several in pages.by_device.values()] == [2, 2]
    tables = [pages.tables[device].tables.data_ptr() for device in DEVICES]
    assert [pages.kv(layer).table.data_ptr() for layer in range(4)] == [tables[0]] * 2 + [tables[1]] * 2
    engine.add(request("a", range(1, 70), 3))
    for _ in range(2):
        engine.step()
    assert torch.equal(*(place.tables for place in pages.tables.values())) and tables[0] != tables[1]


def test_the_device_with_the_least_memory_bounds_the_pages(both, monkeypatch):
    ours, _ = both
    shapes = forward_of(ours).shapes()
    sets = layer_sets(shapes, [None] * 4)
    part = block_bytes(shapes, sets, DEVICES[1])
    assert 2 * part == block_bytes(shapes, sets)
    free = {DEVICES[0]: 100 * part, DEVICES[1]: 10 * part}
    monkeypatch.setattr(limits, "free_bytes", free.__getitem__)
    assert Limits(memory=1.0).block_count(shapes, sets) == 10
    free[DEVICES[1]] = part
    with pytest.raises(torch.OutOfMemoryError, match="free on cpu:0 is less"):
        Limits(memory=1.0).block_count(shapes, sets)


def test_generate_batch(both):
    ours, stock = both
    prompts = prompts_of(LENGTHS, 99)
    assert batch(ours, prompts) == [alone(stock, prompt, 6) for prompt in prompts]
    report = accel.report(ours)
    assert report.fallbacks == [] and report.batching[0]["pages"] == 8 * 4 + 1 and report.batching[0]["groups"] == 2


@pytest.mark.parametrize("options", [{}, {"kv_cache": "int8"}])
@pytest.mark.turns(4)
def test_draws_are_those_of_one_device(both, options):
    _, stock = both
    ours, one = accel.optimize(spread(copy.deepcopy(stock)), **options), accel.optimize(copy.deepcopy(stock), **options)
    prompts, found = prompts_of((20, 9, 70), 99), []
    given = {"do_sample": True, "top_k": 20, "temperature": 0.9, "repetition_penalty": 1.2}
    for model in (ours, one):
        torch.manual_seed(5)
        asked = [one.with_children(2) for one in requests(LENGTHS, NEWS, sampling=Sampling(temperature=0.9, seed=3))]
        ended = finished(engine_of(model, rows=5, blocks=40), asked)  # further answers begin with the first's pages
        answers = {request.id: request.tokens for request in ended}
        found.append((batch(model, prompts, **given), batch(model, prompts), answers))
    assert found[0] == found[1] and len(found[0][2]) == 3 * len(LENGTHS)
    assert found[0][0] != found[0][1] and not accel.report(ours).fallbacks


def test_streams_and_cancellations(both):
    ours, stock = both
    config = GenerationConfig(max_new_tokens=40, eos_token_id=-1, pad_token_id=0)
    prompts = prompts_of((9, 5, 30), 99)
    manager = ours.init_continuous_batching(generation_config=config, continuous_batching_config=SIZE)
    manager.start()
    try:
        names = [manager.add_request(prompt, streaming=True) for prompt in prompts]
        seen = {name: [] for name in names}
        manager.cancel_request(names[1])
        while not all(seen[name] and seen[name][-1].is_finished() for name in names):
            output = manager.get_result(timeout=20)
            seen[output.request_id].append(output)
        with manager.pause():
            assert manager.engine.launched is not None
    finally:
        manager.stop(block=True)
    for place in (0, 2):
        outputs = seen[names[place]]
        wanted = alone(stock, prompts[place], 40)
        assert [one.generated_tokens for one in outputs] == [wanted[: i + 1] for i in range(40)]
    assert "cancelled" in seen[names[1]][-1].error


def test_a_step_that_fails_ends_its_own_requests(both, monkeypatch):
    ours, stock = both
    asked = requests(LENGTHS, NEWS)[:4]
    # The fourth is of the second group's prompts, on the second device.
    fails_at(monkeypatch, 4, Stretch, "run", RuntimeError, "no such luck")
    finished(engine_of(ours), asked)
    failed = [one for one in asked if one.error is not None]
    assert failed and all("no such luck" in one.error for one in failed)
    as_alone(stock, [one for one in asked if one.error is None])
    assert len(failed) < 4


def test_where_something_is_done_between_layers_stock_batches(monkeypatch):
    ours = accel.optimize(spread(make("llama", num_hidden_layers=4)))
    hand_another(monkeypatch, ours)
    assert "does not hand each layer what the one before gave" in refusal(forward_of(ours))
    assert not forward_of(ours).chained


def test_a_step_before_layers_have_been_read_says_nothing_of_later_ones(both, monkeypatch):
    forward = forward_of(both[0])
    monkeypatch.setattr(forward.stretches[0], "read", None)
    with pytest.raises(Unfit):
        forward.over_stores(None, None, None, 1)
    assert forward.chained


def test_devices_of_several_kinds(both, monkeypatch):
    ours, _ = both
    monkeypatch.setattr(forward_of(ours).stretches[1], "device", SimpleNamespace(type="cuda"))
    assert "devices of several kinds" in refusal(forward_of(ours))


def test_a_step_is_never_computed_layer_by_layer(both, monkeypatch):
    """Which would wait for its turn with half of a stretch done."""
    ours, stock = both
    engine = engine_of(ours)
    monkeypatch.setattr(StretchStep, "passes", None)
    monkeypatch.setattr(DecoderForward, "fast", None)
    asked = [request("a", [5, 6, 7], 4)]
    finished(engine, asked)
    as_alone(stock, asked)


def test_restore_is_exact_and_ends_what_runs():
    ours = spread(make("llama", num_hidden_layers=4))
    before = snapshot(ours)
    accel.optimize(ours)
    batch(ours, [[5, 6, 7]])
    manager = ours.init_continuous_batching(continuous_batching_config=SIZE)
    manager.start()
    name = manager.add_request([3, 4], max_new_tokens=200)
    accel.restore(ours)
    assert not manager.is_running()
    output = manager.get_result(timeout=5)
    assert output.request_id == name and "no longer optimized" in output.error
    assert_same_state(before, snapshot(ours))
