"""Steps of encoder-decoder models on a GPU: really replayed, for every length, and never over another text's keys."""

import copy

import pytest
import torch
import transformers as t

import accel
from accel.cuda_graphs.fingerprint import Fingerprint
from accel.libraries.cache import cache_of
from accel.seq2seq.memory_attention import MemoryStep
from accel.seq2seq.processors import quicker
from support.kernels.waiting import waits_noted
from support.noted import noted
from support.objects.seq2seq import Rounded

pytestmark = pytest.mark.usefixtures("exact")

TEXT = {"vocab_size": 256, "d_model": 64, "forced_eos_token_id": None}
for side in ("encoder", "decoder"):
    TEXT |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 128}
T5 = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
AUDIO = TEXT | {"max_source_positions": 50, "num_mel_bins": 16, "pad_token_id": 0, "bos_token_id": 1}
AUDIO |= {"eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None}
MAKES = {
    "Bart": lambda: t.BartForConditionalGeneration(t.BartConfig(**TEXT)),
    "Mvp": lambda: t.MvpForConditionalGeneration(t.MvpConfig(**TEXT)),  # whose attention is its own code
    "M2M100": lambda: t.M2M100ForConditionalGeneration(t.M2M100Config(**TEXT)),
    "T5": lambda: t.T5ForConditionalGeneration(t.T5Config(**T5, decoder_start_token_id=0)),
}
TEXTS = [*MAKES]
MAKES["Whisper"] = lambda: t.WhisperForConditionalGeneration(t.WhisperConfig(**AUDIO))
SPOKEN = {"vocab_size": 256, "hidden_size": 72, "intermediate_size": 128, "decoder_start_token_id": 3}
SPOKEN |= {
    f"{side}_num_{what}": n
    for side in ("encoder", "decoder")
    for what, n in (("hidden_layers", 2), ("attention_heads", 4))
}
SPOKEN |= {"pad_head_dim_to_multiple_of": 8}  # heads of 18, rotated in part
MAKES["Moonshine"] = lambda: t.MoonshineForConditionalGeneration(t.MoonshineConfig(**SPOKEN))


def made(family, dtype=torch.float32):
    """A model with random weights."""
    torch.manual_seed(0)
    model = MAKES[family]().eval().cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.to(dtype)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", TEXTS)
def test_one_graph_serves_texts_of_every_length(family, implementation, monkeypatch):
    stock = made(family)
    stock.set_attn_implementation(implementation)
    ours = accel.optimize(copy.deepcopy(stock), graphs=True)
    runner = vars(ours)["forward"].runner
    looked = noted(monkeypatch, Fingerprint, "holds", lambda *_: 1)
    stores = noted(monkeypatch, MemoryStep, "kv", lambda step, part, index: step.stores[part] is not None)
    for text, (rows, length, tokens, beams) in enumerate(
        [(3, 60, 40, 4), (3, 9, 40, 1), (3, 33, 100, 1), (3, 50, 20, 4), (12, 64, 20, 1), (3, 9, 40, 1)]
    ):
        ids = torch.randint(5, 256, (rows, length), device="cuda")
        mask = (
            torch.arange(length, device="cuda") < length - 4 * torch.arange(rows, device="cuda")[:, None].clamp(max=2)
        ).long()
        call = {"attention_mask": mask, "max_new_tokens": tokens, "min_new_tokens": tokens, "num_beams": beams}
        call |= {"no_repeat_ngram_size": 2}
        assert torch.equal(ours.generate(ids, **call), stock.generate(ids, **call)), text
    graphs = [entry for entry in runner.entries.values() if entry.graph is not None]
    assert len(graphs) == 2 and runner.replays > 150, accel.report(ours)  # of 3 and of 12 rows
    assert accel.report(ours).fallbacks == [] and stores and all(stores)
    assert len(looked) < runner.replays / 2  # no code of others runs between steps


GEMMA = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
GEMMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 512}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"]}
GEMMAS = {"encoder": GEMMA, "decoder": GEMMA | {"cross_attention_hidden_size": 64}, "vocab_size": 256}


