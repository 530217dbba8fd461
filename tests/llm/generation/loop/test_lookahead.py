"""The step that is begun early: where generate() is met for it, and what may take it."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, GenerationMixin, StoppingCriteriaList

import accel
from accel.cuda_graphs.entry import Replayed
from accel.libraries.generation import PREPARE, predictable
from accel.libraries.step_inputs import prepares_as_stock
from accel.llm.generation.loop import handover
from accel.llm.generation.loop.handover import MOST_MISSED, MOST_WAITED, Lookahead
from accel.llm.kv_cache.cache import store_of
from accel.llm.kv_cache.pending_step import PendingStep
from support.llm.families import padded, prompt
from support.noted import noted

CRITERIA = "_get_stopping_criteria"


def criteria_of(model, monkeypatch, **call) -> list:
    """The stopping criteria that the loop of one generate() call was given."""

    def given(*args, **kwargs):
        return kwargs["stopping_criteria"] if "stopping_criteria" in kwargs else args[3]

    seen: list = []
    for loop in ("_sample", "_beam_search", "_assisted_decoding"):
        noted(monkeypatch, GenerationMixin, loop, given, seen)
    ids, mask = padded((7, 4))
    model.generate(ids, attention_mask=mask, max_new_tokens=3, **call)
    return seen


@pytest.mark.parametrize(
    ("call", "begins"),
    [
        ({"do_sample": False}, True),
        ({"do_sample": True, "num_return_sequences": 2}, True),
        ({"num_beams": 2}, False),
        ({"use_cache": False}, False),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, False),
    ],
)
def test_only_where_tokens_come_one_by_one(pair_of, monkeypatch, call, begins):
    ours, stock = pair_of("llama")
    found, plain = criteria_of(ours, monkeypatch, **call)[-1], criteria_of(stock, monkeypatch, **call)[-1]
    assert type(found) is (Lookahead if begins else StoppingCriteriaList)
    assert [type(one) for one in found] == [type(one) for one in plain] and found.max_length == plain.max_length


def test_what_one_call_has_found_out_is_not_used_by_the_next(pair_of, monkeypatch):
    ours, _ = pair_of("llama")
    found = criteria_of(ours, monkeypatch)[-1]
    again = copy.deepcopy(found)
    assert type(found) is Lookahead and type(again) is StoppingCriteriaList and len(again) == len(found)
    assert type(criteria_of(ours, monkeypatch, use_cache=False)[-1]) is StoppingCriteriaList


def test_signatures_are_the_classes(pair_of):
    ours, stock = pair_of("llama")
    for name in ("_prepare_cache_for_generation", CRITERIA, PREPARE):
        assert name in vars(ours), name
        assert inspect.signature(getattr(ours, name)) == inspect.signature(getattr(stock, name))


def test_a_model_that_prepares_its_inputs_itself(pair_of):
    """Phi-3 drops its cache where its frequencies change: the step after is not known before."""
    ours, _ = pair_of("phi3")
    assert not predictable(ours) and PREPARE not in vars(ours) and CRITERIA not in vars(ours)
    replaced = accel.optimize(copy.deepcopy(pair_of("llama")[1]))
    assert predictable(replaced)
    replaced._update_model_kwargs_for_generation = lambda *args, **kwargs: None
    assert not predictable(replaced)


@pytest.mark.parametrize(("more", "attends", "alike"), [
    ({"use_cache": False}, True, False),
    ({"another": 3}, True, True),
    ({"logits_to_keep": 2}, True, True),
    ({"attention_mask": None}, True, False),
    ({"attention_mask": None}, False, True),
])  # fmt: skip
@pytest.mark.parametrize("start", [0, 99])
def test_what_a_class_adds_to_the_inputs_of_a_step(more, attends, alike, start):
    """The same at every length that its configuration could mean: of tokens as of words, of which there are 99."""
    from support.llm.families import make

    model = make("llama")
    usual = type(model).prepare_inputs_for_generation

    class Own(type(model)):
        def prepare_inputs_for_generation(self, ids, **kwargs):
            found = usual(self, ids, **kwargs)
            del found["logits_to_keep"]
            return found | (more if ids.shape[1] > start else {})

    model.__class__ = Own
    late = start and ("another" in more or "logits_to_keep" in more)
    assert prepares_as_stock(model, attends) == (alike and not late)


def test_an_instance_that_prepares_its_inputs_itself():
    from support.llm.families import make

    model = make("llama")
    own = vars(model)[PREPARE] = lambda ids, **kwargs: type(model).prepare_inputs_for_generation(model, ids, **kwargs)
    accel.optimize(model)
    assert vars(model)[PREPARE] is own and CRITERIA not in vars(model)
    accel.restore(model)
    assert vars(model)[PREPARE] is own


@pytest.mark.parametrize(
    ("outcomes", "asked"),
    [
        ("w" * 40, MOST_WAITED),
        ("v" * 40, MOST_MISSED + 1),
        ("t" * 40, 40),
        ("w" * 12 + "t" * 10, 22),
        ("vvvvt" * 5, 25),
    ],
)
def test_a_call_in_which_steps_are_not_taken_does_without(monkeypatch, outcomes, asked):
    """w: no graph for it yet, as while its products are chosen; v: in vain; t: taken."""
    left, store = iter(outcomes), Flag()
    forward = SimpleNamespace(runner="runner", mode=lambda: None, module=None)
    tries = []

    def begin(*args):
        tries.append(next(left))
        return None if tries[-1] == "w" else SimpleNamespace(taken=tries[-1] == "t")

    monkeypatch.setattr(handover, "begin", begin)
    criteria = Lookahead(StoppingCriteriaList(), forward, store)
    for _ in outcomes:
        criteria._begin(torch.ones(1, 4))
    assert len(tries) == asked


class Flag:
    """Stands for an event, or a store."""


@pytest.mark.parametrize("wrong", [None, "inputs", "length", "keep", "input_ids", "attention_mask", "position_ids"])
def test_only_the_very_inputs_take_it(wrong):
    given = {name: torch.ones(1, 1) for name in ("input_ids", "attention_mask", "position_ids")}
    asked = {name: value.clone() if name == wrong else value for name, value in given.items()}
    step = Replayed((), None, 0, torch.ones(1))
    pending = PendingStep(torch.ones(1, 4), 3, 1, step, Flag(), None if wrong == "inputs" else given)
    tensors = (asked["input_ids"], asked["position_ids"], asked["attention_mask"])
    got = pending.take(4 if wrong == "length" else 3, *tensors, 0 if wrong == "keep" else 1)
    assert (got is step) == (wrong is None) == pending.taken
    assert pending.step is None  # its logits are nobody's any more


def test_the_step_before_is_known_until_the_store_is_touched(pair_of):
    """A step must follow from the forward before, and from nothing that came after."""
    ours, _ = pair_of("llama")
    cache = DynamicCache(config=ours.config)

    def latest():
        ours(prompt(1, 5), past_key_values=cache)
        assert store_of(cache).latest is not None
        return store_of(cache)

    touches = {
        "read": lambda: cache.layers[0].keys,
        "crop": lambda: cache.crop(-1),
        "reorder": lambda: cache.reorder_cache(torch.tensor([0])),
        "write": lambda: [layer.update(*[torch.zeros(1, 2, 1, 16)] * 2) for layer in cache.layers],
    }
    for name, touch in touches.items():
        store = latest()
        touch()
        assert store.latest is None, name


def test_prepared_inputs_are_noted_for_the_ids_they_were_made_of(pair_of):
    ours, _ = pair_of("llama")
    cache = DynamicCache(config=ours.config)
    ours(prompt(1, 5), past_key_values=cache)
    ids = prompt(1, 6)
    for same in (False, True):
        pending = store_of(cache).pending = PendingStep(ids if same else ids.clone(), 5, 1, None, Flag())
        inputs = ours.prepare_inputs_for_generation(ids, past_key_values=cache, next_sequence_length=1)
        assert (pending.inputs is inputs) == same
    store_of(cache).pending = None
