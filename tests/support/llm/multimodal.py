"""Models of text and images in miniature, as a table: functions that give a model and what it is called with."""

import functools
from collections.abc import Callable

import torch
import transformers

from support.llm.families import prompt
from support.llm.miniatures.family import GEMMA4, SIZES, TOKENS
from support.llm.random_weights import randomize

IMAGE, SPECIAL = 90, 80  # the token that stands for a piece of an image; from here on no text has tokens
FIRST = 16  # below it some may mean something
PIECES = 4  # of one image
# As deep as the text's: nothing but what runs tells the two towers apart.
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": SIZES["num_hidden_layers"],
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
TEXT = SIZES | TOKENS
HEADS = {"head_dim": 16}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def words(images: bool, at: int = 3) -> torch.Tensor:
    """(2, tokens) ids; with an image in each row where asked for, its first piece at `at`."""
    ids = prompt(2, 12) % (SPECIAL - FIRST) + FIRST
    return torch.cat([ids[:, :at], torch.full((2, PIECES), IMAGE), ids[:, at:]], dim=1) if images else ids


def pictures() -> dict:
    return {"input_ids": words(True), "pixel_values": random(2, 3, 16, 16)}


def build(name: str, **config):
    """The model of these names in transformers."""
    model = getattr(transformers, f"{name}ForConditionalGeneration")
    return model(getattr(transformers, f"{name}Config")(**config))


def pixtral():
    text, vision = transformers.MistralConfig(**TEXT, **HEADS), transformers.PixtralVisionConfig(**VISION, **HEADS)
    model = build("Llava", text_config=text, vision_config=vision, image_token_index=IMAGE, vision_feature_layer=-1,
                  vision_feature_select_strategy="full")  # fmt: skip
    return model, {}, pictures() | {"image_sizes": torch.tensor([[16, 16]] * 2)}


def mistral3():
    text = {"model_type": "mistral", **TEXT, **HEADS, "sliding_window": None}
    vision = {"model_type": "pixtral", **VISION, **HEADS}
    model = build("Mistral3", text_config=text, vision_config=vision, image_token_id=IMAGE, image_token_index=IMAGE,
                  spatial_merge_size=1, vision_feature_layer=-1)  # fmt: skip
    return model, {}, pictures() | {"image_sizes": torch.tensor([[16, 16]] * 2)}


def gemma3():
    text = TEXT | HEADS | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    model = build("Gemma3", text_config=text, vision_config=VISION, mm_tokens_per_image=PIECES, image_token_id=IMAGE,
                  image_token_index=IMAGE, boi_token_index=IMAGE + 1, eoi_token_index=IMAGE + 2)  # fmt: skip
    given = pictures()
    marks = (given["input_ids"] == IMAGE).long()
    return model, {"token_type_ids": torch.zeros_like(words(False))}, given | {"token_type_ids": marks}


def paligemma():
    text = {"model_type": "gemma", **TEXT, **HEADS}
    vision = {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}
    model = build("PaliGemma", text_config=text, vision_config=vision, image_token_index=IMAGE, projection_dim=64,
                  hidden_size=64)  # fmt: skip
    ids = words(True, at=0)
    return model, {}, {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "pixel_values": random(2, 3, 16, 16)}


SHARED = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
SHARED |= {"vocab_size_per_layer_input": TEXT["vocab_size"], "layer_types": ["sliding_attention", "full_attention"] * 2}


