"""Encoders of images: fused layers give what stock gives, alone, under heads, in towers, as backbones."""

import copy
import importlib

import pytest
import torch
import transformers as t

import accel
from accel.comparison import relative_rms
from accel.encoders.packing import blocks_of
from accel.fusion.patch_embedding import is_patch_embedding
from support.everything import always
from support.objects.encoders import assert_same_tensors, fallbacks, random_pair
from support.objects.pictures import grids, images, merged, patches, placed, renamed, shown, sized
from support.state import assert_same_state, snapshot

DINO2 = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
VIT = DINO2 | {"intermediate_size": 48}
TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT |= {"max_position_embeddings": 16, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1)}
NAFLEX = {name: one for name, one in VIT.items() if name != "image_size"} | {"num_patches": 16}
PAIRS = {"image_size": [16, 16], "patch_size": [4, 4]}
STAGES = {"out_features": ["stage1", "stage2"]}
DEPTH = {"reassemble_hidden_size": 32, "reassemble_factors": [4, 2], "neck_hidden_sizes": [8, 8], "head_hidden_size": 8}
DEPTH |= {"patch_size": 4, "fusion_hidden_size": 8}
DEPTH["backbone_config"] = t.Dinov2Config(**DINO2, **STAGES, reshape_hidden_states=False)


def pairs(given):
    return {"input_ids": torch.randint(2, 64, (3, 16), generator=torch.Generator().manual_seed(2)), **given}


def towers(kind, vision):
    return lambda: getattr(t, f"{kind}Model")(getattr(t, f"{kind}Config")(text_config=TEXT, vision_config=vision))


