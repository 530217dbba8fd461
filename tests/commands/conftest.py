"""What commands are given to look at."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.llm.batching.serving import BLOCKS, FOLDER, end, serving


@pytest.fixture
def wrong_resnets(monkeypatch):
    """A plugin whose resnet blocks are 1 % off."""
    from accel.diffusion.blocks.resnet import ResnetForward

    call = ResnetForward.__call__  # not `fast`, which is examined before a block is replaced
    monkeypatch.setattr(ResnetForward, "__call__", lambda self, *args, **kwargs: 1.01 * call(self, *args, **kwargs))


@pytest.fixture(scope="module")
def stock():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(FOLDER).eval(), AutoTokenizer.from_pretrained(FOLDER)

    def answer(text, most, ids=None, stop=None):
        ids = tokenizer(text, return_tensors="pt").input_ids if ids is None else ids
        with torch.no_grad():
            out = model.generate(
                ids, max_new_tokens=most, do_sample=False, stop_strings=stop, tokenizer=stop and tokenizer
            )
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    def chat(text, most):
        said = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        return answer(None, most, ids["input_ids"])

    return SimpleNamespace(answer=answer, chat=chat, model=model)


@pytest.fixture(scope="module")
def server():
    from accel.commands.serving import optimized_serving

    with optimized_serving():
        made = serving(continuous_batching=True, cb_num_blocks=BLOCKS)
        yield made
        end(made)
