"""Calls of the model itself: arguments in every form, and what it tries of itself before it is used."""

import pytest
import torch
from accel_kernels.attention.paged.paged_attention_triton import SHORT

from accel.llm.generation import layer_forward
from accel.llm.generation import trial_warmup as check
from accel.llm.generation.prefill import bucket_for
from accel.llm.generation.routing import Choices
from accel.llm.generation.trial import Expected, fused_logits
from accel.llm.runtime import layer as layer_file
from support.llm.calls import new_cache
from support.llm.families import FAMILIES, padded, prompt
from support.llm.miniatures.family import VOCAB
from support.llm.optimized_models import shared
from support.llm.outputs import both, flat, same, second, shown

CORE = [family.name for family in FAMILIES if family.core]
FAST = [family.name for family in FAMILIES if family.expected == "fast"]


def masks(rows: int = 2, length: int = 9) -> dict[str, torch.Tensor | None]:
    """2-D masks by their name; ones, zeros where nothing is attended to."""
    ones = torch.ones(rows, length, dtype=torch.long)
    found = {"none": None, "ones": ones}
    for name, hidden in {
        "left": [(0, slice(0, 4))],
        "all-rows-left": [(0, slice(0, 2)), (1, slice(0, 5))],
        "right": [(1, slice(6, 9))],
        "middle": [(0, slice(3, 5)), (1, slice(7, 8))],
        "scattered": [(0, slice(1, 9, 2)), (1, slice(2, 3))],
        "both-ends": [(0, slice(0, 2)), (0, slice(7, 9))],
    }.items():
        found[name] = ones.clone()
        for row, columns in hidden:
            found[name][row, columns] = 0
    found["bool"] = found["left"].bool()
    found["float"] = found["left"].float()
    return found


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("name", CORE)
@pytest.mark.share(18)
@pytest.mark.turns(4)
def test_masks_of_one_call_and_of_the_next(name, mask, pair_of):
    """The mask grows by ones, as generate's does."""
    ids, mask = prompt(2, 9), masks()[mask]

    def call(model):
        cache, found = new_cache(model), {}
        output = model(ids, attention_mask=mask, past_key_values=cache)
        found["first"], grown = shown(output.logits, mask), mask
        for step in range(3):
            if mask is not None:
                grown = torch.cat([grown, grown.new_ones(2, 1)], 1)
            output = model(prompt(2, 1, 5 + step), attention_mask=grown, past_key_values=cache)
            found[f"{step}"] = output.logits
        return found

    both(pair_of(name), call)


@pytest.mark.parametrize("name", CORE)
def test_a_mask_that_changes_between_two_steps(name, pair_of):
    """What was seen is hidden, then seen again. (What was hidden when it was read is anybody's guess.)"""
    ids, mask = padded((9, 5))

    def call(model):
        cache = new_cache(model)
        model(ids, attention_mask=mask, past_key_values=cache)
        found, grown = {}, mask
        for step, (row, column, value) in enumerate([(0, 2, 0), (1, 6, 0), (0, 2, 1), (0, 9, 0)]):
            grown = torch.cat([grown, grown.new_ones(2, 1)], 1)
            grown[row, column] = value
            found[f"{step}"] = model(prompt(2, 1, step), attention_mask=grown, past_key_values=cache).logits
        return found

    both(pair_of(name), call)


@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_loop_of_the_users(name, refill, pair_of):
    """With the cache that came back, and with one id tensor that is written anew in every step."""
    ids = prompt(2, 7)

    def call(model):
        output = model(ids, use_cache=True)
        logits, step = [output.logits], ids[:, -1:].clone()
        for _ in range(6):
            best = output.logits[:, -1:].argmax(-1)
            step = step.copy_(best) if refill else best
            output = model(step, past_key_values=output.past_key_values)
            logits.append(output.logits)
        return {str(i): x for i, x in enumerate(logits)} | flat(output.past_key_values, "cache")

    both(pair_of(name), call)


