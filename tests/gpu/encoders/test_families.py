"""Encoders of other families on a GPU: scores by content and distance, a decoder's class and cache, 8 bits, sound."""

import copy

import pytest
import torch
import transformers as t

import accel
from accel.bench.encoders.texts import batched, texts
from accel.comparison import relative_rms
from accel.libraries.cache import cache_of
from accel.llm.recording.reach import reach_of
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.window import window
from support.llm import multimodal

SIZES = {"vocab_size": 500, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 512, "max_position_embeddings": 600, "num_labels": 64}
RELATIVE = {"relative_attention": True, "position_buckets": 64, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
RELATIVE |= {"norm_rel_ebd": "layer_norm", "position_biased_input": False}
MODELS = {
    "DebertaV2": t.DebertaV2Config(**SIZES, **RELATIVE),
    "Deberta": t.DebertaConfig(**SIZES, **RELATIVE | {"max_relative_positions": -1}),
    "RoFormer": t.RoFormerConfig(**SIZES),
    "Qwen3": t.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=64, pad_token_id=1),
}
WAVES = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}


def made(kind, config, **options):
    torch.manual_seed(0)
    stock = getattr(t, kind)(config).cuda().eval().requires_grad_(False)
    half = copy.deepcopy(stock).bfloat16()
    return accel.optimize(copy.deepcopy(half), **options), half, stock


@torch.no_grad()
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("family", MODELS)
def test_classes_of_texts_of_any_lengths(family):
    model, half, stock = made(f"{family}ForSequenceClassification", MODELS[family])
    for batch in batched(texts(64, 500, 300), 16, torch.device("cuda")):
        exact, allowed = stock(**batch).logits, half(**batch).logits
        for _ in range(4):
            assert relative_rms(model(**batch).logits, exact) <= 1.3 * relative_rms(allowed, exact) + 1e-4
    assert not accel.report(model).fallbacks
    assert [one for one in accel.report(model).graphs if one["status"] == "graph"]


@torch.no_grad()
def test_each_call_has_a_cache_of_its_own():
    model, half, _ = made("Qwen3Model", MODELS["Qwen3"])
    calls = [torch.arange(4, 44, device="cuda").view(2, 20) + at for at in range(6)]
    outputs = [model(ids) for ids in calls]
    for ids, output in list(zip(calls, outputs, strict=True))[::-1]:
        assert torch.equal(cache_of(output).layers[1].keys, cache_of(half(ids)).layers[1].keys)


@torch.no_grad()
@pytest.mark.usefixtures("exact")
def test_products_in_8_bits():
    model, _, stock = made("BertModel", t.BertConfig(**SIZES), weights="int8", activations="int8")
    for batch in batched(texts(64, 500, 300), 16, torch.device("cuda")):
        shown = batch["attention_mask"].bool()
        for _ in range(4):
            got, exact = (one(**batch).last_hidden_state[shown] for one in (model, stock))
            assert 1e-4 < relative_rms(got, exact) < 0.05
    assert not accel.report(model).fallbacks


@torch.no_grad()
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("kind", "graphs"), [("Wav2Vec2", 2), ("Wav2Vec2Conformer", 1)]
)  # own code has no masks' graphs
def test_sound(kind, graphs):
    model, half, stock = made(f"{kind}Model", getattr(t, f"{kind}Config")(**WAVES))
    for heard in ([16000] * 3, [16000, 9000, 4000], [11000, 16000, 2000]):
        wave = torch.randn(3, 16000, device="cuda")
        mask = (torch.arange(16000, device="cuda") < torch.tensor(heard, device="cuda")[:, None]).long()
        given = {} if min(heard) == 16000 else {"attention_mask": mask}
        exact, allowed = (one.last_hidden_state for one in (stock(wave, **given), half(wave.bfloat16(), **given)))
        for _ in range(4):
            got = model(wave.bfloat16(), **given).last_hidden_state
            assert relative_rms(got, exact) <= 1.3 * relative_rms(allowed, exact)
    assert not accel.report(model).fallbacks
    assert len([one for one in accel.report(model).graphs if one["status"] == "graph"]) >= graphs


@torch.no_grad()
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("family", ["DebertaV2", "Deberta"])
def test_rows_of_padding_from_which_a_mask_hides_all(family):
    model, half, stock = made(f"{family}Model", MODELS[family])
    (note,) = [one[3] for one in accel.report(model).sites if one[1] == "encoder"]
    assert note.startswith("packed: rows of padding are seen, and computed")
    ids = torch.arange(4, 454, device="cuda").view(3, 150)
    mask = (torch.arange(150, device="cuda") < torch.tensor([[150], [20], [97]], device="cuda")).long()
    for shown in (mask, mask.flip(1)):
        exact, allowed = (one(ids, shown).last_hidden_state for one in (stock, half))
        for _ in range(4):
            got = model(ids, shown).last_hidden_state
            for rows in (shown.bool(), ~shown.bool()):
                assert relative_rms(got[rows], exact[rows]) <= 1.3 * relative_rms(allowed[rows], exact[rows]) + 1e-4
    assert not accel.report(model).fallbacks


