"""Decoders without a head, or with a class for a text, packed: their padding, positions and caches."""

import copy

import pytest
import torch
import transformers as t

import accel
from accel.encoders.stack import EncoderStep
from accel.libraries.cache import cache_argument, cache_of
from support.objects.encoders import (
    BATCH,
    GROUPED,
    LENGTH,
    ROTARY,
    SIZES,
    assert_same,
    encoder_of,
    fallbacks,
    ids_and_mask,
    optimized,
    padded_ids,
)


def test_a_decoder_makes_its_cache_when_somebody_looks_into_it():
    model, stock = optimized("Mistral")
    call = padded_ids("left")
    assert_same(model, stock, **call, return_dict=False)
    with torch.no_grad():
        got, wanted = model(**call), stock(**call)
        assert not fallbacks(model) and isinstance(cache_of(got), t.DynamicCache)
        call["input_ids"].zero_()
        for ours, theirs in zip(copy.deepcopy(cache_of(got)).layers, cache_of(wanted).layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        assert type(cache_of(got)) is t.DynamicCache
        more = [
            one(call["input_ids"][:, :1], **{cache_argument(type(one).forward): cache_of(had)})[0]
            for one, had in ((model, got), (stock, wanted))
        ]
    assert torch.equal(*more) and fallbacks(model) == [f"{cache_argument(type(stock).forward)} is given"]
    assert_same(model, stock, **call, use_cache=False)
    assert_same(model, stock, **call)
    assert fallbacks(model) == [f"{cache_argument(type(stock).forward)} is given", "a cache, into which somebody looks"]


def test_a_decoder_with_a_class_for_its_last_word_leaves_padding_out(monkeypatch):
    model, stock = optimized("Qwen3", "ForSequenceClassification", pad_token_id=0)
    rows = []
    settle = EncoderStep.settle
    monkeypatch.setattr(EncoderStep, "settle", lambda step, packing: rows.append(packing) or settle(step, packing))
    for side in ("right", "left"):
        assert_same(model, stock, **padded_ids(side))
    assert_same(model, stock, **padded_ids("right", pad=5))  # its class is that of a row of padding
    real = int(ids_and_mask()["attention_mask"].sum())
    assert [int(one.starts[-1]) for one in rows] == [real, real + 2, BATCH * LENGTH] and not fallbacks(model)


def test_several_texts_in_a_row_run_stock():
    model, stock = optimized("Qwen3", use_cache=False)
    places = torch.arange(LENGTH).remainder(7).expand(BATCH, -1)
    assert_same(model, stock, input_ids=ids_and_mask()["input_ids"], position_ids=places)
    assert fallbacks(model) == ["positions without a mask, which may be those of several texts in a row"]


def test_rows_of_padding_before_a_text_are_computed_once_where_they_see_nothing():
    model, stock = optimized("Qwen3", use_cache=False)
    call = ids_and_mask("left")
    call["input_ids"] = call["input_ids"].masked_fill(call["attention_mask"] == 0, 0)
    assert_same(model, stock, **call)
    with torch.no_grad():
        x = model.embed_tokens(call["input_ids"])
        packed = encoder_of(model).padded(call["attention_mask"], None, x).packing(x)
    assert int(packed.starts[-1]) == int(call["attention_mask"].sum()) + 2 and packed.mirrored


@pytest.mark.parametrize(
    ("family", "side", "begun"),
    [("Qwen3", "left", "sdpa"), ("ModernBert", "right", "sdpa"), ("Mistral", "right", "eager")],
)
def test_rows_that_may_see_nothing_are_those_of_the_attention_that_is_set(family, side, begun):
    fields = {"local_attention": 6} if family == "ModernBert" else {}
    model, stock = optimized(family, **fields, _attn_implementation=begun)
    for one in (model, stock):
        one.set_attn_implementation("eager")
    assert_same(model, stock, **padded_ids(side))
    assert_same(model, stock, **ids_and_mask(None))
    assert [told.startswith("rows of padding may see nothing") for told in fallbacks(model)] == [True]


@pytest.mark.parametrize("family", ["ModernBert", "Qwen3"])
def test_kinds_of_words_that_a_tokenizer_tells_and_nothing_reads(family):
    model, stock = optimized(family)
    assert_same(model, stock, **ids_and_mask(), token_type_ids=torch.ones(BATCH, LENGTH, dtype=torch.int64))
    assert not fallbacks(model)


def test_an_attention_that_sees_padding_before_a_text_runs_stock_there():
    model, stock = optimized("Qwen3", _attn_implementation="eager")
    assert_same(model, stock, **ids_and_mask("right"))
    assert not fallbacks(model)
    assert_same(model, stock, **ids_and_mask("left"))
    assert fallbacks(model) == ["padding on no one side, and attention by distances"]


def test_queries_that_are_scaled_at_late_positions_alone():
    scaled = ROTARY | {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.5}
    scaled["original_max_position_embeddings"] = 20
    config = t.Ministral3Config(**SIZES, **GROUPED, rope_parameters=scaled)
    (row,) = [
        row for row in accel.report(accel.optimize(t.Ministral3Model(config).eval())).sites if row[1] == "encoder"
    ]
    assert row[2] == "skipped" and "computes something else with attention_mask with position_ids" in row[3]
