"""Beams of encoder-decoder models: what texts share, and what steps give after the last."""

import pytest
import torch
import transformers as t

import accel
from accel.libraries.cache import cache_of
from accel.seq2seq import beams
from accel.seq2seq.fixed_memory import CROSS
from accel.seq2seq.late_check import Told
from support.noted import noted
from support.objects.seq2seq import assert_same, fallbacks, generated, optimized, options, source


@pytest.mark.turns(2)
def test_beams_of_a_text_share_what_the_encoder_gave_and_the_memory_is_told_and_freed(family):
    model, stock = optimized(family)
    returned = {"return_dict_in_generate": True, "output_scores": True}
    for chosen in (options(num_beams=3), options(num_beams=3, **returned), options(do_sample=True, num_beams=2)):
        assert_same(model, stock, source(family), chosen)
    found, wanted = (one.generate(**source(family), **options(num_beams=3, **returned)) for one in (model, stock))
    holding = vars(model)["forward"].holding
    assert (holding.beams, holding.kept[CROSS].shape[2], holding.rows) == (3, 2, 6) and not fallbacks(model)
    for ours, theirs in zip(
        cache_of(found).cross_attention_cache.layers, cache_of(wanted).cross_attention_cache.layers, strict=True
    ):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
    forward = vars(model)["forward"]
    assert forward.kept_bytes > 0 and "MB" in accel.report(model).sites[0][3]
    accel.restore(model)
    assert forward.kept_bytes == 0


@pytest.mark.turns(2)
def test_beams_that_end_are_told_a_step_late(steps, monkeypatch):
    model, stock = optimized("Bart")
    told = noted(monkeypatch, Told, "read", lambda told: bool(told.ended))
    ran, found = steps(), set()
    fused = noted(monkeypatch, beams.BeamLoop, "next", lambda loop, packed: loop.fused)
    others = {"length_penalty": -1.0}, {"early_stopping": "never", "length_penalty": 2.0, "repetition_penalty": 1.5}
    for seed, chosen in enumerate(({}, {"early_stopping": True}, {"num_return_sequences": 3}, *others, {})):
        call = source("Bart", seed=seed)
        more = {"max_new_tokens": 12, "num_beams": 3, "eos_token_id": [*range(3, 9 + seed)]} | chosen
        ours = generated(model, call, more)
        assert torch.equal(ours, generated(stock, call, more))
        found.add(ours.shape[1])
    assert ran and all(fused) and len(fused) > 20 and True in told and len(found) > 1 and not fallbacks(model)
    longer = {"max_new_tokens": 5, "num_beams": 2, "stopping_criteria": [t.MaxLengthCriteria(12)]}
    for one in (model, stock):  # stock's lists are too short for that
        with pytest.raises(IndexError):
            one.generate(**call, **longer)


class Clock:
    """A time to begin with, since when as many seconds have passed as it was asked for them."""

    asked = 0

    def __rsub__(self, now):
        self.asked += 1
        return self.asked


def test_time_ends_all_beams_and_what_a_step_too_many_finds_is_dropped(monkeypatch):
    model, stock = optimized("Bart")
    fused = noted(monkeypatch, beams.BeamLoop, "next", lambda loop, packed: loop.fused)
    found = []
    for one in (model, stock):
        by_time = t.StoppingCriteriaList([t.MaxTimeCriteria(5.5, Clock())])
        chosen = {"max_new_tokens": 20, "num_beams": 3, "stopping_criteria": by_time}
        found.append(generated(one, source("Bart"), chosen))
    assert torch.equal(*found) and found[0].shape[1] == 7 and fused == [True] * 6
