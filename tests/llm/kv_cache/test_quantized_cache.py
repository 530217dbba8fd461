"""A quantized cache that the user holds: read, edited, copied, handed from one model to another."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import accel
from accel.llm.analysis.kv_quantization import CODES
from accel.llm.kv_cache.cache import StoreLayer, is_ours, store_of
from support.llm.rounded_cache import held, rounding

KINDS = list(CODES)


def next_logits(model, ids, cache):
    return model(ids[:, :1], past_key_values=cache).logits


def test_it_takes_the_memory_that_the_report_says():
    ours, *_, cache = held()
    store = store_of(cache)
    assert [shape.codes for shape in store.shapes] == [torch.int8] * 2
    kept = sum(t.nbytes for several in store.blocks.kept.values() for t in several)
    size = sum(shape.size for shape in store.shapes)
    assert kept == size * store.rows * store.capacity
    told = [site[3] for site in accel.report(ours).sites if site[1] == "language model"]
    assert f"keys and values in int8: {size} bytes a token instead of {2 * 2 * 2 * 16 * 4}" in told[0]


def test_who_looks_at_keys_gets_copies_in_a_stock_layer_and_edits_of_them_count():
    ours, stock, ids, cache = held()
    with rounding(torch.int8):
        theirs = DynamicCache()
        stock(ids, past_key_values=theirs)
        for one in (cache, theirs):
            one.layers[1].values[:, :, 2] *= -1.0
            one.layers[0].keys = one.layers[0].keys.clone()
        assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 2
        torch.testing.assert_close(cache.layers[1].values, theirs.layers[1].values, rtol=1e-4, atol=1e-5)
        before = [t.clone() for layer in theirs.layers for t in (layer.keys, layer.values)]
        wanted = next_logits(stock, ids, theirs)
    torch.testing.assert_close(next_logits(ours, ids, cache), wanted, rtol=1e-4, atol=1e-4)
    assert is_ours(cache)  # taken in again, rounded to what it was rounded to
    after = [t[:, :, :-1] for layer in cache.layers for t in (layer.keys, layer.values)]
    for mine, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_one_layer_read_or_reordered_by_itself_goes_on_from_what_it_held():
    ours, _, ids, cache = held(rows=3)
    wanted = next_logits(ours, ids, copy.deepcopy(cache))
    assert cache.layers[0].keys.shape == (3, 2, 9, 16) and cache.layers[0].keys.dtype == torch.float32
    assert [type(layer) for layer in cache.layers] == [DynamicLayer, StoreLayer]
    torch.testing.assert_close(next_logits(ours, ids, cache), wanted, rtol=1e-5, atol=1e-5)
    cache.layers[1].reorder_cache(torch.tensor([2, 0, 1]))
    assert cache.layers[1].keys.shape == (3, 2, 10, 16)
    assert next_logits(ours, ids, cache).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_and_pickles_hold_the_same_codes(kind, copied):
    ours, _, ids, cache = held(kind)
    again = copied(cache)
    assert is_ours(again) and store_of(again).shapes == store_of(cache).shapes
    assert torch.equal(next_logits(ours, ids, again), next_logits(ours, ids, cache))


def test_a_cache_goes_from_one_kind_of_model_to_the_other_and_back():
    ours, stock, ids, cache = held()
    exact = accel.optimize(copy.deepcopy(stock))
    logits = next_logits(exact, ids, cache)
    assert [shape.codes for shape in store_of(cache).shapes] == [None] * 2
    back = next_logits(ours, ids, cache)
    assert [shape.codes for shape in store_of(cache).shapes] == [torch.int8] * 2
    assert logits.isfinite().all() and back.isfinite().all()
    assert torch.equal(stock(ids).logits, accel.restore(exact)(ids).logits)


def test_calls_that_run_stock_go_on_over_the_same_cache():
    ours, stock, ids, cache = held()
    with rounding(torch.int8):
        theirs = DynamicCache()
        stock(ids, past_key_values=theirs)
        wanted = stock(ids[:, :2], past_key_values=theirs, output_hidden_states=True).logits
    got = ours(ids[:, :2], past_key_values=cache, output_hidden_states=True).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert is_ours(cache) and cache.get_seq_length() == 11


def test_restored_it_is_stock():
    ours, stock, ids, _ = held()
    assert torch.equal(accel.restore(ours)(ids).logits, stock(ids).logits)
    accel.optimize(ours)
    torch.testing.assert_close(ours(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_copy_of_the_model_rounds_too():
    ours, _, ids, _ = held()
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        cache = DynamicCache()
        assert torch.equal(again(ids, past_key_values=cache).logits, ours(ids).logits)
        assert store_of(cache).shapes[0].codes == torch.int8
