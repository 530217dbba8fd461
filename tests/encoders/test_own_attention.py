"""Encoders whose own code runs, with its attentions fused inside: scores of queries and keys are never computed."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers as t

import accel
from accel.encoders.waiting_scores import FusedProducts, WaitingScores
from accel.errors import Unfit
from support.objects.encoders import BART, SIZES, assert_same_tensors, fallbacks, ids_and_mask, random_pair
from support.state import assert_same_state, snapshot

XLM = {"vocab_size": 64, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 40, "pad_index": 2}
FUNNEL = {"vocab_size": 64, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48}
FUNNEL |= {"num_decoder_layers": 1}
LONG = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "local_radius": 5}
IMAGE = {"image_size": 24, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4}
SWIN = {"image_size": 24, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}
PVT = {"image_size": 16, "num_encoder_blocks": 2, "depths": [1, 1], "sequence_reduction_ratios": [2, 1]}
PVT |= {"hidden_sizes": [8, 16], "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2]}
PVT |= {"mlp_ratios": [2, 2]}
WAVES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
WAVES |= {"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_conv_pos_embeddings": 16}
WAVES["num_conv_pos_embedding_groups"] = 2
SPEECH = WAVES | {"vocab_size": 20, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
SPEECH |= {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}


def texts(*lengths):
    ids = torch.randint(4, 64, (2, 70), generator=torch.Generator().manual_seed(1))
    sides = [ids_and_mask(side) for side in (None, "right", "left", "holes")]
    return [*({"input_ids": ids[:, :length]} for length in lengths), *sides]


def given(name, *shapes):
    return [{name: torch.randn(*shape, generator=torch.Generator().manual_seed(1))} for shape in shapes]


SPOKEN = [one | {"decoder_input_ids": torch.arange(3, 8)[None]} for one in given("input_values", (1, 600))]
# By name: a class, its configuration, how many attentions run in a call, and calls.
MODELS = {
    "deberta": (t.DebertaModel, t.DebertaConfig(
        **SIZES, relative_attention=True, pos_att_type=["c2p"], max_relative_positions=9), 2, texts(39)),
    "deberta-head": (t.DebertaV2ForTokenClassification, t.DebertaV2Config(
        **SIZES, relative_attention=True, position_buckets=8, pos_att_type=["p2c"]), 2, texts(3)),
    "xlm": (t.XLMModel, t.XLMConfig(**XLM), 2, texts(1)),
    "xlm-causal": (t.XLMModel, t.XLMConfig(**XLM, causal=True), 2, texts(33)),
    "flaubert": (t.FlaubertModel, t.FlaubertConfig(**XLM), 2, texts(33)),
    "funnel": (t.FunnelModel, t.FunnelConfig(**FUNNEL), 3, texts(33)),
    "convbert": (t.ConvBertModel, t.ConvBertConfig(**SIZES, embedding_size=16), 2, texts(33)),
    "squeezebert": (t.SqueezeBertModel, t.SqueezeBertConfig(**SIZES | {"embedding_size": 32}), 2, texts(33)),
    "ibert": (t.IBertModel, t.IBertConfig(**SIZES), 2, texts(30)),
    "longt5": (t.LongT5EncoderModel, t.LongT5Config(**LONG), 2, texts(65)),
    "vitdet": (t.VitDetModel, t.VitDetConfig(**IMAGE, use_relative_position_embeddings=True, window_size=4), 2,
               given("pixel_values", (2, 3, 24, 24))),
    "swinv2": (t.Swinv2ForImageClassification, t.Swinv2Config(**SWIN), 3,
               given("pixel_values", (2, 3, 24, 24), (1, 3, 20, 28))),
    "pvt": (t.PvtModel, t.PvtConfig(**PVT), 2, given("pixel_values", (2, 3, 16, 16))),
    "timesformer": (t.TimesformerModel, t.TimesformerConfig(**IMAGE, num_frames=2), 4,
                    given("pixel_values", (2, 2, 3, 24, 24))),
    "wavlm": (t.WavLMModel, t.WavLMConfig(**WAVES, num_buckets=8), 2, given("input_values", (2, 600), (1, 950))),
    "speecht5": (t.SpeechT5ForSpeechToText, t.SpeechT5Config(**SPEECH), 2, SPOKEN),
}  # fmt: skip


def made(name):
    kind, config, *_ = MODELS[name]
    return random_pair(lambda: kind(copy.deepcopy(config)), 0.3)


@pytest.fixture
def attended(monkeypatch):
    """Calls of PyTorch's attention, as of products that waited."""
    held, sdpa = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: held.append(len(a)) or sdpa(*a, **k))
    return held


