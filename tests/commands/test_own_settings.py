"""Settings of its own for each request, handed to a manager of transformers or to ours."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

pytest.importorskip("fastapi")
from accel.commands.serving import WithSettings

FOLDER = str(Path(__file__).parents[2] / "examples" / "models" / "tiny-lm")


def pair():
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval(), AutoTokenizer.from_pretrained(FOLDER)


def answer(most, stop=None):
    model, tokenizer = pair()
    ids = tokenizer("The", return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=most, do_sample=False, stop_strings=stop, tokenizer=tokenizer)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_settings_for_stocks_own_manager():
    """Of a model that is not batched by ours: those that stock can give a request."""
    model, tokenizer = pair()
    config = ContinuousBatchingConfig(num_blocks=2, max_batch_tokens=32, per_request_processors=True)
    sampled = GenerationConfig(do_sample=True, temperature=2.0, top_k=7, max_new_tokens=5)
    manager = WithSettings(model.init_continuous_batching(sampled, config))
    assert manager._of(sampled) == {"temperature": 2.0, "top_k": 7}
    assert manager._of(GenerationConfig(do_sample=False)) == {"top_k": 1}
    manager.start()
    with manager.settings(GenerationConfig(do_sample=False)):
        name = manager.add_request(tokenizer("The").input_ids)
    result = manager.get_result(name, timeout=30)
    manager.stop()
    assert tokenizer.decode(result.generated_tokens) == answer(5)


@pytest.mark.parametrize("streaming", [False, True])
def test_stop_strings_for_stocks_own_manager(streaming):
    model, tokenizer = pair()
    config = ContinuousBatchingConfig(num_blocks=2, max_batch_tokens=32, per_request_processors=True)
    greedy = GenerationConfig(do_sample=False, max_new_tokens=40, stop_strings=["e"])
    manager = WithSettings(model.init_continuous_batching(greedy, config))
    manager.start()

    async def ask():
        got, ended = [], asyncio.Event()
        with manager.settings(greedy, tokenizer, streaming):
            manager.register_result_handler("x", lambda one: (got.append(one), one.is_finished() and ended.set()))
            manager.add_request(tokenizer("The").input_ids, request_id="x", max_new_tokens=40, streaming=streaming)
        await asyncio.wait_for(ended.wait(), 30)
        await asyncio.to_thread(manager.stop)
        return got

    got = asyncio.run(ask())
    assert len(got) == (len(got[-1].generated_tokens) if streaming else 1)
    assert tokenizer.decode(got[-1].generated_tokens) == answer(40, ["e"])


def test_tasks_keep_their_settings_apart():
    processor = SimpleNamespace(supported_keys={"temperature": float})
    manager = WithSettings(SimpleNamespace(add_request=lambda **given: given, logit_processor=processor))

    async def one(temperature):
        with manager.settings(GenerationConfig(do_sample=True, temperature=temperature)):
            await asyncio.sleep(0.01)
            return manager.add_request()

    async def all_of_them():
        return await asyncio.gather(*map(one, (0.5, 1.5, 2.5)))

    assert asyncio.run(all_of_them()) == [{"temperature": 0.5}, {"temperature": 1.5}, {"temperature": 2.5}]
    assert manager.add_request() == {}
