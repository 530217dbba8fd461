"""Towers that are told how long sounds are, or how large pictures, whose tokens all lie in one row."""

import importlib

import pytest
import torch

import accel
from support.objects.encoders import assert_same_tensors, fallbacks, random_pair

SOUND = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 8}
OMNI = SOUND | {"n_window": 8, "max_source_positions": 20, "output_dim": 24}
ASR = SOUND | {"n_window_infer": 200, "downsample_hidden_size": 16}  # windows of two chunks
VIT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
MERGED = VIT | {"image_size": 32, "patch_size": 4, "insert_layer_id": 1}  # behind which four tokens become one
PADDED = VIT | {"num_mel_bins": 8, "max_source_positions": 20}


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


# By folder of transformers: a class, its configuration, and calls.
MODELS = {
    "qwen2_5_omni": ("Qwen2_5OmniAudioEncoder", OMNI, [lengths(40, 7), lengths(3, 33, 18), lengths(16)]),
    "qwen3_omni_moe": ("Qwen3OmniMoeAudioEncoder", OMNI | ASR | {"n_window": 50}, [lengths(140, 97), lengths(390)]),
    "qwen3_asr": ("Qwen3ASREncoder", ASR, [heard(400, 310, 400, 3), heard(100, 100)]),
    "minicpmv4_6": (
        "MiniCPMV4_6VisionModel",
        MERGED,
        [targets((4, 6), (2, 2)), targets((8, 8)), targets((2, 4), (6, 2)) | {"use_vit_merger": False}],
    ),
    "audioflamingo3": ("AudioFlamingo3Encoder", PADDED, [heard(40, 40, 40), heard(40, 30, 7)]),  # in rows of their own
}


@pytest.mark.parametrize("folder", MODELS)
def test_a_tower_gives_what_stock_gives(folder):
    name, sizes, calls = MODELS[folder]
    kind = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    model, stock = random_pair(lambda: kind(kind.config_class(**sizes)))
    rows = {rule: (status, note) for _, rule, status, note in accel.report(accel.optimize(model)).sites}
    told = "inputs of any sizes in one row" if folder != "audioflamingo3" else "packed: rows of padding are seen"
    assert rows["encoder"][0] == "patched" and rows["encoder"][1].startswith(told)
    for call in calls:
        assert_same_tensors(model, stock, call)
    assert not fallbacks(model)
