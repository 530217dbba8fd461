"""States of rows in the store and in a DynamicCache: stock layers of linear attention are given the same."""

import copy
import pickle

import pytest
import torch
from accel_kernels.attention.paged.kv import EACH, FIRSTS, LAYERS, TABLE
from accel_kernels.attention.paged.kv_quantization import restored, rounded
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from accel.llm.kv_cache.cache import adopt, store_of, tokens_in
from accel.llm.kv_cache.shape import BLOCK, StateShape, cache_layers
from accel.llm.kv_cache.state_layer import StateLayer
from accel.llm.kv_cache.store import RowSelection, Store
from support.llm.kv_cache.row_states import (
    BOTH,
    KEYS,
    KINDS,
    MATRIX,
    WINDOW,
    forward,
    fresh,
    poisoned,
    same_states,
    states_in,
    write,
)


def stock_cache(shapes) -> DynamicCache:
    cache, number = DynamicCache(), cache_layers(shapes)
    cache.layers = [
        LinearAttentionLayer() if isinstance(one, StateShape) else DynamicLayer() for one in shapes[:number]
    ]
    for at, one in enumerate(shapes[number:]):
        if one.keeps:
            cache.layers[at] = LinearAttentionAndFullAttentionLayer()
    cache.layer_class_to_replicate = None
    return cache


def feed(cache, shapes, new) -> None:
    """As a stock forward. A state becomes half of what it was and the new one."""
    for at, (one, (first, second)) in enumerate(zip(shapes, new, strict=True)):
        layer = at % cache_layers(shapes)
        if not one.keeps:
            continue
        if not isinstance(one, StateShape):
            if one.kv_dtype is not None:
                first, second = (restored(*rounded(t, one.kv_dtype), one.dtype) for t in (first, second))
            cache.update(first, second, layer)
            continue
        before = cache.layers[layer].recurrent_states[0]
        if first is not None:
            cache.update_conv_state(first, layer, conv_kernel_size=one.window[0])
        if second is not None:
            cache.update_recurrent_state(second if before is None else before / 2 + second, layer)


def same(ours, stock, shapes) -> None:
    mine = copy.deepcopy(ours)
    if not all(isinstance(one, StateShape) for one in shapes):
        assert mine.get_seq_length() == stock.get_seq_length()
    for at, one in enumerate(shapes):
        a, b = (cache.layers[at % cache_layers(shapes)] for cache in (mine, stock))
        if not isinstance(one, StateShape):
            assert not one.keeps or b.keys is None or not b.get_seq_length() or torch.equal(a.keys, b.keys)
            continue
        names = ("number_of_states", "has_previous_state", "is_conv_states_initialized", "conv_kernel_size")
        names = (*names, "is_recurrent_states_initialized", "record_past")
        assert isinstance(a, LinearAttentionLayer) and a.is_croppable == b.is_croppable
        for name in names if b.has_previous_state[0] else names[:2]:
            found = getattr(a, name)
            assert (dict(found) if name not in ("number_of_states", "record_past") else found) == getattr(b, name), name
        for name in ("conv_states", "recurrent_states"):  # and then it is a stock layer
            x, y = getattr(a, name)[0], getattr(b, name)[0]
            assert not b.has_previous_state[0] or (x is y is None) or (torch.equal(x, y) and x.dtype == y.dtype)
        assert type(a) is type(b) and not isinstance(a, StateLayer) and vars(a).keys() == vars(b).keys()


FAST = ("fast", "again", "back")
step = st.one_of(
    st.tuples(st.sampled_from(["stock", "fast", "fast", "again", "back"]), st.sampled_from([1, 1, 2, 5, BLOCK + 1])),
    st.tuples(st.sampled_from(["reorder", "reorder one"]), st.lists(st.integers(0, 99), min_size=4, max_size=4)),
    st.tuples(st.sampled_from(["deepcopy", "pickle", "edit", "crop", "reset", "look", "grow"]), st.none()),
)


