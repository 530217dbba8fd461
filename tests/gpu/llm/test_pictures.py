"""Prompts with pictures on a GPU: steps behind them in graphs, in batches, and what they wait for."""

import copy
from functools import partial

import pytest
import torch
from transformers import GenerationConfig

import accel
from support.kernels.waiting import waits_noted
from support.llm.multimodal import make
from support.llm.outputs import generate, same

pytestmark = pytest.mark.usefixtures("exact")
NAMES = ("qwen2.5-vl", "qwen3-vl", "gemma3", "gemma4", "gemma4-shared", "llava", "lfm2-vl")
NEW = 12


def pair(name):
    model, _, image = make(name)
    model, image = model.cuda(), {key: one.cuda() for key, one in image.items()}
    stock = copy.deepcopy(model)
    return accel.optimize(model), stock, image


@pytest.mark.parametrize("name", NAMES)
def test_generate(name):
    """The first call runs eagerly, later ones replay graphs; with padding too."""
    ours, stock, image = pair(name)
    ids, more = image["input_ids"], {key: one for key, one in image.items() if key != "input_ids"}
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    call = {"max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}
    for given in (None, None, None, mask):
        same(*(generate(model, ids, given, **more, **call) for model in (ours, stock)))
    report = accel.report(ours)
    assert not [reason for path, reason, _ in report.fallbacks if not path] and report.graphs
    alone = name in ("gemma3", "gemma4")  # their pictures' tokens see each other
    assert alone or vars(ours)["forward"].prompts.runner.replays


@pytest.mark.parametrize("name", NAMES)
def test_generate_batch(name):
    ours, stock, image = pair(name)
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    rows = [{key: one.chunk(2)[row].cpu() for key, one in image.items()} for row in range(2)]
    text = rows[0]["input_ids"][0, :3].tolist()
    found = ours.generate_batch([*rows, text, rows[0]], generation_config=config).values()
    given = [{key: one.cuda() for key, one in row.items()} for row in (*rows, {"input_ids": torch.tensor([text])})]
    for one, wanted in zip(found, [*given, given[0]], strict=True):
        length = wanted["input_ids"].shape[1]
        tokens = stock.generate(**wanted, max_new_tokens=NEW, do_sample=False)[0, length:].tolist()
        assert one.error is None and one.generated_tokens == tokens


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
@pytest.mark.parametrize("generating", [False, True])
def test_nothing_waits_for_the_tower(name, generating):
    """Stock asks how many tokens its pictures give, and whether the prompt has as many."""
    ours, stock, image = pair(name)
    call = partial(_written if generating else _read, image)
    waits = []
    for model in (stock, ours):
        with torch.no_grad():
            for _ in range(3):
                call(model)
            with waits_noted() as seen:
                call(model)
        waits.append(["import_utils" in one.filename or "modeling_" in one.filename for one in seen].count(True))
    assert waits[1] < waits[0]


def _read(image, model):
    return model(**image, use_cache=True)


def _written(image, model):
    return model.generate(**image, max_new_tokens=1, do_sample=False)
