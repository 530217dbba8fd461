"""Language models of transformers, tiny and with random weights, and the calls in which they are compared."""

import inspect
from collections.abc import Callable

import torch

from accel.bench.llm.tiny import SPECIAL, build_tiny

ROWS, TOKENS, STEPS, WORDS = 2, 11, 4, 80
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}}
# What families demand besides small numbers; of all, pictures of few pixels.
DEMANDS = {
    "": {"image_size": 16, "crop_size": 16, "patch_size": 4},
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "cosmos3_edge_text": MROPE,
    "csm_depth_decoder_model": {"num_codebooks": 64},
    "emu3": {"vocabulary_map": {"<image>": 90}},
    "glm4v_moe_text": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "glm4v_text": MROPE,
    "glm4v_vision": {"depth": 2},  # deeper ones enlarge rounding
    "glm_ocr_text": MROPE,
    "hunyuan_vl_text": {"head_dim": 16, "rope_parameters": ROPE | {"mrope_section": [2, 2, 2, 2]}},
    "hy_v4_vl_text": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
    "mistral4": {"qk_nope_head_dim": 8},
    "paddleocr_vl_text": MROPE,
    "qwen2_5_omni_text": MROPE,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 100},
    "qwen2_5_vl_text": MROPE,
    "qwen2_vl_text": MROPE,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 100},
    "xmod": {"default_language": "en_XX"},
}


def build(model: str, section: str) -> torch.nn.Module:
    """model: a model_type, or the name of a class that belongs to none."""
    import transformers

    kind = getattr(transformers, model, None)
    if kind is None:
        maps = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
        kind = maps[section == "image-text"][transformers.CONFIG_MAPPING[model]]
        kind = kind[0] if isinstance(kind, tuple) else kind
    model = build_tiny(kind, DEMANDS)
    model.generation_config.update(eos_token_id=None, pad_token_id=0, bos_token_id=1)
    return model


def calls(model: torch.nn.Module) -> dict[str, Callable]:
    """A prompt padded on the left, steps with a cache, and a text."""
    known = inspect.signature(type(model).forward).parameters
    ids = torch.randint(SPECIAL, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    padding = {"attention_mask": mask} if "attention_mask" in known else {}
    if padding:
        mask[1, :4] = 0

    def prompt(model):
        found = logits(model(input_ids=ids, **padding))
        return found[mask.bool()] if found.shape[:2] == mask.shape else found

    def steps(model):
        output = model(input_ids=ids, use_cache=True)
        found = [logits(output)]
        for number in range(2):
            cache = output.past_key_values
            output = model(input_ids=ids[:, number : number + 1], past_key_values=cache, use_cache=True)
            found.append(logits(output))
        return found

    def text(model):
        return model.generate(ids, **padding, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)

    return {"prompt": prompt, "steps": steps, "text": text}


def logits(output) -> torch.Tensor:
    return output.logits if hasattr(output, "logits") else output[0]