@pytest.mark.parametrize("kind", ["mixed", "latents", "int8", "windows", "states", "pairs", "one pair"])
@settings(deadline=None, derandomize=True, max_examples=40)
@given(rows=st.integers(1, 3), steps=st.lists(step, min_size=2, max_size=10))
def test_a_schedule_of_calls_leaves_what_it_leaves_in_a_stock_cache(kind, rows, steps):
    torch.manual_seed(0)
    shapes, (ours, stock) = KINDS[kind], (stock_cache(KINDS[kind]) for _ in range(2))
    number = cache_layers(shapes)
    states = [layer % number for layer, one in enumerate(shapes) if isinstance(one, StateShape)]
    assert store_of(ours) is None and not isinstance(adopt(ours, shapes), str)
    for name, what in [("fast", 2), *steps]:
        store = adopt(ours, shapes)
        if isinstance(store, str):  # the length of a text is known where it has keys
            assert kind in ("windows", "states") and store == "states of a text of unknown length"
            name = "stock" if name in FAST else name
        if name in FAST:
            assert store_of(ours) is store and tokens_in(ours) == store.length
            store.reserve(rows, store.length + what)
            if not store.length:
                poisoned(store)
            store.set_padding_mask(None)
            if name == "again":  # as a graph is captured, or a step launched that nobody wants
                forward(store, what)
            elif name == "back":
                before = store.length
                write(store, 3 - what % 2)
                store.crop(before)
            feed(stock, shapes, write(store, what))
        elif name == "stock":
            new = fresh(shapes, rows, what)
            for cache in (ours, stock):
                feed(cache, shapes, new)
            assert not any(isinstance(ours.layers[layer], StateLayer) for layer in states)
        elif name.startswith("reorder"):
            index = torch.tensor([i % rows for i in what[:rows]])
            for cache in (ours, stock):
                (cache if name == "reorder" else cache.layers[states[-1]]).reorder_cache(index)
            assert name != "reorder" or isinstance(store, str) or store_of(ours)
        elif name == "deepcopy":
            ours = copy.deepcopy(ours)
        elif name == "pickle":
            ours = pickle.loads(pickle.dumps(ours))
        elif name == "edit" and stock.layers[states[0]].has_previous_state[0]:
            for cache in (ours, stock):
                cache.layers[states[0]].conv_states[0][..., -1] += 1
        elif name == "crop":
            errors = []
            for cache in (ours, stock):
                with pytest.raises(RuntimeError) as error:
                    cache.layers[states[0]].crop(-1)
                errors.append(str(error.value))
            assert errors[0] == errors[1]
        elif name == "reset":
            ours.reset()
            ours, stock = (ours if store_of(ours) else stock_cache(shapes)), stock_cache(shapes)
        elif name == "look":
            for cache in (ours, stock):
                assert cache.has_previous_state() == stock.has_previous_state() and cache.get_max_length() == -1
            assert isinstance(store, str) or store_of(ours)
        elif name == "grow" and not isinstance(store, str):
            store.reserve(rows, store.length + 200)
        same(ours, stock, shapes)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_states_stay_where_they_are_until_the_number_of_rows_changes(kind):
    store = Store(kind)
    store.reserve(2, 3)
    assert store.rows == 2 and store.length == 0
    poisoned(store)
    store.set_padding_mask(torch.tensor([[0, 1, 1], [1, 1, 1]]))
    write(store, 3)

    def places() -> list:
        states = [layer for layer, one in enumerate(kind) if isinstance(one, StateShape)]
        begins = [(layer, LAYERS + EACH * layer) for layer in states]
        return [store.metadata_on(kind[layer].device)[begin : begin + EACH].tolist() for layer, begin in begins]

    before, kept = places(), states_in(store)
    store.reserve(2, 5 * BLOCK)
    store.choose(RowSelection("reorder", torch.tensor([1, 0])))
    after = places()
    states = store.kvs(list(kept), 1)
    halves = [(kv.state, kv.window, kv.other_state, kv.other_window, None) for kv in states.values()]
    assert before == after == [[0 if t is None else t.data_ptr() for t in several] for several in halves]
    assert all(place[TABLE] == 0 and place[:2] != place[2:4] for place in after)
    for change, index in ((None, [1, 0]), (("repeat", 2), [1, 1, 0, 0]), (("select", [3, 0, 1]), [0, 1, 1])):
        if change is not None:
            store.choose(RowSelection(*change))
        assert store.rows == len(index)
        states = store.kvs(list(kept), 1)
        for layer in kept:
            assert store.metadata_on(kind[layer].device)[FIRSTS] == states[layer].firsts.data_ptr()
            assert states[layer].firsts.tolist() == [1 - row for row in index]
        same_states(store, kept, index)
    assert all(any(t is one for one in store.tensors()) for kv in states.values() for t in (kv.firsts, kv.metadata))
    copied = pickle.loads(pickle.dumps(store))
    assert all(kv.firsts.tolist() == [1, 0, 0] for kv in copied.kvs(list(kept), 1).values())
    before = [kv.metadata.tolist() for kv in states.values()]
    with pytest.raises(RuntimeError, match="does not track past states"):
        store.crop(2)
    assert before == [kv.metadata.tolist() for kv in store.kvs(list(kept), 1).values()]
    store.crop(0)
    store.reserve(1, 1)
    assert store.rows == 1