@pytest.mark.parametrize("name", CORE)
def test_several_words_a_step(name, pair_of):
    """A text in pieces, with a mask and without: what one call gives."""
    ids, mask = padded((12, 7), seed=3)
    whole = {mask_given: pair_of(name)[1](ids, attention_mask=mask if mask_given else None).logits
             for mask_given in (False, True)}  # fmt: skip

    for given in (False, True):

        def call(model, given=given):
            cache, pieces = new_cache(model), []
            for start, stop in ((0, 5), (5, 6), (6, 9), (9, 12)):
                seen = {"attention_mask": mask[:, :stop]} if given else {}
                where = (mask.cumsum(1) - 1).clamp_min(0)[:, start:stop] if given else None
                pieces.append(model(ids[:, start:stop], past_key_values=cache, **seen, position_ids=where).logits)
            return {"logits": shown(torch.cat(pieces, 1), mask if given else None)}

        both(pair_of(name), call)
        if not given and name != "bamba":  # whose mask is its own then, as if each piece began a text: stock's too
            same(call(pair_of(name)[0]), {"logits": whole[False]})


@pytest.mark.parametrize("name", CORE)
def test_the_decoder_alone(name, pair_of):
    """Called without its head, as embedding models and value heads do."""
    ids, mask = padded()

    def call(model):
        base = model.get_submodule(model.base_model_prefix)
        output = base(ids, attention_mask=mask)
        more = base(prompt(2, 1), attention_mask=torch.cat([mask, mask.new_ones(2, 1)], 1),
                    past_key_values=output.past_key_values)  # fmt: skip
        return {"states": shown(output.last_hidden_state, mask), "more": more.last_hidden_state}

    both(pair_of(name), call)


def test_the_manner_of_a_model_is_found_by_trying():
    opt, llama, bloom = (vars(shared(name).ours)["forward"].convention for name in ("opt", "llama", "bloom"))
    assert opt.positions == "counted by the mask" and llama.positions == "0, 1, 2 .."
    assert not bloom.mask


@pytest.mark.parametrize("name", CORE)
def test_ways_of_asking(name, pair_of):
    ids = prompt(2, 9)
    words = {"inputs_embeds": pair_of(name)[1].get_input_embeddings()(ids)}
    for call in (
        {"logits_to_keep": 1},
        {"logits_to_keep": 3},
        {"logits_to_keep": torch.tensor([0, 4])},
        {"return_dict": False},
        {"use_cache": False},
        {"use_cache": False, "return_dict": False},
        {"output_hidden_states": True},
        {"position_ids": torch.arange(2, 11)[None].expand(2, -1)},
        {"position_ids": torch.arange(2, 11)[None]},
        {"labels": ids},
        {"labels": ids, "return_dict": False},
    ):
        both(pair_of(name), lambda model, call=call: flat(model(ids, **call)))
        both(pair_of(name), lambda model, call=call: flat(model(**words, **call)))


@pytest.mark.parametrize("name", CORE)
def test_forms_of_the_same_inputs(name, pair_of):
    """Positional, of other whole numbers, not contiguous, made under inference mode, past what is patched."""
    ids, mask = padded((9, 5))
    twice = ids.repeat_interleave(2, 1)
    with torch.inference_mode():
        made = ids.clone()
    for call in (
        lambda model: model(ids, *([] if second(model) == "attention_mask" else [None]), mask),
        lambda model: model.forward(ids, attention_mask=mask),
        lambda model: type(model).forward(model, ids, attention_mask=mask),
        lambda model: model(ids.int(), attention_mask=mask.int()),
        lambda model: model(twice[:, ::2], attention_mask=mask.repeat_interleave(2, 1)[:, ::2]),
        lambda model: model(made, attention_mask=mask.bool()),
        lambda model: model(ids[:1].expand(3, -1)),
    ):

        def logits(model, call=call):
            found = call(model).logits
            return {"logits": shown(found, mask if len(found) == len(mask) else None)}

        both(pair_of(name), logits)


