"""Encoders of sound, and towers that are told how large pictures in one row are."""

import importlib

import pytest
import torch
import transformers as t

import accel
from support.objects.encoders import assert_same_tensors, encoder_of, fallbacks, random_pair

SOUND = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 8}
OMNI = SOUND | {"n_window": 8, "max_source_positions": 20, "output_dim": 24}
ASR = SOUND | {"n_window_infer": 200, "downsample_hidden_size": 16}  # windows of two chunks
VIT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
MERGED = VIT | {"image_size": 32, "patch_size": 4, "insert_layer_id": 1}  # behind which four tokens become one
PADDED = VIT | {"num_mel_bins": 8, "max_source_positions": 20}
CONFORMER = VIT | {"num_mel_bins": 8, "subsampling_conv_channels": 8, "conv_kernel_size": 3}
ROW, ROWS = "inputs of any sizes in one row", "packed: rows of padding are seen, and computed"


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def lengths(*frames):
    """Sounds of so many, side by side."""
    return {"input_features": random(8, sum(frames)), "feature_lens": torch.tensor(frames)}


def heard(most, *frames):
    mask = (torch.arange(most) < torch.tensor(frames)[:, None]).long()
    return {"input_features": random(len(frames), 8, most), "input_features_mask": mask}


def targets(*sizes):
    """Pictures of so many patches, side by side."""
    count = sum(height * width for height, width in sizes)
    return {"pixel_values": random(1, 3, 4, 4 * count), "target_sizes": torch.tensor(sizes)}


def frames(most, *numbers):
    given = heard(most, *numbers)
    return {"input_features": given["input_features"].mT, "attention_mask": given["input_features_mask"]}


# By folder of transformers: a class, its configuration, what is told of it, and calls.
MODELS = {
    "qwen2_5_omni": ("Qwen2_5OmniAudioEncoder", OMNI, ROW, [lengths(40, 7), lengths(3, 33, 18), lengths(16)]),
    "qwen3_omni_moe": (
        "Qwen3OmniMoeAudioEncoder",
        OMNI | ASR | {"n_window": 50},
        ROW,
        [lengths(140, 97), lengths(390)],
    ),
    "qwen3_asr": ("Qwen3ASREncoder", ASR, ROW, [heard(400, 310, 400, 3), heard(100, 100)]),
    "minicpmv4_6": (
        "MiniCPMV4_6VisionModel",
        MERGED,
        ROW,
        [targets((4, 6), (2, 2)), targets((8, 8)), targets((2, 4), (6, 2)) | {"use_vit_merger": False}],
    ),
    "audioflamingo3": ("AudioFlamingo3Encoder", PADDED, ROWS, [heard(40, 40, 40), heard(40, 30, 7)]),
    "lasr": ("LasrEncoder", CONFORMER, ROWS, [frames(80, 80, 30), frames(64, 64)]),
    # Its rows of padding see nothing.
    "parakeet": (
        "ParakeetEncoder",
        CONFORMER,
        ROWS,
        [frames(100, 100, 60, 9), frames(80, 80), {"input_features": random(2, 64, 8)}],
    ),
}


WAVE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
WAVES = WAVE | {"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_conv_pos_embeddings": 16}
WAVES["num_conv_pos_embedding_groups"] = 2
SPECTRA = WAVE | {"patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 8}
MELS = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 8}
MELS |= {"vocab_size": 64, "decoder_layers": 1, "decoder_attention_heads": 4, "max_source_positions": 20}


NEAR = {"feature_projection_input_dim": 8, "left_max_position_embeddings": 7, "right_max_position_embeddings": 2}


def sound(*shape, name="input_values", heard=()):
    """heard: of each row, how much a mask shows."""
    mask = (torch.arange(shape[1]) < torch.tensor(heard)[:, None]).long() if heard else None
    given = {} if mask is None else {"attention_mask": mask}
    return {name: torch.randn(*shape, generator=torch.Generator().manual_seed(1))} | given


SOUNDS = {
    "wav2vec2": (
        lambda: t.Wav2Vec2ForCTC(t.Wav2Vec2Config(**WAVES, vocab_size=20)),
        [sound(2, 600), sound(1, 950), sound(3, 950, heard=(700, 950, 310)), sound(2, 600, heard=(600, 600))],
        "wav2vec2",
    ),
    "hubert": (
        lambda: t.HubertModel(t.HubertConfig(**WAVES, do_stable_layer_norm=True, feat_extract_norm="layer")),
        [sound(2, 600), sound(2, 600, heard=(600, 444))],
        "",
    ),
    "sew-d": (
        lambda: t.SEWDModel(t.SEWDConfig(**WAVES, squeeze_factor=2, position_buckets=8)),
        [sound(2, 600), sound(1, 950)],
        "",
    ),
    "wav2vec2-conformer": (
        lambda: t.Wav2Vec2ConformerModel(t.Wav2Vec2ConformerConfig(**WAVES, conv_depthwise_kernel_size=3)),
        [sound(2, 600), sound(1, 950), sound(2, 600, heard=(600, 444))],
        "",
    ),
    "wav2vec2-bert": (
        lambda: t.Wav2Vec2BertForCTC(t.Wav2Vec2BertConfig(**SOUND, **NEAR, vocab_size=20)),
        [sound(2, 30, 8, name="input_features", heard=(30, 17)), sound(1, 9, 8, name="input_features")],
        "wav2vec2_bert",
    ),
    "ast": (lambda: t.ASTModel(t.ASTConfig(**SPECTRA)), [sound(2, 16, 8)], ""),
    "whisper": (
        lambda: t.WhisperModel(t.WhisperConfig(**MELS, **dict.fromkeys(("pad_token_id", "eos_token_id"), 1))).encoder,
        [sound(2, 8, 40, name="input_features") | {"attention_mask": torch.ones(2, 40)}],
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUNDS)
def test_an_encoder_of_sound_gives_what_stock_gives(name):
    make, calls, path = SOUNDS[name]
    model, stock = random_pair(make)
    rows = {(path, rule): status for path, rule, status, _ in accel.report(accel.optimize(model)).sites}
    assert rows[path, "encoder"] == "patched"
    forward = encoder_of(model)
    assert forward.runner is None or not any(layer.inner for layer in forward.layers)  # own code is given more
    for call in calls:
        assert_same_tensors(model, stock, call)
    assert not fallbacks(model)
    if name == "sew-d":
        assert_same_tensors(model, stock, sound(2, 600, heard=(600, 444)))
        assert fallbacks(model) == ["attention_mask is given"]


def test_padding_is_not_left_out_where_a_layers_own_code_mixes_rows():
    model, stock = random_pair(SOUNDS["wav2vec2-conformer"][0])
    accel.optimize(model, padding="zeros")
    assert_same_tensors(model, stock, sound(2, 600, heard=(600, 244)))
    assert not fallbacks(model)


@pytest.mark.parametrize("folder", MODELS)
def test_a_tower_gives_what_stock_gives(folder):
    name, sizes, told, calls = MODELS[folder]
    kind = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    model, stock = random_pair(lambda: kind(kind.config_class(**sizes)))
    rows = {rule: (status, note) for _, rule, status, note in accel.report(accel.optimize(model)).sites}
    assert rows["encoder"][0] == "patched" and rows["encoder"][1].startswith(told)
    for call in calls:
        assert_same_tensors(model, stock, call)
    assert not fallbacks(model)
