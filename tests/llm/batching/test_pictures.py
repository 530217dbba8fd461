"""Prompts with pictures beside others in one engine: each gets what stock gives it alone."""

import copy

import pytest
import torch
from transformers import GenerationConfig

import accel
from accel.errors import Refused
from accel.llm.batching.limits import sets_of
from accel.llm.batching.request import prompt_of
from accel.llm.generation.layer_forward import LayerForward
from support.llm.batching.engines import engine_of, finished, forward_of, request
from support.llm.multimodal import make
from support.noted import noted

NEW = 7


def pair(name: str):
    model, text, image = make(name)
    stock = copy.deepcopy(model)
    return accel.optimize(model), stock, text["input_ids"][0].tolist(), rows_of(image)


def rows_of(given: dict) -> list[dict]:
    """The arguments of each text of two."""
    return [{name: one.chunk(2)[row] for name, one in given.items()} for row in range(2)]


def alone(stock, given: dict, new: int = NEW) -> list[int]:
    ids = given["input_ids"]
    with torch.no_grad():
        return stock.generate(**given, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :].tolist()


def asked(name: str, given: dict, new: int = NEW):
    prompt = prompt_of(given)
    return request(name, prompt, new, given=dict(prompt.given))


# Positions of three parts, and features added to layers; tokens that see both ways; states beside keys; logits of all
# tokens.
@pytest.mark.parametrize(
    ("name", "narrow"),
    [("qwen3-vl", True), ("gemma3", False), ("lfm2-vl", True), ("gemma4-shared", False), ("qwen2.5-omni", False)],
)
@pytest.mark.turns(4)
def test_each_gets_what_it_gets_alone(name, narrow, monkeypatch):
    """narrow: blocks run out, so that a text with a picture is read again, with what it has of its answer."""
    model, stock, text, images = pair(name)
    texts, pictures = [text[:5], text], [*images, images[0]]
    news = [70, 70, NEW] if narrow else [NEW] * 3
    ran = noted(monkeypatch, LayerForward, "fast", lambda self, *args, **kwargs: self.path)
    limits = {"blocks": 3 * len(sets_of(forward_of(model))), "tokens": 9} if narrow else {}
    engine = engine_of(model, **limits)
    both = [asked(str(number), *one) for number, one in enumerate(zip(pictures, news, strict=True))]
    both += [request(f"t{number}", ids, NEW) for number, ids in enumerate(texts)]
    ended = finished(engine, both[::-1])
    assert len(ended) == len(both) and ran and bool(engine.scheduler.preempted) == narrow
    plain = [{"input_ids": torch.tensor([ids])} for ids in texts]
    for one, given, new in zip(both, [*pictures, *plain], [*news, NEW, NEW], strict=True):
        assert one.error is None and one.tokens == alone(stock, given, new), one.id


@pytest.mark.turns(2)
def test_generate_batch():
    """Of what a processor gives, with padding and without; several answers to one prompt; one that makes no sense."""
    model, stock, text, images = pair("qwen2.5-vl")
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    by_token = {name: images[1][name] for name in ("input_ids", "mm_token_type_ids")}
    by_token["attention_mask"] = torch.ones_like(by_token["input_ids"])
    padded = images[1] | {name: torch.nn.functional.pad(one, (2, 0)) for name, one in by_token.items()}
    short = images[0] | {"pixel_values": images[0]["pixel_values"][:8]}
    unknown = images[0] | {"pixels": torch.zeros(1)}
    found = list(model.generate_batch([images[0], text, padded, short, unknown], generation_config=config).values())
    wanted = [alone(stock, images[0]), alone(stock, {"input_ids": torch.tensor([text])}), alone(stock, images[1])]
    assert [one.generated_tokens for one in found[:3]] == wanted and not any(one.error for one in found[:3])
    assert found[3].error and "pixels" in found[4].error
    config.num_return_sequences = 2
    found = model.generate_batch(images[:1], generation_config=config).values()
    assert [one.generated_tokens for one in found] == wanted[:1] * 2


def test_pictures_are_not_dropped_where_stock_batches():
    model, _, _, images = pair("mllama")
    with pytest.raises(Refused, match="pictures"):
        model.generate_batch(images, max_new_tokens=2)
    with pytest.raises(ValueError, match="each prompt by itself"):
        prompt_of({"input_ids": torch.zeros(2, 3)})
