"""generate() of more families, known by what they hold."""

import copy
from itertools import cycle, islice

import pytest
import torch
import transformers as t
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutput

import accel
from accel.cuda_graphs.pool import GraphPool
from accel.seq2seq import fixed_memory
from accel.seq2seq.memory_attention import BoundMemoryAttention, MemoryStep
from support.noted import noted
from support.objects.seq2seq import (
    LAYERS,
    MAKES,
    OTHERS,
    STEPS,
    T5,
    TEXT,
    WIDTH,
    WORDS,
    assert_same,
    fallbacks,
    gemmas,
    moonshine,
    optimized,
    options,
    seamless,
    source,
    speech_to_text,
)


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_are_known_by_what_they_hold(name, steps, attended, monkeypatch):
    monkeypatch.setitem(MAKES, name, OTHERS[name])
    model, stock = optimized(name)
    ran = steps()
    assert_same(model, stock, source(name), options())
    assert len(ran) >= STEPS - 1 and True in attended and not fallbacks(model)


@pytest.mark.parametrize("padded", [None, 6])
@pytest.mark.turns(2)
def test_moonshine_whose_encoder_gives_a_mask_too(padded, steps, attended, monkeypatch):
    monkeypatch.setitem(MAKES, "Moonshine", lambda: moonshine(padded))
    model, stock = optimized("Moonshine")
    ran = steps()
    attended.clear()
    call = {"input_values": torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))}
    assert_same(model, stock, call, options())
    assert ran == [2] * STEPS and attended == [False, True] * LAYERS * STEPS
    mask = (torch.arange(4000) < torch.tensor([[4000], [2500]])).long()
    assert_same(model, stock, call | {"attention_mask": mask}, options(num_beams=2))
    assert ran[STEPS:] == [4] * STEPS and not fallbacks(model)


@pytest.mark.parametrize("make", [speech_to_text, seamless])
@pytest.mark.turns(2)
def test_speech_whose_mask_is_of_frames(make, steps, attended, monkeypatch):
    monkeypatch.setitem(MAKES, "speech", make)
    model, stock = optimized("speech")
    ran = steps()
    attended.clear()
    call = {"input_features": torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0))}
    mask = (torch.arange(40) < torch.tensor([[40], [23]])).long()
    for given in ({}, {"attention_mask": mask}):
        assert_same(model, stock, call | given, options(num_beams=2))
    assert ran == [4] * 2 * STEPS and attended == [False, True] * LAYERS * len(ran)
    assert not fallbacks(model)
    if make is speech_to_text:  # whose own code takes this mask too
        odd = {"input_features": call["input_features"][:1], "attention_mask": torch.ones(1, 1, 40, 40) > 0}
        torch.testing.assert_close(
            *(one(**odd, decoder_input_ids=torch.tensor([[3]])).logits for one in (model, stock))
        )


@torch.no_grad()
@pytest.mark.turns(2)
def test_windows_that_a_text_has_not_passed(steps, monkeypatch):
    monkeypatch.setitem(MAKES, "T5Gemma", gemmas)
    model, stock = optimized("T5Gemma")
    ran = steps()
    for chosen in ({}, {"num_beams": 2}):
        assert_same(model, stock, source("T5Gemma"), options(**chosen))
    assert len(ran) >= 2 * (STEPS - 1) and not fallbacks(model)
    shown = []
    for one in (model, stock):
        given = {"decoder_input_ids": torch.arange(4, 18).view(2, 7), "use_cache": True}
        first = one(**source("T5Gemma"), **given)
        more = {"encoder_outputs": (first.encoder_last_hidden_state,), "past_key_values": first.past_key_values}
        more["encoder_outputs"] = BaseModelOutput(*more["encoder_outputs"])
        step = one(**more, decoder_input_ids=torch.full((2, 1), 5), use_cache=True)
        copied = copy.deepcopy(step.past_key_values)
        later = [one(**more | {"past_key_values": cache}, **given) for cache in (copied, step.past_key_values)]
        shown.append([step.decoder_hidden_states[0], *(output.logits for output in later)])
        assert {type(layer) for layer in copied.self_attention_cache.layers} == {
            DynamicSlidingWindowLayer,
            DynamicLayer,
        }
    torch.testing.assert_close(*shown, rtol=1e-5, atol=1e-4)
    long = options(160, min_new_tokens=139, eos_token_id=[*range(3, 60)], return_dict_in_generate=True)
    assert_same(model, stock, source("T5Gemma", rows=1), long)
    assert "a window that a text of this length may pass" in fallbacks(model)