@pytest.mark.parametrize("name", MODELS)
def test_an_encoder_gives_what_stock_gives(name, attended):
    model, stock = made(name)
    rows = [row[2:] for row in accel.report(accel.optimize(model)).sites if row[1] == "encoder" and row[2] != "skipped"]
    assert [status for status, _ in rows] == ["patched"] and "attentions are fused inside of its own code" in rows[0][1]
    for call in MODELS[name][3]:
        attended.clear()
        assert_same_tensors(model, stock, call, 4e-5)
        assert len(attended) == MODELS[name][2]
    assert not fallbacks(model)


def test_calls_that_run_stock():
    model, stock = made("xlm")
    accel.optimize(model)
    call = ids_and_mask()
    assert_same_tensors(model, stock, call | {"output_attentions": True}, 4e-5)
    with model.attentions[0].register_forward_hook(lambda module, args, output: None):
        assert_same_tensors(model, stock, call, 4e-5)
    assert_same_tensors(model, stock, call, 4e-5)
    assert fallbacks(model) == ["output_attentions: its attentions run stock", "code of the user's looks into it"]
    with torch.no_grad():
        given = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1)), torch.ones(1, 5)
        assert torch.equal(model.attentions[0](*given)[0], stock.attentions[0](*given)[0])  # by itself
    model, stock = made("funnel")  # where rounding decides what a sequence attends to that is all padding
    assert_same_tensors(accel.optimize(model), stock, ids_and_mask("empty"), 4e-5)
    assert fallbacks(model) == ["a sequence that is all padding"]
    assert_same_tensors(model.half(), stock.half(), ids_and_mask(), 4e-5)
    assert fallbacks(model)[1:] == ["a mask in float16, where torch.float32 was tried: optimize it again"]


def test_restore_and_copies():
    model, stock = made("deberta-head")
    before = snapshot(model)
    again = copy.deepcopy(accel.optimize(model))
    assert_same_tensors(again, stock, ids_and_mask(), 4e-5)
    assert not fallbacks(again)
    assert_same_state(snapshot(accel.restore(model)), before)


def test_attentions_of_which_some_are_of_another_kind_are_left():
    """Shares are divided between what is near and what all see."""
    config = t.PegasusXConfig(**BART, num_global_tokens=2, block_size=4, stagger_local_blocks=False)
    rows = accel.report(accel.optimize(t.PegasusXModel(config).eval())).sites
    (row,) = [row for row in rows if row[1] == "encoder" and row[0] == "encoder"]
    assert row[2] == "skipped"


