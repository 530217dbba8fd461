"""Vision transformers on a GPU: a graph for each shape of a batch, in a tower too; images of several sizes packed."""

import copy
import importlib

import pytest
import torch
import transformers as t

import accel
from accel.comparison import worst_rms
from accel.encoders.inputs import tensors_of
from support.kernels.waiting import texts_of, waits_noted

DINO = {"hidden_size": 288, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 14, "image_size": 98}
VIT = DINO | {"intermediate_size": 512}
TEXT = {"vocab_size": 500, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"intermediate_size": 512, "max_position_embeddings": 64}
NAFLEX = {name: one for name, one in VIT.items() if name != "image_size"} | {"num_patches": 49}
MODELS = {
    "clip": lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**VIT)),
    "dinov2": lambda: t.Dinov2Model(t.Dinov2Config(**DINO)),
    "dinov3": lambda: t.DINOv3ViTModel(t.DINOv3ViTConfig(**VIT)),
    "siglip": lambda: t.SiglipModel(t.SiglipConfig(text_config=TEXT, vision_config=VIT)),
    "siglip2": lambda: t.Siglip2VisionModel(t.Siglip2VisionConfig(**NAFLEX)),
}


PATCHES = {"depth": 3, "num_heads": 4, "patch_size": 14, "hidden_size": 320, "intermediate_size": 512}
PATCHES |= {"out_hidden_size": 256, "fullatt_block_indexes": [1]}
TOWERS = {  # that see images of any sizes in one row
    "qwen2.5-vl": ("Qwen2_5_VisionTransformerPretrainedModel", t.Qwen2_5_VLVisionConfig(**PATCHES)),
    "qwen3-vl": ("Qwen3VLVisionModel", t.Qwen3VLVisionConfig(**PATCHES, deepstack_visual_indexes=[0, 1])),
}
SIZES = {1: [[1, 20, 36]], 3: [[1, 20, 36], [2, 6, 8], [1, 24, 24]], 5: [[1, 18, 22]] * 5}


def tower(name):
    kind, config = TOWERS[name]
    folder = name.replace("-", "_").replace(".", "_")
    code = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    return getattr(code, kind)(config)


def call_of(name, batch, dtype):
    generator = torch.Generator("cuda").manual_seed(batch)
    if name in TOWERS:
        sizes = torch.tensor(SIZES[batch], device="cuda")
        count = int(sizes.prod(1).sum())
        pixels = torch.randn(count, 3 * 2 * 14 * 14, generator=generator, device="cuda")
        return {"hidden_states": pixels.to(dtype), "grid_thw": sizes}
    if name != "siglip2":
        return {"pixel_values": torch.randn(batch, 3, 98, 98, generator=generator, device="cuda").to(dtype)}
    sizes = torch.tensor([[7, 7], [3, 5], [2, 9]], device="cuda").repeat(batch, 1)[:batch]
    mask = (torch.arange(49, device="cuda") < sizes.prod(1, keepdim=True)).long()
    pixels = torch.randn(batch, 49, 588, generator=generator, device="cuda").to(dtype)
    return {"pixel_values": pixels, "spatial_shapes": sizes, "pixel_attention_mask": mask}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
@pytest.mark.usefixtures("exact")
def test_batches_of_images(name):
    torch.manual_seed(0)
    exact = MODELS[name]().cuda().eval().requires_grad_(False)
    half = copy.deepcopy(exact).bfloat16()
    model = accel.optimize(copy.deepcopy(half))

    def run(one, batch, dtype=torch.bfloat16):
        given = call_of(name, batch, dtype)
        found = one.get_image_features(**given) if name == "siglip" else one(**given)
        return list(tensors_of(found).values())

    for batch in (1, 3, 8):
        wanted = run(exact, batch, torch.float32)
        allowed = worst_rms(run(half, batch), wanted)
        for _ in range(4):
            assert worst_rms(run(model, batch), wanted) <= 1.3 * allowed + 1e-4
    assert any(row["status"] == "graph" for row in accel.report(model).graphs)
    assert not accel.report(model).fallbacks


def waits(model, call):
    """How often a call waits for the GPU."""
    with waits_noted() as seen:
        model(**call)
    return len(texts_of(seen))


@pytest.mark.parametrize("name", TOWERS)
@torch.no_grad()
@pytest.mark.usefixtures("exact")
def test_images_of_several_sizes_in_one_row(name):
    torch.manual_seed(0)
    exact = tower(name).cuda().eval().requires_grad_(False)
    half = copy.deepcopy(exact).bfloat16()
    model, eager = accel.optimize(copy.deepcopy(half)), accel.optimize(copy.deepcopy(half), graphs=False)
    for count in SIZES:
        call = call_of(name, count, torch.bfloat16)
        wanted = list(tensors_of(exact(**call_of(name, count, torch.float32))).values())
        allowed = worst_rms(tensors_of(half(**call)).values(), wanted)
        for _ in range(4):
            assert worst_rms(tensors_of(model(**call)).values(), wanted) <= 1.3 * allowed + 1e-4
        around = waits(half, call) - 3 * len(half.blocks)  # in each for queries, keys and values
        eager(**call)
        assert waits(eager, call) <= around
    report = accel.report(model)
    rows = {(path, rule): status for path, rule, status, _ in report.sites}
    assert rows["patch_embed.proj", "patch embedding"] == "patched"  # a Conv3d, whatever it takes
    assert any(row["status"] == "graph" for row in report.graphs)
    assert not (accel.report(model).fallbacks or accel.report(eager).fallbacks)
