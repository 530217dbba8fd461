"""Swin and its kin: blocks that attend in windows of a picture are fused layers, which give what stock gives."""

import copy

import pytest
import torch
import transformers as t

import accel
from accel.encoders.windows import BoundWindowAttention
from support.noted import noted
from support.objects.encoders import assert_same_tensors, fallbacks, random_pair
from support.state import assert_same_state, snapshot

SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
STAGES = {"out_features": ["stage1", "stage2"]}

HEARS = {"spec_size": 64, "num_mel_bins": 16, "patch_embeds_hidden_size": 8, "hidden_size": 16, "window_size": 4}
HEARS |= {"depths": [2, 2], "num_attention_heads": [2, 4], "num_hidden_layers": 2, "patch_size": 4}


def pictures(*shape):
    return {"pixel_values": torch.randn(shape[0], 3, *shape[1:], generator=torch.Generator().manual_seed(1))}


# Of whole windows of 4 x 4 patches, of parts of some, and of no more than one in the second stage.
CALLS = [pictures(2, 32, 48), pictures(1, 30, 22), pictures(2, 16, 16), pictures(1, 40, 32)]
MODELS = {
    "swin": (lambda: t.SwinForImageClassification(t.SwinConfig(**SWIN, drop_path_rate=0.2)), CALLS),
    "swin-backbone": (lambda: t.SwinBackbone(t.SwinConfig(**SWIN, **STAGES)), CALLS[1:3]),
    "donut": (lambda: t.DonutSwinModel(t.DonutSwinConfig(**SWIN, hidden_act="relu")), CALLS),
    "maskformer": (
        lambda: t.MaskFormerSwinBackbone(t.MaskFormerSwinConfig(**SWIN, **STAGES, qkv_bias=False)),
        [CALLS[0], pictures(1, 9, 22)],
    ),
    # A spectrum as a picture; whether a sound is longer matters to others of its kind.
    "clap": (
        lambda: t.ClapAudioModel(t.ClapAudioConfig(**HEARS)),
        [
            {
                "input_features": torch.linspace(-3, 2, 60 * 16).sin().view(1, 1, 60, 16),
                "is_longer": torch.ones(1, 1) > 0,
            }
        ],
    ),
}


def pair(name):
    """An optimized model with random norms and biases, and a deep copy of it that stays stock."""
    model, stock = random_pair(MODELS[name][0])
    return accel.optimize(model), stock


@pytest.mark.parametrize("name", MODELS)
def test_blocks_give_what_stock_gives(name, monkeypatch):
    model, stock = pair(name)
    ran = noted(monkeypatch, BoundWindowAttention, "attended", lambda self, *_: self)
    (row,) = [row for row in accel.report(model).sites if row[1] == "encoder"]
    assert row[2] == "patched" and row[3].startswith("in windows of pictures")
    for number, call in enumerate(MODELS[name][1], 1):
        assert_same_tensors(model, stock, call | {"output_hidden_states": number == 1})
        assert len(ran) == 4 * number
    assert not fallbacks(model)


def test_pictures_that_are_tried_are_forgotten():
    """Blocks remember the smallest picture, for good: half of an example is smaller than a window here."""
    model = t.SwinModel(t.SwinConfig(**SWIN | {"image_size": 64, "patch_size": 4, "window_size": 7}))
    (row,) = [row for row in accel.report(accel.optimize(model.eval())).sites if row[1] == "encoder"]
    assert row[2] == "patched", row
    assert {block.window_size for stage in model.encoder.layers for block in stage.blocks} == {7}


def test_what_is_added_to_scores_is_followed():
    model, stock = pair("swin")
    for call in CALLS[:2]:
        assert_same_tensors(model, stock, call)
        for one in (model, stock):
            for name, parameter in one.named_parameters():
                if "bias_table" in name:
                    parameter.data.add_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    assert not fallbacks(model)
    assert_same_tensors(model, stock, CALLS[0] | {"output_attentions": True})
    assert fallbacks(model) == ["output_attentions: its layers run stock where each is looked at"]


def test_restore_and_copies():
    torch.manual_seed(0)
    model = MODELS["donut"][0]().eval()
    stock, before = copy.deepcopy(model), snapshot(model)
    again = copy.deepcopy(accel.optimize(model))
    assert_same_tensors(again, stock, CALLS[0])
    assert not fallbacks(again)
    assert_same_state(snapshot(accel.restore(model)), before)
