"""Random calls of generate(), each beside a copy that stays stock: the same tokens, outputs, errors and random numbers.

ACCEL_TEST_EVERYTHING=1 runs a thousand.
"""

import copy
import random
from functools import cache

import pytest
import torch
import transformers as t

import accel
from accel.libraries.cache import cache_argument, cache_of
from support.everything import EVERYTHING
from support.objects.seq2seq import MAKES, OTHERS, WORDS, made, moonshine, speech_to_text
from support.objects.speech import FRAMES, PREVIOUS, assert_equal, called, heard, whisper

KINDS = MAKES | OTHERS | {"Moonshine": moonshine, "Speech2Text": speech_to_text}
COUNT = 1000 if EVERYTHING else 4
TIED = {312}  # of Whisper, where rounding decides between two times of a word


class Third(t.LogitsProcessor):
    """A processor of the user's."""

    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.tensor([3]), -1.0)


class Notes:
    """A streamer of the user's."""

    def __init__(self):
        self.seen = []

    def put(self, tokens):
        self.seen.append(tokens.tolist())

    def end(self):
        self.seen.append("end")


@cache
def pair(name, attention):
    """A model that is optimized, and its stock copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MAKES, name, KINDS[name])
        model, stock = made(name)
    for one in (model, stock) if stock._supports_sdpa else ():
        one.set_attn_implementation(attention)
    return accel.optimize(model), stock


@cache
def speaking():
    stock = whisper()
    return accel.optimize(copy.deepcopy(stock)), stock


def heard_by(name, dice, rows):
    """What the encoder is given."""
    generator = torch.Generator().manual_seed(dice.randrange(1000))
    if name == "Whisper":
        return {"input_features": torch.randn(rows, 8, 32, generator=generator)}
    length = dice.choice([1, 3, 8, 17, 40, 65, 70]) + 9 * (name == "Moonshine")
    lengths = torch.tensor([length, *(dice.randint(1, length) for _ in range(rows - 1))])
    mask = (torch.arange(length) < lengths[:, None]).long()
    if name == "Moonshine":
        shown = mask.repeat_interleave(100, 1)
        given, more = {"input_values": torch.randn(rows, 100 * length, generator=generator)}, {"attention_mask": shown}
        return given | dice.choice([{}, more])
    if name == "Speech2Text":
        mask = mask.repeat_interleave(4, 1)
        return {"input_features": torch.randn(rows, 4 * length, 8, generator=generator)} | dice.choice(
            [{}, {"attention_mask": mask}]
        )
    ids = torch.randint(3, WORDS, (rows, length), generator=generator)
    return {"input_ids": ids} | dice.choice([{}, {"attention_mask": mask}, {"attention_mask": mask.flip(1)}])


def random_call(name, dice):
    """Arguments of generate(), and how often it goes on with what it gave."""
    rows, new = dice.choice([1, 1, 2, 3]), dice.choice([1, 2, 5, 9, 14, 20, 130])
    call = heard_by(name, dice, rows)
    if name == "Whisper":
        new = min(new, 20)
    elif new == 130 and dice.random() < 0.8:
        new = 11
    call["max_new_tokens"] = new
    ways = [{}, {"do_sample": True, "top_k": 8}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}]
    beams = {"num_beams": dice.randint(2, 4)}
    ways += [beams, beams | {"early_stopping": True}, beams | {"num_return_sequences": 2, "length_penalty": 0.3}]
    ways += [beams | {"do_sample": True, "top_k": 20}, {"do_sample": True, "num_return_sequences": 2}]
    call |= dice.choice(ways)
    likely = [
        ({"min_new_tokens": dice.randint(1, new)}, 0.4),
        ({"no_repeat_ngram_size": 2}, 0.4),
        ({"repetition_penalty": 1.3}, 0.15),
        ({"bad_words_ids": [[5], [7, 9]]}, 0.1),
        ({"suppress_tokens": [4, 8, 12], "begin_suppress_tokens": [9, 11]}, 0.15),
        ({"eos_token_id": dice.choice([1, [1, 6, 9], [*range(3, 12)]])}, 0.4),
        ({"forced_eos_token_id": 6}, 0.1),
        ({"renormalize_logits": True}, 0.1),
        ({"logits_processor": t.LogitsProcessorList([Third()])}, 0.1),
        ({"stopping_criteria": t.StoppingCriteriaList([t.MaxLengthCriteria(12)])}, 0.1),
        ({"use_cache": False}, 0.05),
        ({"return_dict_in_generate": True}, 0.15),
        ({"return_dict_in_generate": True, "output_scores": True}, 0.2),
        ({"return_dict_in_generate": True, "output_logits": True}, 0.1),
        ({"return_dict_in_generate": True, "output_attentions": True}, 0.05),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, 0.05),
    ]
    for more, share in likely:
        call |= more if dice.random() < share else {}
    if "num_beams" not in call and dice.random() < 0.1:
        call["streamer"] = Notes()
    elif "return_dict_in_generate" in call and "num_beams" not in call and name not in ("Moonshine", "Whisper"):
        call["goes_on"] = dice.random() < 0.5
    if dice.random() < 0.4:
        length = dice.choice([1, 2, 5, 12])
        prompt = torch.tensor([[dice.randrange(3, WORDS) for _ in range(length)] for _ in range(rows)])
        if dice.random() < 0.5:
            prompt[-1, : length // 2] = 0
            call["decoder_attention_mask"] = (prompt > 0).long()
        call["decoder_input_ids"] = prompt
    return call


def run(model, call):
    call = copy.deepcopy(call)
    goes_on = call.pop("goes_on", False)
    torch.manual_seed(3)
    try:
        found = model.generate(**call)
        if goes_on:
            call = {
                name: one for name, one in call.items() if name in ("input_ids", "input_features", "attention_mask")
            }
            more = {"max_new_tokens": 4, "return_dict_in_generate": True, "decoder_input_ids": found.sequences}
            found = model.generate(**call, **more, **{cache_argument(type(model).forward): cache_of(found)})
    except Exception as error:
        return type(error), str(error)[:60]
    seen = call["streamer"].seen if "streamer" in call else None
    return dict(found) if isinstance(found, dict) else found, seen, torch.rand(1)


def random_speech(dice):
    """Arguments of Whisper's own generate()."""
    rows, long = dice.choice([1, 2, 3]), dice.random() < 0.3
    frames = FRAMES * 3 if long else FRAMES
    call = {"rows": rows, "frames": frames, "task": dice.choice(["transcribe", "translate"])}
    call |= {"language": dice.choice(["en", "de"]), "max_new_tokens": dice.choice([1, 4, 10, 14, 20])}
    fallback = {"temperature": (0.0, 0.6, 1.0), "compression_ratio_threshold": 1.05, "logprob_threshold": -1.0}
    likely = [
        ({"return_timestamps": True}, 1.0 if long else 0.6),
        ({"return_token_timestamps": True}, 0.4),
        ({"attention_mask": heard(frames)[:rows]}, 1.0 if long else 0.6),
        ({"num_beams": dice.choice([2, 3])}, 0.3),
        ({"prompt_ids": torch.tensor([PREVIOUS, 5, 6, 7])}, 0.2),
        (fallback, 0.25),
        ({"no_speech_threshold": 0.3, "logprob_threshold": -1.0, "temperature": (0.0, 0.8)}, 0.15),
        ({"condition_on_prev_tokens": True}, 0.2 * long),
        ({"return_segments": True}, 0.15),
        ({"return_dict_in_generate": True}, 0.15),
        ({"return_dict_in_generate": True, "output_scores": True}, 0.15),
        ({"min_new_tokens": 3}, 0.15),
        ({"logits_processor": t.LogitsProcessorList([Third()])}, 0.1),
        ({"no_repeat_ngram_size": 2}, 0.2),
    ]
    for more, share in likely:
        call |= more if dice.random() < share else {}
    if long or "return_timestamps" not in call or dice.random() < 0.15:
        call["force_unique_generate_call"] = True  # else random times may never end
    if not {"temperature", "num_beams"} & call.keys() and dice.random() < 0.3:
        call |= {"do_sample": True, "temperature": 1.2}
    return call


def spoken(model, call):
    try:
        return called(model, call)
    except Exception as error:
        return type(error), str(error)[:60]


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.turns(2)
def test_a_random_call(seed):
    dice = random.Random(seed)
    name = dice.choice(sorted(KINDS))
    model, stock = pair(name, dice.choice(["sdpa", "eager"]))
    call = random_call(name, dice)
    if "input_ids" in call and dice.random() < 0.15:
        ids, mask = call.pop("input_ids"), call.get("attention_mask")
        with torch.no_grad():
            call["encoder_outputs"] = stock.get_encoder()(ids, attention_mask=mask)
    assert_equal(run(model, call), run(stock, call))


@pytest.mark.parametrize("seed", [seed for seed in range(COUNT // 2) if seed not in TIED])
def test_a_random_call_of_whisper(seed):
    model, stock = speaking()
    call = random_speech(random.Random(seed))
    assert_equal(spoken(model, call), spoken(stock, call))