QWEN = {"depth": 3, "num_heads": 4, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48}
QWEN2_5 = QWEN | {"out_hidden_size": 24, "window_size": 16, "fullatt_block_indexes": [1]}  # windows of 4 x 4 patches
QWEN3 = QWEN | {"out_hidden_size": 24, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
QWEN3 |= {"spatial_merge_size": 2}
QWEN2 = {"depth": 2, "num_heads": 4, "patch_size": 4, "embed_dim": 32, "hidden_size": 24, "mlp_ratio": 2}
SEVERAL = [grids((1, 6, 10), (2, 4, 2), (1, 2, 8)), grids((1, 4, 4)), grids((1, 2, 2), (1, 4, 6))]


PLACED = [placed((6, 6), (3, 6), (9, 3)), placed((6, 3)) | {"output_hidden_states": True}]
LLAMA4 = VIT | {"image_size": 80, "intermediate_size": 128}
LLAMA4 |= dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 32)
GEMMA4 = {name: one for name, one in VIT.items() if name != "image_size"}
GEMMA4 |= {"head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 16, "use_clipped_linears": True}


def gemma4(bound=None):
    """Whose linears clamp what they are given and what they give to at most the bound."""
    model = of("gemma4", "Gemma4VisionModel", t.Gemma4VisionConfig, GEMMA4)()
    for one in (one for name, one in model.named_buffers() if bound and name.endswith("_max")):
        one.fill_(bound)
    return model


def of(folder, name, config, sizes):
    """A class that transformers has, and does not show."""
    kind = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    return lambda: kind(config(**sizes))


# By name: a model, calls of it, and where its encoder is.
MODELS = {
    "vit": (lambda: t.ViTForImageClassification(t.ViTConfig(**VIT)), [images(), images(1)], "vit"),
    "vit-sizes": (
        lambda: t.ViTModel(t.ViTConfig(**VIT)),
        [images(2, 20, 12) | {"interpolate_pos_encoding": True}, images() | {"output_hidden_states": True}],
        "",
    ),
    "vit-masked": (
        lambda: t.ViTForMaskedImageModeling(t.ViTConfig(**VIT, encoder_stride=4)),
        [images() | {"bool_masked_pos": torch.arange(48).view(3, 16) % 3 == 0}],
        "vit",
    ),
    "videomae": (
        lambda: t.VideoMAEForVideoClassification(t.VideoMAEConfig(**VIT, num_frames=4)),
        [{"pixel_values": torch.randn(2, 4, 3, 16, 16, generator=torch.Generator().manual_seed(1))}],
        "videomae",
    ),
    "vitpose": (
        lambda: t.VitPoseForPoseEstimation(
            t.VitPoseConfig(
                backbone_config=t.VitPoseBackboneConfig(**VIT | PAIRS | {"patch_size": [8, 8]}, out_features=["stage2"])
            )
        ),
        [images(), images(1)],
        "backbone",
    ),
    "deit": (lambda: t.DeiTForImageClassificationWithTeacher(t.DeiTConfig(**VIT)), [images()], "deit"),
    "dinov2": (lambda: t.Dinov2Model(t.Dinov2Config(**DINO2)), [images(), images(1, 16, 24)], ""),
    "dinov2-gated": (
        lambda: t.Dinov2WithRegistersForImageClassification(
            t.Dinov2WithRegistersConfig(**DINO2, use_swiglu_ffn=True, drop_path_rate=0.1)
        ),
        [images()],
        "dinov2_with_registers",
    ),
    "dinov3": (lambda: t.DINOv3ViTModel(t.DINOv3ViTConfig(**VIT)), [images(), images(1, 12, 24)], ""),
    "dinov3-backbone": (lambda: t.DINOv3ViTBackbone(t.DINOv3ViTConfig(**VIT, **STAGES)), [images(1)], ""),
    "beit": (
        lambda: t.BeitModel(t.BeitConfig(**VIT, use_relative_position_bias=True)).requires_grad_(False),
        [images(), images(1, 24, 12) | {"interpolate_pos_encoding": True}, images() | {"output_hidden_states": True}],
        "",
    ),
    "beit-shared": (
        lambda: t.BeitForImageClassification(t.BeitConfig(**VIT, use_shared_relative_position_bias=True)),
        [images()],
        "beit",
    ),
    "depth": (lambda: t.DepthAnythingForDepthEstimation(t.DepthAnythingConfig(**DEPTH)), [images()], "backbone"),
    "yolos": (
        lambda: t.YolosForObjectDetection(t.YolosConfig(**VIT | {"image_size": [16, 16]}, num_detection_tokens=3)),
        [images(), images() | {"pixel_mask": torch.ones(3, 16, 16)}],
        "vit",
    ),
    "clip": (towers("CLIP", VIT), [pairs(images())], "vision_model"),
    "siglip": (towers("Siglip", VIT), [pairs(images()), pairs(images(2))], "vision_model"),
    "siglip2": (towers("Siglip2", NAFLEX), [pairs(patches()), pairs(patches(1))], "vision_model"),
    "siglip2-head": (
        lambda: t.Siglip2ForImageClassification(t.Siglip2Config(text_config=TEXT, vision_config=NAFLEX)),
        [patches(), patches() | {"output_hidden_states": True}],
        "vision_model",
    ),
    "qwen2-vl": (of("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", t.Qwen2VLVisionConfig, QWEN2), SEVERAL, ""),
    "qwen2.5-vl": (
        of("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", t.Qwen2_5_VLVisionConfig, QWEN2_5),
        SEVERAL,
        "",
    ),
    "qwen3-vl": (
        of("qwen3_vl", "Qwen3VLVisionModel", t.Qwen3VLVisionConfig, QWEN3),
        [SEVERAL[0] | {"output_hidden_states": True}, *SEVERAL[1:]],
        "",
    ),
    "qwen3-omni": (
        of("qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder", t.Qwen3OmniMoeVisionEncoderConfig, QWEN3 | {"depth": 4}),
        SEVERAL,
        "",
    ),
    "minimax-m3": (lambda: t.MiniMaxM3VLVisionModel(t.MiniMaxM3VLVisionConfig(**VIT)), [renamed(SEVERAL[0])], ""),
    "video-llama3": (
        lambda: t.VideoLlama3VisionModel(t.VideoLlama3VisionConfig(**VIT)),
        [merged((1, 6, 10), (2, 3, 2), (1, 2, 8)), merged((1, 4, 4))],
        "",
    ),
    "llama4": (lambda: t.Llama4VisionModel(t.Llama4VisionConfig(**LLAMA4)), [images(3, 80, 80)], ""),
    "gemma4": (gemma4, PLACED, ""),
    "gemma4-bounded": (lambda: gemma4(0.5), PLACED, ""),
    "mlcd": (lambda: t.MLCDVisionModel(t.MLCDVisionConfig(**VIT)), [images(), images(1)], ""),
    "pixtral": (
        lambda: t.PixtralVisionModel(t.PixtralVisionConfig(**VIT)),
        [sized((16, 12), (8, 16), (4, 4)), images(1), sized((12, 8))],
        "",
    ),
    "idefics3": (
        lambda: t.Idefics3VisionTransformer(t.Idefics3VisionConfig(**VIT)),
        [shown(), images(), shown(1) | {"output_hidden_states": False}],
        "",
    ),
    "internvl": (
        lambda: t.InternVLVisionModel(t.InternVLVisionConfig(**VIT | PAIRS)),
        [images(), images(1)],
        "",
    ),
    "internvl-normed": (
        lambda: t.InternVLVisionModel(
            t.InternVLVisionConfig(**VIT | PAIRS, norm_type="rms_norm", use_qk_norm=True, use_mean_pooling=False)
        ),
        [images()],
        "",
    ),
}


def made(name):
    return random_pair(MODELS[name][0])


@pytest.mark.parametrize("name", always(MODELS, "gemma4", "gemma4-bounded", "qwen3-omni", "minimax-m3", "llama4"))
def test_an_encoder_gives_what_stock_gives(name):
    model, stock = made(name)
    rows = {(path, rule): status for path, rule, status, _ in accel.report(accel.optimize(model)).sites}
    assert rows[MODELS[name][2], "encoder"] == "patched"
    assert [rule for _, rule in rows].count("patch embedding") == any(map(is_patch_embedding, stock.modules()))
    for call in MODELS[name][1]:
        assert_same_tensors(model, stock, call)
    assert not fallbacks(model)


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_what_sizes_say_is_made_once(name):
    """On the device of the sizes, though the library makes some of it on the host."""
    model, stock = made(name)
    forward = vars(accel.optimize(model))["forward"]
    taken = []
    makers = [one._replace(maker=lambda *given, make=one.maker, **more: taken.append(make) or make(*given, **more))
              for one in forward.sizes.made]  # fmt: skip
    forward.sizes = copy.deepcopy(type(forward.sizes)(makers))
    for _ in range(2):
        for call in MODELS[name][1][:2]:
            assert_same_tensors(model, stock, call)
    assert len(taken) == 2 * len(makers) > 3 and not fallbacks(model)


@pytest.mark.parametrize(
    ("name", "call", "reason"),
    [
        ("vit-sizes", images() | {"output_attentions": True}, "output_attentions: its layers run stock where each"),
        ("vit-sizes", images() | {"attention_mask": torch.ones(3, 17).tril().long()}, "attention_mask is given"),
        ("qwen2.5-vl", SEVERAL[0] | {"output_attentions": True}, "output_attentions: its layers run stock where each"),
    ],
)
def test_calls_that_run_stock(name, call, reason):
    model, stock = made(name)
    for one in (model, stock):
        one.set_attn_implementation("eager")
    assert_same_tensors(accel.optimize(model), stock, call)
    assert [told.startswith(reason) for told in fallbacks(model)] == [True]


@pytest.mark.parametrize(("name", "scale"), [("dinov2", "layer_scale1.lambda1"), ("internvl", "lambda_1")])
def test_a_layer_scale_that_is_one_is_followed(name, scale):
    model, stock = made(name)
    scales = [one.encoder.layer[0].get_parameter(scale).data for one in (model, stock)]
    for one in scales:
        one.fill_(1.0)
    accel.optimize(model)
    for one in scales:
        one.mul_(torch.linspace(0, 2, 32))
    assert_same_tensors(model, stock, images())
    assert not fallbacks(model)


def test_a_bound_that_is_finite_later_is_kept():
    model, stock = made("gemma4")
    rows = accel.report(accel.optimize(model)).sites
    assert [row[3].startswith("packed: padding is left out") for row in rows if row[1] == "encoder"] == [True]
    for value in (float("inf"), 0.3, float("inf")):
        for one in (model, stock):
            one.encoder.layers[0].mlp.up_proj.input_max.fill_(value)
        assert_same_tensors(model, stock, PLACED[0])
    assert fallbacks(model) == ["encoder.layers.0: mlp.up_proj.input_max was changed after accel.optimize"]


def test_own_code_runs_around_attention_where_layer_scales_cannot_be_told_apart():
    model, stock = made("internvl")
    for layer in (*model.encoder.layer, *stock.encoder.layer):
        layer.lambda_1.data, layer.lambda_2.data = torch.ones(32), torch.ones(32)
    (row,) = [row for row in accel.report(accel.optimize(model)).sites if row[1] == "encoder"]
    assert row[2] == "patched" and "own code of layers runs around their attention" in row[3]
    stock.encoder.layer[0].lambda_1.data.mul_(0.5)
    model.encoder.layer[0].lambda_1.data.mul_(0.5)
    assert_same_tensors(model, stock, images())
    assert not fallbacks(model)


def test_layers_whose_outputs_are_looked_at_end_a_stretch():
    found = {}
    for name in ("qwen2.5-vl", "qwen3-vl"):
        forward = vars(accel.optimize(made(name)[0]))["forward"]
        found[name] = forward.stops, forward.shows
    assert found == {"qwen2.5-vl": ({3}, False), "qwen3-vl": ({1, 2, 3}, False)}
    layer = forward.layers[0]  # as for flash attention, and as for nobody
    assert layer.unknown({"max_seqlen": 4}) is None and layer.unknown({"other": 4}) == "other"


def test_blocks_of_a_mask():
    mask = torch.block_diag(*(torch.ones(n, n) for n in (3, 1, 4))).sub(1).mul(torch.finfo().max)[None, None]
    assert blocks_of(mask).tolist() == [0, 3, 4, 8] and blocks_of(mask[:, :, :2, :2]).tolist() == [0, 2]
    for at, value in (((0, 0, 0, 7), 0.0), ((0, 0, 2, 1), -1.0), ((0, 0, 4, 0), -1.0)):
        other = mask.clone()
        other[at] = value
        assert blocks_of(other) is None
    assert blocks_of(mask[0]) is None and blocks_of(mask == 0) is None


@pytest.mark.parametrize("name", ["vit-sizes", "dinov3-backbone"])
def test_restore_and_copies(name):
    model, stock = made(name)
    for one in (model, stock):
        one.config.output_hidden_states = True  # transformers' hooks collect them, once
    before = snapshot(model)
    accel.optimize(model)
    again = copy.deepcopy(model)
    assert_same_tensors(again, stock, images(1))
    assert not fallbacks(again)
    assert_same_state(snapshot(accel.restore(model)), before)
    assert_same_tensors(model, stock, images(1))


def test_a_bias_of_pairs_is_followed():
    model, stock = made("beit")
    accel.optimize(model)
    for change in (lambda one: one.data.mul_(3.0), lambda one: one.set_(one.flip(0))):
        for one in (model, stock):
            change(one.layers[1].relative_position_bias.relative_position_bias_table)
        assert_same_tensors(model, stock, images())
    assert not fallbacks(model)


@torch.no_grad()
def test_a_mask_that_moves_patches_a_little_is_shown_in_bfloat16():
    model, stock = (one.bfloat16() for one in made("idefics3"))
    call = {name: one.bfloat16() if one.is_floating_point() else one for name, one in shown().items()}
    assert relative_rms(accel.optimize(model)(**call)[0], stock(**call)[0]) < 2e-2 and not fallbacks(model)