def gemmas_of_pictures():
    """Whose layers attend once, to both parts of the cache at a time."""
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 140, "query_pre_attn_scalar": 8}
    eyes = {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "num_hidden_layers": 1}
    eyes |= {"hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4}
    tokens = {"image_token_index": 61, "eoi_token_index": 62}
    encoder = {"text_config": sizes, "vision_config": eyes, "mm_tokens_per_image": 4, "boi_token_index": 63, **tokens}
    return t.T5Gemma2ForConditionalGeneration(t.T5Gemma2Config(encoder=encoder, decoder=sizes, **tokens))


def test_a_text_of_an_encoder_that_sees_pictures_too(steps, monkeypatch):
    monkeypatch.setitem(MAKES, "T5Gemma2", gemmas_of_pictures)
    model, stock = optimized("T5Gemma2")
    ran, call = steps(), source("T5Gemma2")
    call["input_ids"] = call["input_ids"] % 58 + 3
    assert_same(model, stock, call, options(num_beams=2))
    assert len(ran) >= STEPS - 1 and not fallbacks(model)


def speech_to_words():
    """Fewer frames than a trial's mask has give no token at all."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    ears = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2}
    encoder = t.Wav2Vec2Config(**sizes, **ears, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    decoder = t.BartConfig(**TEXT, is_decoder=True, add_cross_attention=True, is_encoder_decoder=False)
    return t.SpeechEncoderDecoderModel(t.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder))


def test_a_mask_of_frames_that_a_trial_cannot_hide(steps, monkeypatch):
    monkeypatch.setitem(MAKES, "speech", speech_to_words)
    model, stock = optimized("speech")
    ran = steps()
    call = {"input_values": torch.randn(2, 540, generator=torch.Generator().manual_seed(1))}
    call["attention_mask"] = (torch.arange(540) < torch.tensor([[540], [240]])).long()
    chosen = {"max_new_tokens": STEPS, "output_logits": True, "return_dict_in_generate": True}
    chosen |= {"decoder_start_token_id": 2, "pad_token_id": 0, "eos_token_id": None}
    ours, theirs = (torch.stack(one.generate(**call, **chosen).logits) for one in (model, stock))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    assert ran


def pictures_to_text(config, **more):
    """As Donut and TrOCR, whose texts are written by a decoder inside of another model. BERT counts by itself."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    encoder = t.ViTConfig(**sizes, image_size=16, patch_size=4)
    sizes = TEXT | sizes | {"num_hidden_layers": 2, "n_embd": WIDTH, "n_layer": 2, "n_head": 4} | more
    decoder = config(**sizes, is_decoder=True, add_cross_attention=True, is_encoder_decoder=False)
    both = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return t.VisionEncoderDecoderModel(both)


@pytest.mark.parametrize("config", [t.MBartConfig, t.TrOCRConfig, t.GPT2Config, t.BertConfig])
def test_texts_of_pictures(config, steps, attended, monkeypatch):
    monkeypatch.setitem(MAKES, "pictures", lambda: pictures_to_text(config))
    model, stock = optimized("pictures")
    ran = steps()
    call = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    assert_same(model, stock, call, options() | {"decoder_start_token_id": 2, "pad_token_id": 0, "eos_token_id": 1})
    assert len(ran) >= STEPS - 1 and True in attended and not fallbacks(model)


def test_no_step_reads_behind_the_positions_that_a_model_counts(steps, monkeypatch):
    """Where stock raises, as it has none to give; a GPU would not come back from that place."""
    monkeypatch.setitem(MAKES, "pictures", lambda: pictures_to_text(t.BertConfig, max_position_embeddings=6))
    model, stock = optimized("pictures")
    ran, call = steps(), {"pixel_values": torch.zeros(1, 3, 16, 16), "max_new_tokens": 8, "min_new_tokens": 8}
    for one in (model, stock):
        with pytest.raises(RuntimeError, match="must match the existing size"):
            one.generate(**call, decoder_start_token_id=2, pad_token_id=0, eos_token_id=1)
    assert len(ran) == 6 and "more tokens than there are positions for" in fallbacks(model)


@pytest.mark.parametrize(("calls", "told"), [(1, "its layers fused"), (10**6, "its layers in the model's own code")])
def test_what_a_first_call_alone_waits_for_is_no_wait_of_steps(calls, told, monkeypatch):
    """As kernels that check themselves do."""
    waits = iter(range(calls))
    noted(
        monkeypatch,
        BoundMemoryAttention,
        "attended",
        lambda bound, kernels, step, parts, *_: [parts[0].any().item() for _ in islice(waits, 1)],
    )
    model, _ = optimized("Bart")
    assert any(told in str(site) for site in accel.report(model).sites)


@pytest.mark.parametrize("family", ["Bart", "T5"])
def test_a_text_that_is_all_padding_runs_stock(family):
    """Its attention sees nothing, of which stock's makes a mean. The next text is seen to be another one."""
    model, stock = optimized(family)
    call = source(family)
    call["attention_mask"][1] = 0
    assert_same(model, stock, call, options())
    assert set(fallbacks(model)) == {"a sequence that is all padding"}
    call["attention_mask"][1, :4] = 1
    before = [one[2] for one in accel.report(model).fallbacks]
    assert_same(model, stock, call, options())
    assert [one[2] for one in accel.report(model).fallbacks] == before


@torch.no_grad()
def test_first_tokens_that_stock_refuses_are_refused_once():
    """Else in other words, as the cache has begun by then."""
    model, stock = optimized("Bart")
    given = {"encoder_outputs": BaseModelOutput(torch.zeros(3, 7, WIDTH)), "decoder_input_ids": torch.ones(2, 9).long()}
    told = []
    for one in (model, stock):
        with pytest.raises(RuntimeError) as error:
            one(**given, past_key_values=t.EncoderDecoderCache(t.DynamicCache(), t.DynamicCache()))
        told.append(str(error.value))
    assert told[0] == told[1]
    assert not fallbacks(model)


def test_padding_of_a_model_of_several_texts_is_not_known():
    """And no reason to run the encoder stock."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 48, "vocab_size": WORDS}
    sound = t.EncodecConfig(num_filters=2, hidden_size=8, num_lstm_layers=1, codebook_size=WORDS, codebook_dim=8)
    parts = {"text_encoder": t.T5Config(**T5), "audio_encoder": sound, "decoder": t.MusicgenDecoderConfig(**sizes)}
    model = accel.optimize(t.MusicgenForConditionalGeneration(t.MusicgenConfig(**parts)).eval())
    assert ("text_encoder.encoder", "encoder", "patched") in [row[:3] for row in accel.report(model).sites]


@pytest.mark.turns(2)
def test_graphs_go_with_the_memory_that_they_were_captured_over(monkeypatch):
    """Also where what comes next lies at the same addresses; and stores do not become ever more."""
    model, stock = optimized("Bart")
    runner, memory, dropped = vars(model)["forward"].runner, vars(model)["forward"].memory, []
    monkeypatch.setattr(GraphPool, "drop", lambda pool, graph: dropped.append(graph))
    monkeypatch.setattr(MemoryStep, "pages", lambda *_: True)
    monkeypatch.setattr(fixed_memory, "STORES", 3)
    zeros, places = torch.zeros, cycle([torch.zeros(100_000), torch.zeros(100_000)])

    def flat(*size, **given):
        return next(places)[: size[0]] if given.get("dtype") is torch.float32 else zeros(*size, **given)

    monkeypatch.setattr(torch, "zeros", flat)
    for rows, graph in ((2, "no memory"), (3, "less memory"), (2, "kept"), (1, "many stores")):
        runner.entries["text"] = graph
        assert_same(model, stock, source("Bart", rows=rows), options())
    assert dropped == ["no memory", "less memory", "many stores"]
    assert len(memory.stores) == 2