@pytest.mark.parametrize("call", ["prompt", "step"])
@pytest.mark.parametrize("wrong", [VOCAB, -1, 10**6])
def test_ids_that_are_none_raise_what_stock_raises(wrong, call, pair_of):
    """And the model is as good as before."""

    def attempt(model):
        cache = new_cache(model)
        model(prompt(1, 5), past_key_values=cache)
        ids = prompt(1, 4 if call == "prompt" else 1).clone()
        ids[0, -1] = wrong
        with pytest.raises(IndexError) as error:
            model(ids, past_key_values=new_cache(model) if call == "prompt" else cache)
        return str(error.value), model(prompt(1, 1), past_key_values=cache).logits

    (mine, logits), (theirs, wanted) = map(attempt, pair_of("llama"))
    assert mine == theirs
    same({"after": logits}, {"after": wanted})


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"input_ids": prompt(), "inputs_embeds": torch.zeros(1, 9, 64)},
        {"input_ids": prompt(), "attention_mask": torch.ones(2, 9)},
        {"input_ids": prompt(), "attention_mask": torch.ones(1, 4)},
        {"input_ids": prompt(), "attention_mask": torch.ones(1, 12)},
        {"input_ids": prompt(), "attention_mask": torch.zeros(1, 9, dtype=torch.long)},
        {"input_ids": prompt(), "position_ids": torch.zeros(1, 5, dtype=torch.long)},
        {"input_ids": prompt()[0]},
        {"input_ids": prompt().float()},
        {"inputs_embeds": torch.zeros(1, 9, 32)},
        {"inputs_embeds": torch.zeros(1, 9, 64, dtype=torch.float64)},
        {"input_ids": prompt(1, 0)},
    ],
    ids=lambda call: "-".join(f"{k}{tuple(v.shape)}" for k, v in call.items()) or "nothing",
)
def test_what_stock_makes_of_odd_arguments(call, pair_of):
    """Mostly an error, and the same one."""

    def attempt(model):
        try:
            return flat(model(**call).logits)
        except Exception as error:
            return type(error), str(error)

    ours, stock = map(attempt, pair_of("llama"))
    if isinstance(stock, tuple):
        assert ours == stock
    else:
        same(ours, stock)


@pytest.mark.parametrize(
    ("name", "kinds"), [("llama", 1), ("gemma2", 2), ("smollm3", 2), ("qwen2-moe-some-dense", 2), ("bloom", 1)]
)
def test_one_layer_of_a_kind_runs(pair_of, name, kinds, monkeypatch):
    """Sliding and full attention, rotated or not, dense and sparse are kinds; the place in the stack is none. So it is
    in later dry runs, as of an engine.
    """
    ours, stock = pair_of(name)
    forward = vars(ours)["forward"]
    call = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with check._one_of_a_kind(forward):
        passing = [layer.bound is check._passed_on for layer in forward.layers]
        warmed_up = fused_logits(forward, (9, 1))
    assert len(passing) - sum(passing) == kinds and passing[0] is False
    assert sum(passing) == 0 or not torch.equal(warmed_up, fused_logits(forward, (9, 1)))
    run, ran = layer_file.BoundLayer.__call__, set()
    monkeypatch.setattr(layer_file.BoundLayer, "__call__", lambda self, *given: ran.add(id(self)) or run(self, *given))
    monkeypatch.setattr(layer_forward, "warming_up", lambda: True)
    fused_logits(forward, (9, 1))
    assert len(ran) == kinds
    monkeypatch.undo()
    assert torch.equal(ours.generate(prompt(1, 5), **call), stock.generate(prompt(1, 5), **call))


def test_prompts_of_both_kinds_are_read_by_torch():
    """Else the user's first such prompt would wait for cuDNN's kernels, which takes up to a second."""
    read = [bucket_for(1, length) for length in check.PADDED if bucket_for(1, length) > SHORT]
    assert {length % 128 == 0 for length in read} == {True, False}


@pytest.mark.parametrize("median", [False, True], ids=["every token", "the median token"])
@pytest.mark.parametrize("token", [0, 1, 2])
def test_logits_that_are_no_numbers_are_never_near_enough(token, median):
    wanted = Expected(torch.randn(2, 3, 8), Choices(2), median)
    got = wanted.logits.clone()
    got[1, token] = torch.nan
    if median:
        got[1, (token + 1) % 3] = torch.nan
    assert wanted.off(wanted.logits) == 0 and wanted.off(got) == float("inf") and not wanted.agrees(got)