XLM = {"vocab_size": 500, "emb_dim": 256, "n_layers": 2, "n_heads": 4}
SWIN = {"image_size": 128, "embed_dim": 64, "depths": [2, 2], "num_heads": [2, 4], "window_size": 8}
OWN = {  # by class: a configuration and an input
    "DebertaModel": (  # rows of padding see nothing
        t.DebertaConfig(**SIZES, relative_attention=True, pos_att_type=["c2p"], max_relative_positions=128),
        lambda: {"input_ids": torch.arange(4, 370).view(2, 183)},
    ),
    "XLMModel": (t.XLMConfig(**XLM), lambda: {"input_ids": torch.arange(4, 370).view(2, 183)}),
    "Swinv2Model": (t.Swinv2Config(**SWIN), lambda: {"pixel_values": torch.randn(3, 3, 128, 128)}),
    "SwinModel": (t.SwinConfig(**SWIN | {"window_size": 7}), lambda: {"pixel_values": torch.randn(3, 3, 130, 190)}),
    "DonutSwinModel": (t.DonutSwinConfig(**SWIN), lambda: {"pixel_values": torch.randn(3, 3, 128, 128)}),
    "WavLMModel": (t.WavLMConfig(**WAVES), lambda: {"input_values": torch.randn(2, 16000)}),
}


@torch.no_grad()
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", OWN)
def test_attentions_inside_of_own_code(kind):
    model, half, stock = made(kind, OWN[kind][0])
    told = [one for one in accel.report(model).sites if one[1] == "encoder"]
    assert any(one[2] == "patched" for one in told), told
    call = {name: one.cuda() for name, one in OWN[kind][1]().items()}
    low = {name: one.bfloat16() if one.is_floating_point() else one for name, one in call.items()}
    masks = [{}]
    if "input_ids" in call:
        mask = torch.ones_like(call["input_ids"])
        mask[1, 100:] = 0
        masks += [{"attention_mask": mask}, {"attention_mask": mask.flip(1)}]
    for more in masks:
        shown = more.get("attention_mask", torch.ones(())).bool()
        exact, allowed = (one(**given, **more).last_hidden_state for one, given in ((stock, call), (half, low)))
        if shown.dim():
            exact, allowed = exact[shown], allowed[shown]
        for _ in range(4):
            got = model(**low, **more).last_hidden_state
            assert relative_rms(got[shown] if shown.dim() else got, exact) <= 1.3 * relative_rms(allowed, exact) + 1e-4
    reasons = {(one["status"], one["reason"][:14]) for one in accel.report(model).graphs}
    read = kind == "XLMModel"  # it asks the GPU how long texts are
    assert reasons == {("eager", "capture failed") if read else ("graph", "")}
    assert bool(accel.report(model).fallbacks) <= read and torch.rand(9, device="cuda").unique().numel() > 1


@torch.no_grad()
@pytest.mark.usefixtures("exact")
def test_own_code_encodes_for_a_decoder():
    sizes = {"vocab_size": 500, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    sizes["decoder_start_token_id"] = 0
    torch.manual_seed(0)
    stock = t.LongT5ForConditionalGeneration(t.LongT5Config(**sizes, local_radius=15)).cuda().eval()
    model = accel.optimize(copy.deepcopy(stock))
    ids = torch.arange(4, 204, device="cuda").view(2, 100)
    mask = torch.ones_like(ids)
    mask[1, 60:] = 0
    for length in (100, 37, 100, 100):
        call = {"input_ids": ids[:, :length], "attention_mask": mask[:, :length], "max_new_tokens": 6}
        assert torch.equal(model.generate(**call), stock.generate(**call))
    assert not accel.report(model).fallbacks


BARK = {"block_size": 40, "hidden_size": 32, "num_heads": 4, "num_layers": 2, "input_vocab_size": 64}
BARK["output_vocab_size"] = 64


@torch.no_grad()
def test_what_is_tried_reads_no_table_behind_its_end():
    """Which on a CPU is an error that is caught, and here the end of the process."""
    seen = torch.ones(2, 7, dtype=torch.bool, device="cuda")
    for found in (reach_of, window):
        with pytest.raises(NotUnderstood, match="more than positions"):
            found(lambda row, head, query, key: seen[row, key] & (key <= query))
    config = t.RobertaConfig(**SIZES, type_vocab_size=1, pad_token_id=5, is_decoder=True)
    for model in (
        t.RobertaForCausalLM(config),
        multimodal.MODELS["glm4v"]()[0],
        t.T5ForConditionalGeneration(t.T5Config()),
        t.BarkSemanticModel(t.BarkSemanticConfig(**BARK)),
    ):
        accel.optimize(model.cuda().eval())
        torch.cuda.synchronize()
