"""generate() of encoder-decoder models: the tokens of stock, by steps over the fixed memory."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import transformers as t
from torch.fx.experimental.proxy_tensor import make_fx

import accel
from accel.cuda_graphs.fingerprint import Fingerprint
from accel.libraries.cache import DynamicLayer, cache_argument, cache_of, encoded
from accel.llm.generation.loop import handover
from accel.llm.runtime.lm_head import StepHeadForward
from accel.seq2seq.beams import BeamLoop
from accel.seq2seq.decoder import Seq2SeqForward
from accel.seq2seq.fixed_memory import CROSS, OWN
from accel.seq2seq.held_layers import HeldLayer
from accel.seq2seq.memory_attention import MemoryStep
from accel.seq2seq.memory_loop import MemoryLoop
from support.everything import always
from support.noted import fails_at, noted
from support.objects.seq2seq import (
    LAYERS,
    STEPS,
    TEXT,
    assert_same,
    fallbacks,
    generated,
    made,
    optimized,
    options,
    source,
)
from support.state import assert_same_state, snapshot

PROMPT = torch.tensor([[2, 5, 6], [0, 7, 9]])
PADDED = {"decoder_input_ids": PROMPT, "decoder_attention_mask": (PROMPT > 0).long()}
LONG = torch.arange(3, 27).view(2, 12)
UNTOLD = torch.tensor([[2, 0, 6], [0, 3, 9]])  # padding, that some models have positions go by


@pytest.mark.turns(2)
def test_tokens_are_those_of_stock(family, steps, attended, monkeypatch):
    model, stock = optimized(family)
    ran, loops = steps(), noted(monkeypatch, MemoryLoop, "run", lambda loop: loop.fused)
    heads = noted(monkeypatch, StepHeadForward, "fast", lambda head, x: x.shape[0])
    monkeypatch.setattr(handover, "DEVICES", ("cpu",))
    begun = 9 if family == "M2M100" else 12
    ours = [
        (source(family), options(), 2, 10),
        (source(family), options(cache_implementation="static", disable_compile=True), 2, 10),
        (source(family, masked=False), options(), 2, 10),
        (source(family, length=70), options(num_beams=4), 8, 10),
        (source(family, rows=1), options(num_beams=3), 3, 10),
        (source(family), options(do_sample=True, top_k=10), 2, 10),
        (source(family) | {"decoder_input_ids": UNTOLD}, options(), 2, begun),
        (source(family) | {"decoder_input_ids": LONG}, options(), 2, 9),  # its prompt is run at once
        (source(family) | PADDED, options(), 2, 9),
        (source(family), options(return_dict_in_generate=True, output_scores=True), 2, 10),
    ]
    for call, chosen, rows, count in ours:
        ran.clear()
        attended.clear()
        heads.clear()
        assert_same(model, stock, call, chosen)
        assert ran == heads == [rows] * count and attended == [False, True] * LAYERS * count, (list(call), chosen)
    assert not fallbacks(model) and loops == [True] * 6


@pytest.mark.turns(2)
def test_the_memory_read_as_a_store_gives_the_same(family, monkeypatch):
    """As on a GPU, where nothing but two numbers of a store, and masks, change from step to step."""
    model, stock = optimized(family)
    monkeypatch.setattr(MemoryStep, "pages", lambda *_: True)
    read = noted(monkeypatch, MemoryStep, "kv", lambda step, part, index: (part, index))
    for call, chosen in (
        (source(family) | PADDED, options()),
        (source(family, length=70), options(num_beams=3)),
        (source(family, masked=False), options(50)),
    ):
        assert_same(model, stock, call, chosen)
    call, chosen = source(family, length=64, masked=False), options(return_dict_in_generate=True, output_logits=True)
    for ours, theirs in zip(*(one.generate(**call, **chosen).logits for one in (model, stock)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # of as many tokens as there is room for
    assert read == [(part, layer) for layer in range(LAYERS) for part in (OWN, CROSS)] * (9 + STEPS + 50 + STEPS)
    assert not fallbacks(model)


@pytest.mark.turns(2)
def test_layers_that_somebody_looks_at_run_their_own_code_and_it_is_told(steps, attended):
    model, stock = optimized("Bart")
    seen, ran = [], steps()
    attended.clear()
    handle = model.model.decoder.layers[1].fc1.register_forward_hook(lambda *_: seen.append(1))
    assert_same(model, stock, source("Bart"), options())
    assert len(seen) == STEPS and attended == [False, True] * LAYERS * STEPS and not fallbacks(model)
    handle.remove()
    handle = model.model.decoder.layers[1].register_forward_hook(lambda *_: seen.append(2))
    attended.clear()
    ran.clear()
    assert_same(model, stock, source("Bart"), options())
    assert (
        len(ran) == STEPS - 1
        and seen[-1] == 2
        and not attended
        and "its layers run their own code" in fallbacks(model)[-1]
    )
    handle.remove()
    assert_same(model, stock, source("Bart"), options())
    assert attended == [False, True] * LAYERS * STEPS


@pytest.mark.parametrize("change", always(["exchanged", "removed", "doubled"], "doubled"))
@pytest.mark.turns(2)
def test_layers_that_are_others_now_run_their_own_code_and_it_is_told(change, steps, attended):
    model, stock = optimized("Bart")
    ran, other = steps(), copy.deepcopy(stock.model.decoder.layers[change != "doubled"])  # to the same place of a cache
    attended.clear()
    for layers in (model.model.decoder.layers, stock.model.decoder.layers):
        del layers[1]
        layers.extend([copy.deepcopy(other)] if change != "removed" else [])
    assert_same(model, stock, source("Bart"), options())
    assert len(ran) == STEPS - 1 and not attended and "they are other ones now" in fallbacks(model)[0]
    assert_same(model, stock, source("Bart"), options(num_beams=2))


def test_first_tokens_that_fail_leave_an_empty_cache(steps, monkeypatch):
    model, stock = optimized("Bart")
    ran = steps()
    fails_at(monkeypatch, 2, Seq2SeqForward, "run_step", RuntimeError, "as of memory that is short")
    assert_same(model, stock, source("Bart") | {"decoder_input_ids": PROMPT}, options())
    assert len(ran) == 1 + 9 and "as of memory that is short" in fallbacks(model)[0]


def test_weights_that_change_in_place_are_read(steps):
    model, stock = optimized("Whisper")
    generated(model, source("Whisper"), options())
    with torch.no_grad():
        for one in (model, stock):
            for name, parameter in one.named_parameters():
                if "decoder" in name:
                    parameter.mul_(1.5)
    assert_same(model, stock, source("Whisper"), options())


def test_what_the_encoder_gave_may_be_handed_in_and_others_see_no_stale_text(family, steps):
    model, stock = optimized(family)
    ran = steps()
    for length in (5, 66, 12):
        call = source(family, length, seed=length)
        with torch.no_grad():
            given = stock.get_encoder()(**call)
        call = {name: one for name, one in call.items() if name == "attention_mask"}
        assert_same(model, stock, call | {"encoder_outputs": given}, options())
    assert len(ran) == 3 * STEPS and not fallbacks(model)


def test_a_cache_of_the_callers_ends_where_stocks_does(monkeypatch):
    """A step that was launched before the end was known is undone in it."""
    model, stock = optimized("Bart")
    cut = noted(monkeypatch, MemoryLoop, "crop", lambda loop: loop.length() - loop.stored)
    third = generated(stock, source("Bart", rows=1), options())[0, 3]
    found = []
    for one in (model, stock):
        cache = t.EncoderDecoderCache(*(t.DynamicCache(config=one.config) for _ in range(2)))
        given = options(eos_token_id=int(third), min_new_tokens=None, past_key_values=cache)
        written = one.generate(**source("Bart", rows=1), **given)
        found.append((written.tolist(), cache.get_seq_length(), cache.self_attention_cache.layers[0].keys))
    assert found[0][:2] == found[1][:2] and found[0][1] == len(found[0][0][0]) - 1 and 1 in cut
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Bart", "T5"])
@pytest.mark.turns(2)
def test_more_tokens_than_there_is_room_for(family, steps):
    model, stock = optimized(family)
    ran = steps()
    assert_same(model, stock, source(family), options(150))
    assert len(ran) == 150 and not fallbacks(model)


@pytest.mark.turns(4)
def test_a_step_that_is_written_down_once_serves_every_text(family, monkeypatch):
    """As a CUDA graph does: of a step only its operations are kept, and what they are given."""
    model, stock = optimized(family)
    kept = {}

    def run(self, holding, text, choice=None):
        holding.settle(OWN)
        holding.settle(CROSS)
        how, more = choice or (None, ())
        step, make = (*text.given, *more), self.step if choice is None else partial(self.chosen, how)
        given = [one is not None for one in step]
        key = self.memory.given_up, holding.room(OWN), holding.room(CROSS), holding.rows, how, *given

        def eager(*tensors):
            left = iter(tensors)
            return make(holding, *(next(left) if there else None for there in given))

        tensors = [one for one in step if one is not None]
        if key not in kept:
            kept[key] = make_fx(eager)(*tensors)
        return kept[key](*tensors)

    monkeypatch.setattr(Seq2SeqForward, "run_step", run)
    monkeypatch.setattr(BeamLoop, "in_one", lambda loop, packed: not loop.processors)
    for seed, length in enumerate((9, 30, 12)):
        assert_same(model, stock, source(family, length, seed=seed), options(num_beams=2 - seed % 2))
    alike = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": [64, 65]}
    for plain in ({}, {"num_beams": 2}):  # no processors, so that graphs choose
        assert_same(model, stock, source(family), alike | plain)
    assert len(kept) == 2 + 2, list(kept)
    assert not [path for path, _, _ in accel.report(model).fallbacks if not path]


def test_calls_that_are_no_steps_run_stock_and_are_told(steps):
    model, stock = optimized("Bart")
    ran = steps()
    assert_same(model, stock, source("Bart"), options(output_hidden_states=True, return_dict_in_generate=True))
    assert not ran and "called with output_hidden_states" in fallbacks(model)  # and its encoder


@torch.no_grad()
def test_two_texts_at_a_time_and_a_cache_that_goes_on_in_stock(steps):
    model, stock = optimized("Bart")
    ran = steps()
    generator = torch.Generator().manual_seed(0)
    hidden = [torch.randn(2, length, 32, generator=generator) for length in (7, 11)]
    ids = torch.randint(3, 64, (2, 8), generator=generator)
    ours, theirs = [None, None], [None, None]
    for at in range(6):
        for text in (0, 1):
            new = ids[:, at : at + 1] if at != 4 else ids[:, at : at + 2]  # two tokens at once are no step
            call = {"decoder_input_ids": new, "encoder_outputs": encoded(hidden[text])}
            name = cache_argument(type(stock).forward)
            got, wanted = model(**call, **{name: ours[text]}), stock(**call, **{name: theirs[text]})
            assert list(got) == list(wanted) and type(got) is type(wanted)
            torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-4)
            ours[text], theirs[text] = cache_of(got), cache_of(wanted)
    assert len(ran) == 8
    held = ours[1].self_attention_cache.layers[0]
    assert type(held) is HeldLayer and type(ours[0].self_attention_cache.layers[0]) is DynamicLayer
    for cache in (ours[1], copy.deepcopy(ours[1]), pickle.loads(pickle.dumps(ours[1]))):
        assert type(cache) is t.EncoderDecoderCache and cache.get_seq_length() == 7
        torch.testing.assert_close(
            cache.self_attention_cache.layers[1].keys, theirs[1].self_attention_cache.layers[1].keys
        )
    for cache in (ours[1], theirs[1]):
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-1)
    assert type(held) is DynamicLayer
    torch.testing.assert_close(held.values, theirs[1].self_attention_cache.layers[0].values)


@torch.no_grad()
def test_a_text_of_another_thread_is_not_moved_at_every_step(steps):
    model, stock = optimized("Bart")
    ran, call = steps(), {"encoder_outputs": encoded(torch.randn(2, 7, 32)), "decoder_input_ids": torch.full((2, 1), 5)}
    first = cache_of(model(**call, **{cache_argument(type(stock).forward): cache_of(model(**call))}))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: assert_same(model, stock, source("Bart"), options())).result()
    assert ran == [2] and fallbacks(model) == ["another thread's text is under way"]
    del first
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: assert_same(model, stock, source("Bart"), options())).result()
    assert ran == [2] * (1 + STEPS)


@torch.no_grad()
def test_rows_in_another_order_and_memory_in_which_anything_may_stand(steps):
    model, stock = optimized("T5")
    generated(model, source("T5", 14), options(20))
    for flat in vars(model)["forward"].memory.flat.values():
        flat.fill_(float("inf"))
    ran, order = steps(), torch.tensor([1, 0])
    call = {"encoder_outputs": encoded(torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0)))}
    changes = [
        lambda cache: cache.reorder_cache(order),
        lambda cache: [cache.self_attention_cache.reorder_cache(order) for _ in range(3)],
        lambda cache: cache.cross_attention_cache.layers[1].reorder_cache(order),
        lambda cache: [cache.self_attention_cache.layers[0].reorder_cache(order) for _ in range(3)],
    ]
    ours = theirs = None
    for at, change in enumerate([*changes, lambda cache: None]):
        new = torch.tensor([[5 + at], [9 + at]])
        name = cache_argument(type(stock).forward)
        both = ((model, ours), (stock, theirs))
        got, wanted = (one(decoder_input_ids=new, **{name: held}, **call) for one, held in both)
        torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-4)
        ours, theirs = cache_of(got), cache_of(wanted)
        change(ours)
        change(theirs)
    assert ran == [2] * 4 and not fallbacks(model)


class Unknown(t.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.turns(2)
def test_the_model_is_compared_every_few_steps_where_no_code_of_the_users_runs(monkeypatch):
    model, stock = optimized("T5")
    looked = noted(monkeypatch, Fingerprint, "holds", lambda *_: 1)
    for number in (1, 2):
        looked.clear()
        assert_same(model, stock, source("T5"), options(20, num_beams=number))
        assert 0 < len(looked) < 12
        mine = t.LogitsProcessorList([Unknown()])
        looked.clear()
        assert_same(model, stock, source("T5"), options(20, num_beams=number, logits_processor=mine))
        assert len(looked) >= 20


def test_restore_gives_back_what_was_there(family):
    model, stock = made(family)
    before = snapshot(model)
    accel.optimize(model)
    generated(model, source(family), options())
    accel.restore(model)
    assert_same_state(before, snapshot(model))
    assert_same(model, stock, source(family), options())


@pytest.mark.turns(2)
def test_copies_of_an_optimized_model_have_memory_of_their_own(steps):
    model, stock = optimized("T5")
    generated(model, source("T5"), options())
    twin = copy.deepcopy(model)
    ran = steps()
    assert_same(twin, stock, source("T5"), options())
    assert ran == [2] * STEPS and vars(twin)["forward"].memory is not vars(model)["forward"].memory


def test_a_model_whose_steps_compute_something_else_stays_stock():
    """A mixture of NLLB-MoE goes by the last columns of a mask, which are of no token in the memory of steps."""
    torch.manual_seed(0)
    model = t.NllbMoeForConditionalGeneration(t.NllbMoeConfig(**TEXT, num_experts=4, decoder_sparse_step=1)).eval()
    accel.optimize(model)
    assert "forward" not in vars(model)
    (row,) = [row for row in accel.report(model).sites if row[1] == "encoder-decoder"]
    assert row[2] == "skipped" and "computes something else" in row[3]