def test_rows_begin_at_their_first_token_and_keep_that():
    """By calls: mask, then where each row begins."""
    store = Store((BOTH, KEYS))
    calls = [
        ([[1, 1], [0, 1], [0, 0]], [0, 1, 2]),
        ([[1] * 4, [0] + [1] * 3, [0] * 4], [0, 1, 4]),
        ([[1] * 6, [0] + [1] * 5, [0] * 5 + [1]], [0, 1, 5]),  # the last row's text comes in a third call
        ([[1] * 7, [0] + [1] * 6, [0] * 6 + [1]], [0, 1, 5]),  # a mask that hides what was read
        (None, [0, 1, 5]),
        ([[1] * 11, [0] + [1] * 10, [0] * 7 + [1] * 4], [0, 1, 5]),
    ]
    for mask, firsts in calls:
        tokens, before = 1 if mask is None else len(mask[0]) - store.length, store.length
        if before:  # one that is taken back, in which all rows would begin
            began = store.kvs([0], 3)[0].firsts.tolist()
            store.reserve(3, before + 3)
            store.set_padding_mask(torch.arange(before + 3).expand(3, -1) > torch.tensor([[0], [0], [before]]))
            write(store, 3)
            store.crop(before)
            assert store.kvs([0], 3)[0].firsts.tolist() == began
        store.reserve(3, store.length + tokens)
        if not store.length:
            poisoned(store)
        store.set_padding_mask(None if mask is None else torch.tensor(mask))
        assert store.kvs([0], 3)[0].firsts.tolist() == firsts
        write(store, tokens)
        inputs, state = store.read_state(0)
        assert inputs.isfinite().all() and state.isfinite().all()
        assert (inputs[2] == 0).all() == (store.length <= 4) and (state[2] == 0).all() == (store.length <= 4)
        kept = [t[store.blocks.half] for t in store.blocks.by_states[BOTH]]  # whoever reads without a mask finds zeros
        assert all(t.isfinite().all() and (store.length > 4 or (t[2] == 0).all()) for t in kept)
    store.crop(0)
    store.reserve(3, 2)
    store.set_padding_mask(None)
    assert store.kvs([0], 3)[0].firsts.tolist() == [0, 0, 0]


def test_what_a_row_keeps_counts_as_memory():
    with pytest.raises(torch.OutOfMemoryError, match=r"1 tokens in 2 rows: 1048576.* GiB wanted"):
        Store((BOTH._replace(state=(2**23, 2**23)),)).reserve(2, 1)
    assert BOTH.row_bytes == BOTH.bytes_for(99) == 2 * (4 * 30 + 2 * 40) and BOTH.size == 0 and MATRIX.row_bytes == 168


def begun(cache, shapes=(BOTH, KEYS)):
    feed(cache, shapes, fresh(shapes, 2, 5))
    return cache


def changed(cache, **attributes):
    vars(cache.layers[0]).update(attributes)
    return cache


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda c: changed(c, number_of_states=2), "several states"),
        (lambda c: changed(c, record_past=True), "records the past"),
        (lambda c: changed(begun(c), conv_states={0: torch.zeros(2, 10, 4)}), "another dtype"),
        (lambda c: changed(begun(c), recurrent_states={0: torch.zeros(2, 2, 5, 3)}), "other states"),
        (lambda c: changed(begun(c), recurrent_states={0: torch.zeros(3, 2, 3, 5)}), "different batch sizes"),
        (lambda c: changed(begun(c), recurrent_states={0: torch.zeros(2, 2, 3, 5).requires_grad_()}), "gradients"),
        (lambda c: changed(c, has_previous_state={0: True}), "unknown length"),
    ],
)
def test_what_is_not_taken_over_says_why(make, reason):
    cache = make(stock_cache((BOTH, KEYS)))
    layers = list(cache.layers)
    assert reason in adopt(cache, (BOTH, KEYS)) and cache.layers == layers


def test_other_layers_are_refused_and_missing_ones_made():
    for layers in ([LinearAttentionAndFullAttentionLayer(), DynamicLayer()], [DynamicLayer(), LinearAttentionLayer()]):
        cache = stock_cache((BOTH, KEYS))
        cache.layers = layers
        assert adopt(cache, (BOTH, KEYS)) == f"a cache layer of another kind: {type(layers[0]).__name__}"
    cache = DynamicCache()
    assert adopt(cache, (BOTH, KEYS)) is store_of(cache) and type(cache.layers[0]) is StateLayer


def test_a_layer_that_is_to_record_its_past_is_stocks_own():
    ours, stock = (stock_cache((WINDOW, KEYS)) for _ in range(2))
    store = adopt(ours, (WINDOW, KEYS))
    store.reserve(2, 5)
    feed(stock, (WINDOW, KEYS), write(store, 5))
    more = fresh((WINDOW, KEYS), 2, 4)
    for cache in (ours, stock):
        cache.activate_past_recording()
        feed(cache, (WINDOW, KEYS), more)
        cache.crop(-2)
    assert type(ours.layers[0]) is LinearAttentionLayer and ours.get_seq_length() == 7
    assert torch.equal(ours.layers[0].conv_states[0], stock.layers[0].conv_states[0])
    assert adopt(ours, (WINDOW, KEYS)) == "a cache that records the past of its states"


def test_an_answer_of_a_layer_cannot_be_edited():
    cache = stock_cache((BOTH, KEYS))
    adopt(cache, (BOTH, KEYS))
    with pytest.raises(TypeError):
        cache.layers[0].has_previous_state[0] = True