def test_layers_with_windows_are_in_graphs(monkeypatch):
    """By the model's own code: its scores are capped, where they are not left to SDPA."""
    monkeypatch.setitem(MAKES, "T5Gemma", lambda: t.T5GemmaForConditionalGeneration(t.T5GemmaConfig(**GEMMAS)))
    stock = made("T5Gemma")
    ours = accel.optimize(copy.deepcopy(stock), graphs=True)
    ids = torch.randint(5, 256, (3, 40), device="cuda")
    mask = (torch.arange(40, device="cuda") < torch.tensor([[40], [31], [12]], device="cuda")).long()
    for more in ({}, {"num_beams": 2}, {}):
        call = {"attention_mask": mask, "max_new_tokens": 60, "min_new_tokens": 60} | more
        assert torch.equal(ours.generate(ids, **call), stock.generate(ids, **call))
    assert vars(ours)["forward"].runner.replays > 100 and accel.report(ours).fallbacks == []


@torch.no_grad()
@pytest.mark.parametrize("kind", [None, "int8"])
@pytest.mark.parametrize("family", MAKES)
def test_logits_in_bf16_are_as_close_as_those_of_stock(family, kind):
    """To float32, of the same tokens step by step; beside other rows, and with padding of what the encoder read.

    kind: in which all keep that; stock in numbers that have been rounded so.
    """
    stock = made(family, torch.bfloat16)
    exact, ours = copy.deepcopy(stock).float(), accel.optimize(copy.deepcopy(stock), graphs=True, kv_cache=kind)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, 256, (3, 40), generator=generator).cuda()
    if family == "Whisper":
        call = {"input_features": torch.randn(3, 16, 100, generator=generator).cuda()}
    elif family == "Moonshine":
        call = {"input_values": torch.randn(3, 16000, generator=generator).cuda()}
    else:
        mask = (torch.arange(50) < torch.tensor([[50], [31], [7]])).long().cuda()
        call = {"input_ids": torch.randint(5, 256, (3, 50), generator=generator).cuda(), "attention_mask": mask}

    def logits(model):
        given = {name: one.to(model.dtype) if one.is_floating_point() else one for name, one in call.items()}
        hidden = model.get_encoder()(**given)
        more = {"encoder_outputs": hidden} | {n: one for n, one in given.items() if n == "attention_mask"}
        own, found = {"config": model.get_decoder().config}, []
        crossing = t.DynamicCache if kind is None or model is ours else Rounded
        cache = t.EncoderDecoderCache(t.DynamicCache(**own), crossing(**own))
        for at in range(tokens.shape[1]):
            output = model(decoder_input_ids=tokens[:, at : at + 1], cache=cache, use_cache=True, **more)
            cache = cache_of(output)
            found.append(output.logits.float())
        return torch.cat(found, 1)

    wanted = logits(exact)
    off, usual = ((logits(model) - wanted).norm() / wanted.norm() for model in (ours, stock))
    assert off <= 1.5 * usual, (off, usual)
    assert vars(ours)["forward"].runner.replays > 30 and accel.report(ours).fallbacks == []


def test_processors_of_speech_give_what_stock_gives_and_never_wait():
    """Stock's look for the tokens that are suppressed sorts the vocabulary, and waits for how many it finds."""
    config = t.GenerationConfig(eos_token_id=50257, no_timestamps_token_id=50364, max_initial_timestamp_index=50)
    stock = [
        t.SuppressTokensAtBeginLogitsProcessor([220, 50257], begin_index=3),
        t.SuppressTokensLogitsProcessor(list(range(90)), device="cuda"),
        t.WhisperTimeStampLogitsProcessor(config, begin_index=3),
    ]
    ours, theirs = quicker(stock), t.LogitsProcessorList(stock)
    for length in (3, 3, 4, 5, 90, 90):
        ids = torch.randint(50257, (8, length), device="cuda")
        ids[::2, length // 2 :] = 50400
        scores = 3 * torch.randn(8, 51866, device="cuda")
        wanted = theirs(ids, scores)
        ours(ids, scores)  # masks are made once, and kernels compiled
        with waits_noted("error"):
            found = ours(ids, scores)
        assert torch.equal(found, wanted)
