"""Steps that are begun before generate() has read its stop flag: used, exact, and harmless where they were in vain."""

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from accel.llm.generation.loop import handover
from accel.llm.kv_cache.cache import store_of
from accel.llm.kv_cache.pending_step import PendingStep
from support.llm.calls import counting, followed_by_numbers
from support.llm.families import padded, prompt
from support.llm.gpu import EDITS, new_pair, on_gpu
from support.llm.outputs import flat, generate, same

EXACT = 4e-5


pytestmark = pytest.mark.usefixtures("exact", "stocks_own_loop")


@pytest.fixture
def stocks_own_loop(monkeypatch):
    """Else the loop that runs ahead takes over after the first token."""
    monkeypatch.setattr(handover, "DEVICES", ())


@pytest.fixture
def steps(monkeypatch):
    """[begun, taken], counted."""
    return counting(monkeypatch, (PendingStep, "__init__", False), (PendingStep, "take", True))


def inputs(lengths=(9, 5)):
    return on_gpu(*padded(lengths))


def warm(ours, lengths=(9, 5)):
    """Until there is a graph."""
    for _ in range(2):
        generate(ours, *inputs(lengths), max_new_tokens=6)


@pytest.mark.parametrize("call", [{}, {"do_sample": True, "top_k": 20}, {"do_sample": True, "num_return_sequences": 3}])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma2", "mixtral"])
def test_almost_every_step(steps, name, call):
    ours, stock = new_pair(name)
    call = {"max_new_tokens": 24, **call}
    for _ in range(2):
        generate(ours, *inputs(), **call)
    steps[:] = 0, 0
    same(followed_by_numbers(ours, (9, 5), **call), followed_by_numbers(stock, (9, 5), **call), EXACT)
    assert steps[0] == steps[1] and steps[1] >= 22, steps  # not the prompt's, whose mask may be left out


@pytest.mark.parametrize("after", [1, 2, 7])
def test_a_last_step_in_vain(steps, after):
    """The end token comes, a step more is on its way; then the cache is used again, in every way."""
    ours, stock = new_pair("llama")
    warm(ours, (6,))
    ids = prompt(1, 6).cuda()
    words = stock.generate(ids, max_new_tokens=12, do_sample=False)
    end = int(words[0, 5 + after])
    found = {}
    for model in (ours, stock):
        kept = found[model is ours] = {}
        for use in ("go on", "crop", "read", "reorder", "again"):
            cache = DynamicCache(config=model.config)
            out = model.generate(
                ids, past_key_values=cache, max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=0
            )
            kept[f"{use} ids"] = out
            if use == "crop":
                cache.crop(4 - cache.get_seq_length())
                out = out[:, :4]
            elif use == "read":
                kept["keys"] = torch.stack([layer.keys for layer in cache.layers])
            elif use == "reorder":
                cache.reorder_cache(torch.zeros(1, dtype=torch.long, device="cuda"))
            new = prompt(1, 1 if use == "go on" else 3, 8).cuda()
            if use != "again":
                kept[f"{use} logits"] = model(new, past_key_values=cache).logits
            else:
                more = torch.cat([out, new], 1)
                kept["more"] = model.generate(more, past_key_values=cache, max_new_tokens=9, do_sample=False)
    same(found[True], found[False], EXACT)
    assert steps[0] > steps[1] or after == 1, steps  # the prompt's is not begun, its mask having been left out


class Rewrites(StoppingCriteria):
    """Changes the token that was chosen, in place."""

    def __call__(self, input_ids, scores, **kwargs):
        input_ids[:, -1] = (input_ids[:, -1] + 1) % 50
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Edits(StoppingCriteria):
    """Changes the model after some tokens."""

    def __init__(self, model, edit):
        self.model, self.edit, self.calls = model, edit, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == 6:
            self.edit(self.model)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def test_criteria_that_rewrite_tokens(steps):
    ours, stock = new_pair("llama")
    warm(ours)
    call = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    ids, mask = inputs()
    found = [
        model.generate(ids, attention_mask=mask, stopping_criteria=StoppingCriteriaList([Rewrites()]), **call)
        for model in (ours, stock)
    ]
    assert torch.equal(*found) and steps[1]


IN_PLACE = {
    "a hook in place": lambda model: model.register_forward_pre_hook(
        lambda module, args, kwargs: (kwargs["input_ids"].fill_(7), None)[1], with_kwargs=True
    ),
}


@pytest.mark.parametrize("edit", EDITS | IN_PLACE)
def test_criteria_that_change_the_model(edit):
    ours, stock = new_pair("llama")
    warm(ours)
    ids, mask = inputs()
    found = []
    for model in (ours, stock):
        criteria = StoppingCriteriaList([Edits(model, (EDITS | IN_PLACE)[edit])])
        call = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "output_logits": True}
        out = model.generate(ids, attention_mask=mask, stopping_criteria=criteria, return_dict_in_generate=True, **call)
        found.append(flat(out))
    same(*found, EXACT)


def test_a_change_right_after_a_step_was_begun():
    """From another place than the criteria: a streamer comes after them."""

    class Streamer:
        def __init__(self, model):
            self.model, self.calls = model, 0

        def put(self, value):
            self.calls += 1
            if self.calls == 7:
                EDITS["weights"](self.model)

        def end(self):
            pass

    ours, stock = new_pair("llama")
    warm(ours, (6,))
    call = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    found = [model.generate(prompt(1, 6).cuda(), streamer=Streamer(model), **call) for model in (ours, stock)]
    assert torch.equal(*found)


def test_embeddings_for_a_prompt(steps):
    ours, stock = new_pair("llama")
    warm(ours, (6,))
    steps[:] = 0, 0
    embeds = stock.get_input_embeddings()(prompt(1, 6).cuda())
    found = [
        model.generate(inputs_embeds=embeds, max_new_tokens=12, do_sample=False, pad_token_id=0)
        for model in (ours, stock)
    ]
    assert torch.equal(*found) and steps[1] >= 9


def test_a_step_nobody_takes_keeps_nothing_alive():
    ours, _ = new_pair("llama")
    warm(ours, (6,))
    out = ours.generate(prompt(1, 6).cuda(), max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    assert store_of(out.past_key_values).pending is None
