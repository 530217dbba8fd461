"""Threads that call a model on a GPU while it is optimized and restored: each call gives what stock gives."""

import threading

import pytest
import torch

import accel
from support.llm.families import make, padded

pytestmark = pytest.mark.usefixtures("exact")  # TF32 in convolutions would be off by as much as the bound

ROUNDS, CALLERS = 4, 3
WRONG = 1e-3  # of the largest output, in float32: mixed states are off by a hundred times as much


def language():
    model = make("llama").to("cuda")
    ids, mask = (one.to("cuda") for one in padded())
    return model, lambda: model(ids, attention_mask=mask).logits[:, -1]


def tokens():
    model = make("qwen3").to("cuda")
    ids, mask = (one.to("cuda") for one in padded())
    given = dict(
        attention_mask=mask, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    return model, lambda: torch.stack(model.generate(ids, **given).logits)


def image(tiny):
    model = tiny.unet().to("cuda")
    inputs = {name: one.to("cuda") for name, one in tiny.inputs(model).items()}
    return model, lambda: model(**inputs).sample


@pytest.mark.parametrize("kind", ["language", "tokens", "image"])
def test_calls_beside_optimize_and_restore(kind, tiny):
    model, call = image(tiny) if kind == "image" else {"language": language, "tokens": tokens}[kind]()
    with torch.no_grad():
        wanted = call()
    stop, off, failed = threading.Event(), [], []

    @torch.no_grad()
    def work():
        try:
            while not stop.is_set():
                off.append(float((call() - wanted).abs().max() / wanted.abs().max()))
        except Exception as error:
            failed.append(error)

    callers = [threading.Thread(target=work) for _ in range(CALLERS)]
    for one in callers:
        one.start()
    fast = 0
    for _ in range(ROUNDS):
        accel.optimize(model, graphs=True)
        with torch.no_grad():
            for _ in range(3):
                off.append(float((call() - wanted).abs().max() / wanted.abs().max()))
        fast += all(row[2] == "patched" for row in accel.report(model).sites) and not accel.report(model).stock_on_cpu
        accel.restore(model)
    stop.set()
    for one in callers:
        one.join(60)
    assert not failed and not any(one.is_alive() for one in callers)
    assert fast == ROUNDS and len(off) > 5 * ROUNDS and max(off) < WRONG, (fast, len(off), max(off))
