"""Whisper's own generate(), and the pipeline around it: what stock gives, by fast steps, without a host read a step."""

import copy

import numpy as np
import pytest
import torch
import transformers as t
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.modeling_outputs import BaseModelOutput

import accel
from accel.llm.generation.loop import handover
from accel.seq2seq.decoder import Seq2SeqForward
from accel.seq2seq.late_check import LateStopCheck
from accel.seq2seq.memory_loop import MemoryLoop
from accel.seq2seq.processors import quicker
from support.noted import noted
from support.objects.speech import (
    END,
    FRAMES,
    LETTERS,
    PREVIOUS,
    SIZES,
    SPOKEN,
    START,
    UNTIMED,
    assert_equal,
    called,
    heard,
    whisper,
)


@pytest.fixture(scope="module")
def models():
    stock = whisper()
    return accel.optimize(copy.deepcopy(stock)), stock


ENGLISH_TEXT = {"language": "en", "task": "transcribe"}
TIMED = ENGLISH_TEXT | {"return_timestamps": True}
WORDS = {"return_token_timestamps": True}
AGAIN = TIMED | {"temperature": (0.0, 0.6, 1.0), "compression_ratio_threshold": 1.05, "logprob_threshold": -1.0}
ONCE = {"force_unique_generate_call": True}  # else stock takes times of random texts for places, and never ends
LONG = {"frames": 3 * FRAMES, "attention_mask": heard(3 * FRAMES)}
BEFORE = {"prompt_ids": torch.tensor([PREVIOUS, 5, 6, 7])}
MASKED = {"attention_mask": heard(FRAMES)}
GIVEN = BaseModelOutput(torch.randn(3, FRAMES // 2, 64, generator=torch.Generator().manual_seed(5)))
CALLS = {
    "a text": ENGLISH_TEXT,
    "the language is found": ONCE,
    "languages": {"language": ["en", "de", "en"], "task": "translate"},
    "timestamps": TIMED,
    "a static cache": TIMED | {"cache_implementation": "static", "disable_compile": True},
    "beams": TIMED | {"num_beams": 3},
    "prompt": ENGLISH_TEXT | BEFORE,
    "prompt and timestamps": TIMED | BEFORE,
    "outputs": ENGLISH_TEXT | {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "outputs of segments": TIMED | {"return_dict_in_generate": True},
    "segments": TIMED | {"return_segments": True},
    "sampled": TIMED | {"do_sample": True, "temperature": 1.2},
    "words": ENGLISH_TEXT | WORDS | MASKED,
    "words without a mask": TIMED | WORDS,
    "words after a prompt": ENGLISH_TEXT | WORDS | BEFORE | MASKED,
    "temperatures": AGAIN,
    "silence": AGAIN | {"no_speech_threshold": 0.01},
    "long": TIMED | LONG,
    "long, words": TIMED | LONG | WORDS,
    "long, prompt": TIMED | LONG | BEFORE | ONCE,
    "long, temperatures": AGAIN | LONG | ONCE | {"condition_on_prev_tokens": True, "no_speech_threshold": 0.6},
    "words without a cache, by stock": ENGLISH_TEXT | WORDS | MASKED | {"use_cache": False},
    "words, by stock": ENGLISH_TEXT | WORDS | MASKED | ONCE | {"return_dict_in_generate": True},
    "words of what an encoder gave, by stock": TIMED | WORDS | MASKED | {"encoder_outputs": GIVEN},
    "words of beams": ENGLISH_TEXT | WORDS | MASKED | {"num_beams": 3},
    "words of beams after a prompt": TIMED | WORDS | BEFORE | MASKED | {"num_beams": 2},
    "long, words of beams": TIMED | LONG | WORDS | {"num_beams": 2},
    "words of beams, again": AGAIN | WORDS | {"num_beams": 2},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_stock_gives(name, models, monkeypatch):
    ours, stock = models
    monkeypatch.setattr(handover, "DEVICES", ("cpu",))
    wanted = called(stock, CALLS[name])
    ran = noted(monkeypatch, Seq2SeqForward, "step", lambda *_: 1)
    late = noted(monkeypatch, LateStopCheck, "finish", lambda check: check.steps)
    loops = noted(monkeypatch, MemoryLoop, "run", lambda loop: loop.late)
    monkeypatch.setattr(WhisperTimeStampLogitsProcessor, "__call__", None)
    vars(ours)["forward"].log.clear()
    assert_equal(called(ours, CALLS[name]), wanted)  # and as many random numbers were drawn
    reasons = {reason for _, reason, _ in accel.report(ours).fallbacks}
    if name.endswith("by stock"):
        assert reasons and all("output_attentions" in one for one in reasons)
    else:
        assert ran and not reasons and (late or loops or "num_beams" in CALLS[name]) and all(loops)


def test_steps_past_the_end_are_undone(models, monkeypatch):
    ours, stock = models
    late = noted(monkeypatch, LateStopCheck, "finish", lambda check: check.steps)
    cut = noted(monkeypatch, MemoryLoop, "crop", lambda loop: loop.length() - loop.stored)
    call = TIMED | {"rows": 1, "max_new_tokens": 24}
    assert_equal(called(ours, call), called(stock, call))
    assert 1 in cut and not late
    call |= {"return_timestamps": False, "return_dict_in_generate": True, "output_scores": True}
    assert_equal(called(ours, call), called(stock, call))
    assert 1 in late
    call["cache_implementation"] = "static"  # which nobody can cut
    assert_equal(called(ours, call), called(stock, call))


def test_processors_give_the_same_scores():
    generator = torch.Generator().manual_seed(0)
    config = t.GenerationConfig(eos_token_id=END)
    vars(config).update(SPOKEN)
    begins = t.SuppressTokensAtBeginLogitsProcessor([5, END], begin_index=3)
    theirs = [begins, t.SuppressTokensLogitsProcessor([7, START]), WhisperTimeStampLogitsProcessor(config, 3)]
    lists = [theirs, theirs[:2], theirs[2:], [theirs[2], t.LogitNormalization(), theirs[0], *theirs[1:]]]
    lists = [(quicker(one), t.LogitsProcessorList(one)) for one in lists]
    assert [len(ours) for ours, _ in lists] == [1, 1, 1, 3]
    for length in (3, 4, 5, 12):
        for _ in range(8):
            ids = torch.randint(0, LETTERS, (16, length), generator=generator)
            times = torch.randint(UNTIMED + 1, UNTIMED + 27, ids.shape, generator=generator)
            ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.4, times, ids)
            scores = 3 * torch.randn(16, SIZES["vocab_size"], generator=generator)
            before = scores.clone()
            assert all(torch.equal(ours(ids, scores), stock(ids, scores)) for ours, stock in lists)
            assert torch.equal(scores, before)


@pytest.mark.parametrize(("kind", "beams"), [(True, {"num_beams": 1}), ("word", {})])  # five are the pipeline's own
def test_the_pipeline_gives_what_stock_gives(kind, beams, models, monkeypatch):
    control = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
    control += ["<|startofprev|>", "<|nospeech|>", "<|notimestamps|>", *(f"<|{0.02 * n:.2f}|>" for n in range(27))]
    words = [chr(97 + n % 26) + "Ġ" * (n % 3) + chr(97 + n // 26) for n in range(LETTERS)]
    names = {name: number for number, name in enumerate((words + control)[: SIZES["vocab_size"]])}
    tokenizer = t.WhisperTokenizer(vocab=names, merges=[], language="english", task="transcribe", pad_token=control[0])
    tokenizer.add_special_tokens({"additional_special_tokens": control[:9]})
    features = t.WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=320)
    ran = noted(monkeypatch, Seq2SeqForward, "step", lambda *_: 1)
    ours, stock = models
    vars(ours)["forward"].log.clear()
    found = []
    for model in (ours, stock):
        model.config._attn_implementation = "sdpa"
        parts = {"model": model, "tokenizer": tokenizer, "feature_extractor": features}
        audio = np.random.default_rng(0).standard_normal(40000).astype("float32")
        asked = {"return_timestamps": kind, "generate_kwargs": ENGLISH_TEXT | beams}
        found.append(
            t.pipeline("automatic-speech-recognition", **parts)(audio, chunk_length_s=1, batch_size=2, **asked)
        )
    assert found[0] == found[1] and found[0]["chunks"]
    assert ran and not accel.report(ours).fallbacks
