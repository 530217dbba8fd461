"""Prompts with pictures whose layers go through graphs: filled up on the right, together where nothing is between."""

import copy

import pytest
import torch

import accel
from accel.llm.generation.prefill import PromptLayers
from support.llm.filled_prefill import filled, shapes
from support.llm.multimodal import make
from support.llm.outputs import generate, same


def pair(name: str):
    model, _, image = make(name)
    by_token = {"input_ids", "mm_token_type_ids", "token_type_ids"} & {*image}
    image |= {key: image[key][:, 1:] for key in by_token}  # other than the length of a graph
    if name == "qwen3-vl":  # what its tower gives behind its first layer is added behind the text's first
        model.model.visual.deepstack_visual_indexes = [0]
    stock = copy.deepcopy(model)
    return filled(accel.optimize(model)), stock, image


# Positions of three parts; features that are added between layers; a state, which padding must not move.
@pytest.mark.parametrize(
    ("name", "stretches"), [("qwen2.5-vl", 1), ("qwen3-vl", 2), ("lfm2-vl", 1), ("gemma3", 0), ("gemma4-shared", 1)]
)
@pytest.mark.turns(4)
def test_layers_run_together(name, stretches):
    """The first call shows what stands between them. Masks by which tokens see each other stay without a graph."""
    model, stock, image = pair(name)
    ids, more = image["input_ids"], {key: one for key, one in image.items() if key != "input_ids"}
    padded = torch.ones_like(ids)
    padded[1, :2] = 0
    call = {"max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    for turn, mask in enumerate((None, None, padded)):
        same(*(generate(one, ids, mask, **more, **call) for one in (model, stock)))
        assert len(shapes(model)) == turn * stretches
    assert not accel.report(model).fallbacks
    assert all(size[1] > ids.shape[1] for size, _ in shapes(model))


def test_something_else_between_layers(monkeypatch):
    """That call runs stock, and layers one by one from then on."""
    model, stock, image = pair("llava")
    call = {**image, "use_cache": True}
    logits = [one(**call).logits for one in (model, stock)]
    stretch = PromptLayers.run
    monkeypatch.setattr(PromptLayers, "run", lambda self, step, one, x, kwargs: stretch(self, step, one, x * 1, kwargs))
    logits += [model(**call).logits for _ in range(2)]
    wanted = logits.pop(1)
    same({"logits": torch.stack(logits)}, {"logits": wanted.expand(3, *wanted.shape)})
    reasons = [reason for _, reason, _ in accel.report(model).fallbacks]
    assert reasons == ["something stands between its layers"] and not shapes(model)