def test_a_product_by_a_text_is_looked_at():
    sizes = {"vocab_size": 99, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = t.LongformerConfig(**sizes, attention_window=4, num_hidden_layers=2, max_position_embeddings=64)
    (row,) = [
        row for row in accel.report(accel.optimize(t.LongformerModel(config).eval())).sites if row[1] == "encoder"
    ]
    assert row[2:] == ("skipped", "its own code attends, by a formula that is not known")


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = numbers(2, 3, 5, 8), numbers(2, 3, 7, 8, seed=1), numbers(2, 3, 7, 6, seed=2)
BIAS, MASK = numbers(3, 5, 7, seed=3), torch.arange(7) > torch.tensor([[6], [3]])[:, None, None]


def viewed(scores):
    return (scores.view(6, 5, 7).view(2, 3, 5, 7) + BIAS).view(6, 5, 7).softmax(-1)


def changed(scores):
    scores *= math.sqrt(2)
    scores.masked_fill_(MASK, torch.finfo().min)
    scores += BIAS
    return F.dropout(scores, 0.1, training=False).softmax(dim=3).view(6, 5, 7)


def by_pairs(scores):
    rows, columns = numbers(2, 3, 5, 7, 1, seed=4), numbers(2, 3, 5, 1, 1, seed=5)
    return (scores.view(2, 3, 5, 7, 1) + rows + columns).view_as(scores).float().softmax(-1).view(6, 5, 7)


SHARES = {
    "viewed": (True, viewed),
    "changed": (True, changed),
    "pairs": (True, by_pairs),
    "temperature": (True, lambda s: F.softmax(BIAS + s * numbers(3, 1, 1).exp() - BIAS[:1], -1).view(6, 5, 7)),
    "halves": (False, lambda s: (s.half() / 2).float().chunk(2, dim=0)[0].softmax(-1).repeat(2, 1, 1, 1).view(6, 5, 7)),
    "other axis": (False, lambda s: s.softmax(-2).view(6, 5, 7)),
    "shares changed": (False, lambda s: s.softmax(-1).masked_fill(MASK, 0.0).view(6, 5, 7)),
    "looked at": (False, lambda s: (s + s.amax().item()).softmax(-1).view(6, 5, 7)),
    "alpha": (False, lambda s: torch.add(BIAS, s, alpha=2.0).softmax(-1).view(6, 5, 7)),
    "clamped": (False, lambda s: s.clamp(max=1.0).softmax(-1).view(6, 5, 7)),
    "dropped": (False, lambda s: (s + (s > 0).float()).softmax(-1).view(6, 5, 7)),
}


@pytest.mark.parametrize("name", SHARES)
def test_products_that_wait(name, attended):
    fused, shares = SHARES[name]
    wanted = shares(Q @ K.mT) @ V.flatten(0, 1)
    with FusedProducts():
        got = torch.bmm(shares(torch.matmul(Q, K.transpose(2, 3))), V.flatten(0, 1))
    got = got.computed() if isinstance(got, WaitingScores) else got
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert len(attended) == fused


def test_products_by_equations(attended):
    q, k, v = numbers(2, 5, 3, 8), numbers(2, 7, 3, 8, seed=1), numbers(2, 7, 3, 6, seed=2)

    def attend():
        scores = torch.einsum("bind,bjnd->bnij", q, k)
        return torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), v), scores.softmax(-1).transpose(1, 2)

    wanted = attend()
    with FusedProducts():
        got = attend()
        assert isinstance(torch.einsum("bind,bjnd->bnji", q, k), torch.Tensor)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert len(attended) == 1


@pytest.mark.parametrize("change", [lambda s: s.add_(BIAS), lambda s: s.clamp_(max=0.5), lambda s: s.sum() + s.exp_()])
def test_a_change_in_place_that_a_view_would_show_is_refused(change):
    wanted = Q @ K.mT
    change(wanted)
    with FusedProducts():
        scores, other = Q @ K.mT, Q @ K.mT
        change(other)
        assert torch.equal(other + 0.0, wanted)
        scores.view(6, 5, 7)
        with pytest.raises(Unfit, match="seen elsewhere"):
            change(scores)
        other[0] = 0.0
        assert not (other[0] * 2).any() and torch.equal(other[1] + 0.0, wanted[1])


def test_a_forward_that_writes_into_its_weights_is_not_tried():
    """RWKV's first one divides some and notes that on the model: what was noted was put back, they were not."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "attention_hidden_size": 32, "num_hidden_layers": 4}
    model = t.RwkvModel(t.RwkvConfig(vocab_size=64, rescale_every=2, **sizes)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = accel.report(accel.optimize(model))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert any("its forward writes into its weights" in row[3] for row in report.sites)
