"""Forward hooks inside a language model are shown what they see in stock: tokens, masks, the cache as it is."""

import pytest
import torch

import accel
from support.llm.families import in_turn, layers, padded
from support.llm.outputs import flat, generate, same


def first(model):
    return next(iter(layers(model).values()))


def child(word: str):
    return lambda model: next(m for name, m in first(model).named_children() if word in name.lower())


FOUND = {
    "model": lambda model: model.get_submodule(model.base_model_prefix),
    "layer": first,
    "attention": child("att"),
    "dropout": lambda model: child("att")(model).resid_dropout,
    "positions": lambda model: model.model.decoder.embed_positions,
    "rotation": lambda model: model.model.rotary_emb,
    "mlp": child("mlp"),
    "norm": child("norm"),
    "query": lambda model: child("att")(model).q_proj,
    "head": lambda model: model.get_output_embeddings(),
    "words": lambda model: model.get_input_embeddings(),
}
# Whether what a hook is shown there is known where layers are fused.
PLACES = [
    ("llama", "model", False),
    ("llama", "layer", False),
    ("gpt2", "layer", False),
    ("llama", "attention", False),
    ("gpt2", "dropout", False),
    ("opt", "positions", False),
    ("llama", "rotation", False),
    ("llama", "mlp", True),
    ("llama", "norm", True),
    ("llama", "query", True),
    ("llama", "head", True),
    ("llama", "words", True),
]


def seen(model, find, before: bool) -> dict[str, torch.Tensor]:
    """All that a hook is shown in a generate() and a call, and what these give."""
    shown = []

    def note(module, args, kwargs, output=None):
        shown.append({"args": args, "kwargs": kwargs, "output": output})

    module = find(model)
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register(note, with_kwargs=True)
    try:
        ids, mask = padded()
        call = {"max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True}
        given = {"given": generate(model, ids, mask, **call), "logits": model(ids, attention_mask=mask).logits}
    finally:
        handle.remove()
    found = flat({"shown": [flat(one) for one in shown]} | given)
    # What a hidden word is turned into is anybody's guess; the mask of a hook says which those are.
    return {name: value for name, value in found.items() if value.shape[:2] != ids.shape}


@pytest.mark.parametrize(("case", "before"), in_turn(PLACES, [True, False]), ids=str)
@pytest.mark.share(2)
def test_a_hook_is_shown_what_stock_shows(case, before, pair):
    name, place, fast = case
    ours, stock = pair(name)
    ids, mask = padded()
    generate(ours, ids, mask)  # bound, and fast
    assert not accel.report(ours).fallbacks
    theirs = seen(stock, FOUND[place], before)
    same(seen(ours, FOUND[place], before), theirs)
    told = {reason: calls for _, reason, calls in accel.report(ours).fallbacks}
    assert (not told) if fast else (len(told) == 1 and sum(told.values()) == 4), told
    same(generate(ours, ids, mask), generate(stock, ids, mask))
    assert sum(calls for _, _, calls in accel.report(ours).fallbacks) == sum(told.values()), "fast again"


def test_hooks_of_transformers_itself_stay(pair):
    """Those by which it collects hidden states are there for good once they were asked for."""
    ours, stock = pair("llama")
    ids, mask = padded()
    for _ in range(2):
        states = {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 3}
        same(generate(ours, ids, mask, **states), generate(stock, ids, mask, **states))
        counted = accel.report(ours).fallbacks
        assert counted and all("hidden" in reason for _, reason, _ in counted)
        same(generate(ours, ids, mask), generate(stock, ids, mask))
        assert accel.report(ours).fallbacks == counted


def test_generate_of_a_compiled_forward_keeps_the_librarys_cache(pair):
    ours, stock = pair("mistral")
    ids, mask = padded((7, 7))
    ours.forward = torch.compile(ours.forward, fullgraph=True, backend="eager")
    found = generate(ours, ids, mask, max_new_tokens=2, return_dict_in_generate=True)
    same(found, generate(stock, ids, mask, max_new_tokens=2, return_dict_in_generate=True))
    torch.compiler.reset()