def gemma4(**more):
    """Its layers with windows alone let tokens of a picture see each other."""
    text = TEXT | GEMMA4 | {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"} | more
    vision = {name: one for name, one in VISION.items() if name != "image_size"} | {"num_key_value_heads": 2}
    vision |= {"head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 32}
    special = {f"{name}_token_id": IMAGE + number for number, name in enumerate(("image", "video", "audio", "boi"))}
    model = build("Gemma4", text_config=text, vision_config=vision, audio_config=None, **special)
    ids, places = words(True), torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1).repeat(2, 1, 1)
    marks = {"mm_token_type_ids": (ids == IMAGE).int()}
    return model, {}, {"input_ids": ids, "pixel_values": random(2, 16, 48), "image_position_ids": places} | marks


def internvl():
    vision = VISION | {"image_size": [16, 16], "patch_size": [4, 4]}
    model = build("InternVL", text_config={"model_type": "qwen2", **TEXT}, vision_config=vision, image_token_id=IMAGE,
                  image_seq_length=PIECES, downsample_ratio=0.5)  # fmt: skip
    return model, {}, pictures()


def idefics(name: str):
    text = {"model_type": "llama", **TEXT}
    vision = VISION | {"patch_size": 4}
    model = build(name, text_config=text, vision_config=vision, image_token_id=IMAGE, scale_factor=2)
    return model, {}, {"input_ids": words(True), "pixel_values": random(2, 1, 3, 16, 16)}


def mllama():
    text = TEXT | {"model_type": "mllama_text_model", "num_hidden_layers": 4, "cross_attention_layers": [1]}
    vision = {"hidden_size": 32, "attention_heads": 2, "num_hidden_layers": 2, "num_global_layers": 1}
    vision |= {"intermediate_size": 48, "intermediate_layers_indices": [0], "vision_output_dim": 64, "image_size": 16}
    vision |= {"patch_size": 8, "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}
    model = build("Mllama", text_config=text | {"pad_token_id": 0}, vision_config=vision, image_token_index=IMAGE)
    ratios = {"aspect_ratio_ids": torch.ones(2, 1).long(), "aspect_ratio_mask": torch.ones(2, 1, 1).long()}
    seen = {"cross_attention_mask": torch.ones(2, words(False).shape[1], 1, 1).long()}
    return model, {}, {"input_ids": words(False), "pixel_values": random(2, 1, 1, 3, 16, 16)} | ratios | seen


def lfm2():
    text = TEXT | {"model_type": "lfm2", "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
    vision = VISION | {"model_type": "siglip2_vision_model", "num_patches": 16}
    model = build("Lfm2Vl", text_config=text | {"block_auto_adjust_ff_dim": False}, vision_config=vision,
                  image_token_id=IMAGE, projector_hidden_size=32)  # fmt: skip
    image = {"pixel_values": random(2, 16, 3 * 8 * 8), "spatial_shapes": torch.tensor([[4, 4]] * 2)}
    mask = torch.ones(2, 16, dtype=torch.long)
    return model, {}, {"input_ids": words(True), "pixel_attention_mask": mask} | image


def grown(kind: str, grid: bool = False, marked: bool = True):
    """Of the configuration that the compatibility table makes; grid: given patches, with frames, rows and columns, and
    marks of tokens if marked.
    """
    from support.compatibility.tiny_language_models import build as tiny

    model = tiny(kind, "image-text")
    vision, image, where = model.config.vision_config, {"pixel_values": random(2, 3, 16, 16)}, model.config
    if grid:
        patch, frames = vision.patch_size, getattr(vision, "temporal_patch_size", None)
        shape = (32, 3, patch, patch) if frames is None else (32, 3 * frames * patch * patch)
        image = {"pixel_values": random(*shape), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    with torch.no_grad():
        found = model.get_image_features(**image).pooler_output
    pieces = sum(one.numel() for one in found) // found[0].shape[-1] // 2
    ids = words(True)[:, :3]
    token = where.image_token_id if hasattr(where, "image_token_id") else where.image_token_index
    ids = torch.cat([ids, torch.full((2, pieces), token), words(False)[:, 3:]], dim=1)
    marks = {"mm_token_type_ids": (ids == token).int()} if grid and marked else {}
    return model, {}, {"input_ids": ids} | marks | image


def omni():
    model, text, image = grown("qwen2_5_omni_thinker", grid=True, marked=False)
    image["input_ids"][:, 2] = model.config.vision_start_token_id
    return model, text, image


def qwen2_audio():
    """Whose output hands its mask on, and whose steps are told which frames are of a sound."""
    ears = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 8}
    model = build("Qwen2Audio", text_config=TEXT | {"model_type": "qwen2"}, audio_token_index=IMAGE,
                  audio_config=ears | {"max_source_positions": 8})  # fmt: skip
    frames = torch.tensor([[1] * 16, [1] * 14 + [0] * 2])
    ids = words(True)
    ids[1, 6] = 5  # its sound has a piece less
    return model, {}, {"input_ids": ids, "input_features": random(2, 8, 16), "feature_attention_mask": frames}


MODELS: dict[str, Callable] = {
    "qwen2-vl": functools.partial(grown, "qwen2_vl", grid=True),
    "qwen2.5-vl": functools.partial(grown, "qwen2_5_vl", grid=True),
    "qwen3-vl": functools.partial(grown, "qwen3_vl", grid=True),
    "llava": functools.partial(grown, "llava"),
    "pixtral": pixtral,
    "mistral3": mistral3,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma4-shared": functools.partial(gemma4, use_bidirectional_attention=None, **SHARED),
    "paligemma": paligemma,
    "internvl": internvl,
    "smolvlm": functools.partial(idefics, "SmolVLM"),
    "idefics3": functools.partial(idefics, "Idefics3"),
    "lfm2-vl": lfm2,
    "mllama": mllama,
    "qwen2.5-omni": omni,
    "glm4v": functools.partial(grown, "glm4v", grid=True),
    "kimi-k2.5": functools.partial(grown, "kimi_k25", grid=True, marked=False),
    "hunyuan-vl": functools.partial(grown, "hunyuan_vl", grid=True),
    "paddleocr-vl": functools.partial(grown, "paddleocr_vl", grid=True),
    "aya-vision": functools.partial(grown, "aya_vision"),
    "ovis2": functools.partial(grown, "ovis2"),
    "got-ocr2": functools.partial(grown, "got_ocr2"),
    "qwen2-audio": qwen2_audio,
}  # fmt: skip


def make(name: str) -> tuple[torch.nn.Module, dict, dict]:
    """(model with random weights, what generate() takes for a text, what it takes for an image)."""
    torch.manual_seed(0)
    model, text, image = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    for path, parameter in model.named_parameters():
        randomize(model.get_submodule(path.rpartition(".")[0]), parameter.data, generator, 0.5)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval(), {"input_ids": words(False)} | text, image
