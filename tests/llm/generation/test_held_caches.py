"""Caches that a caller holds, and prompts of every length behind them."""

import copy
import pickle

import pytest
import torch
from torch import nn

import accel
from accel.cuda_graphs.fingerprint import Fingerprint
from accel.cuda_graphs.runner import GraphPool, GraphRunner
from accel.libraries.cache import cache_of as cache_of_output
from accel.llm.generation.prefill import FINE, MOST_PROMPT, STEP, bucket_for, by_graph, kernel_key_of, pad_to_bucket
from accel.llm.kv_cache.cache import StoreLayer
from accel.patching.fallback_log import FallbackLog
from support.everything import EVERYTHING
from support.llm.calls import new_cache, unaliased
from support.llm.families import BY_NAME, FAMILIES, make, padded, prompt
from support.llm.filled_prefill import Anywhere, new_pair, shapes, talk
from support.llm.optimized_models import shared
from support.llm.outputs import flat, generate, same

CORE = [family.name for family in FAMILIES if family.core]


@pytest.mark.parametrize("name", CORE)
def test_a_cache_of_stock_goes_on_with_ours_and_the_other_way(name, pair_of):
    ids, mask = padded((9, 6))
    ours, stock = pair_of(name)

    def run(first, second):
        cache = new_cache(stock)
        found = {"first": first(ids, attention_mask=mask, past_key_values=cache).logits[mask.bool()]}
        grown = mask
        for step in range(4):
            grown = torch.cat([grown, grown.new_ones(2, 1)], 1)
            model = second if step % 2 == 0 else first
            found |= flat(model(prompt(2, 1, step), attention_mask=grown, past_key_values=cache).logits, str(step))
        return found

    wanted = run(stock, stock)
    for pair in ((ours, ours), (ours, stock), (stock, ours)):
        same(run(*pair), wanted)


@pytest.mark.parametrize("name", CORE)
def test_a_cache_made_fast_is_good_after_restore(name, pair):
    ours, stock = pair(name)
    ids = prompt(2, 8)

    def talk(model, between=lambda model: model):
        cache, found = new_cache(model), {}
        for step, words in enumerate((ids[:, :6], ids[:, 6:7], ids[:, 7:8])):
            found[f"{step}"] = model(words, past_key_values=cache).logits
        between(model)
        for step in range(3):
            found[f"then {step}"] = model(prompt(2, 1, step), past_key_values=cache).logits
        copied = copy.deepcopy(cache)
        forgets = getattr(model.config, "sliding_window", None) is not None or BY_NAME[name].stateful
        if not forgets:  # what a cut brings back
            cache.crop(-1)
        for kind, each in (("cropped", cache), ("copied", copied)):
            found[kind] = model(prompt(2, 1, 7), past_key_values=each).logits
        return found

    wanted = talk(stock)
    same(talk(ours, accel.restore), wanted)
    same(talk(ours, accel.optimize), wanted)


HELD = {
    "a forward's": lambda model: cache_of_output(model(prompt(1, 6))),
    "generate()'s": lambda model: generated(model, prompt(1, 9)),
    "beams'": lambda model: generated(model, prompt(1, 62), max_new_tokens=14, num_beams=2),
    "with rows to come": lambda model: waiting(cache_of_output(model(prompt(1, 7)))),
    "without its cache": lambda model: copy.deepcopy(cache_of_output(model(prompt(1, 5)))),
}


def generated(model, ids, **call):
    call = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True} | call
    return cache_of_output(model.generate(input_ids=ids, eos_token_id=None, pad_token_id=0, **call))


def waiting(cache):
    for layer in cache.layers:
        layer.batch_repeat_interleave(2)
        layer.batch_select_indices([0])
    cache.layers[0].batch_repeat_interleave(1)
    return cache


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
@pytest.mark.parametrize("name", ["llama-one-layer", "mistral"])
@pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])
def test_a_compiler_is_handed_the_librarys_cache(name, gradients, pair_of):
    """It traces the cache's code, which ours was not written for."""
    ours, stock = pair_of(name)
    compiled = torch.compile((ours if gradients else copy.deepcopy(stock)).forward, fullgraph=True, backend="eager")
    for how, made in HELD.items():
        held, wanted = made(ours), made(stock)
        assert isinstance(held.layers[0], StoreLayer), how
        for step in range(2):
            words = prompt(1, 1, step).expand(wanted.layers[0].keys.shape[0], 1)
            with torch.set_grad_enabled(gradients):
                found, theirs = (call(words, past_key_values=one) for call, one in ((compiled, held), (stock, wanted)))
            same(flat(found.logits), flat(theirs.logits))
        for layer, its in zip(held.layers, wanted.layers, strict=True):
            assert type(layer) is type(its) and vars(layer).keys() == vars(its).keys(), how
            same({"keys": layer.keys, "values": layer.values}, {"keys": its.keys, "values": its.values})
        if not gradients:
            kept = all(layer.keys.shape[2] == layer.get_seq_length() for layer in wanted.layers)
            same(flat(ours(words, past_key_values=held).logits), flat(stock(words, past_key_values=wanted).logits))
            assert isinstance(held.layers[0], StoreLayer) == kept, how  # what a window has dropped is in no cache
    torch.compiler.reset()


def test_outputs_are_not_written_to_later(pair_of):
    assert unaliased(pair_of("llama")[0])


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 32, 33, 64, 100, 1024])
def test_few_lengths_and_little_filling(rows):
    rooms = [bucket_for(rows, new) for new in range(1, MOST_PROMPT // rows + 1)]
    assert all(room >= new for new, room in enumerate(rooms, 1))
    steps = (STEP if new * rows <= FINE else 2 * STEP for new in range(1, len(rooms) + 1))
    assert all((room - new) * rows < step for (new, room), step in zip(enumerate(rooms, 1), steps, strict=True))
    assert rooms == sorted(rooms) and len(set(rooms)) <= 2 * MOST_PROMPT // STEP + 2
    assert len(set(rooms)) <= 50 or rows & (rows - 1)
    assert bucket_for(rows, MOST_PROMPT // rows + 1) is None


def test_which_steps_behind_stored_tokens_are_graphs():
    assert all(by_graph(rows, 1) for rows in (1, 64, 65, 512)) and not by_graph(513, 1)
    assert by_graph(1, 64) and by_graph(16, 4)  # a draft to verify
    assert not by_graph(1, 65) and not by_graph(65, 2)  # each length would be captured anew


def test_kernels_of_other_numbers_of_rows_are_compiled_side_by_side():
    """Once for each power of two, for 65 to 512 rows, and for more."""
    runner, warmed = GraphRunner(nn.Linear(2, 2), "", GraphPool(None), FallbackLog(), lambda module: None, True), []
    runner.kernel_key = kernel_key_of
    copied = copy.deepcopy(runner)
    for one in (runner, copied):
        for shape in ((1, 1), (3, 1), (4, 1), (1, 4), (64, 1), (65, 1), (512, 1), (2, 100), (1, 513), (1, 3000)):
            leaves, spec = torch.utils._pytree.tree_flatten(((torch.zeros(shape), None), {}))
            warmed.append(one._warm_up(lambda tokens, _: warmed.append(tuple(tokens.shape)), leaves, spec))
        assert [was for was in warmed if isinstance(was, tuple)] == [(1, 1), (3, 1), (64, 1), (65, 1), (1, 513)]
        assert warmed.count(True) == 1  # after which all that there is to measure is measured
        warmed.clear()


def test_filled_with_what_is_there():
    ids, positions = prompt(2, 5), torch.tensor([[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]])
    tokens, at, last = pad_to_bucket(ids, positions, 8)
    assert tokens.tolist() == [[*row, row[-1], row[-1], row[-1]] for row in ids.tolist()]
    assert at.tolist() == [[0, 0, 1, 2, 3, 3, 3, 3], [0, 1, 2, 3, 4, 4, 4, 4]]
    assert last.tolist() == [4] and last.dtype == torch.int64
    wide = torch.randn(2, 5, 3)
    tokens, at, _ = pad_to_bucket(wide, positions[:1], 6)
    assert torch.equal(tokens, torch.cat([wide, wide[:, -1:]], 1)) and at.tolist() == [[0, 0, 1, 2, 3, 3]]
    assert torch.equal(pad_to_bucket(ids, positions, 5)[0], ids)


class Bound:
    """Stands for a GraphRunner whose graphs gain nothing from 128 tokens on, which it finds by timing both ways."""

    def __init__(self):
        self.fingerprint, self.reason = Fingerprint(nn.Linear(2, 2)), None

    def __getstate__(self):
        return {"reason": None}

    def __call__(self, eager, args, kwargs, variant, without_graph):
        without_graph()
        return without_graph() if self.reason is not None or args[0].shape[1] >= 128 else eager(*args)


def test_where_a_graph_gains_nothing_longer_ones_are_not_tried():
    prompts, model = Anywhere(Bound()), make("llama", max_position_embeddings=MOST_PROMPT)

    def rooms(prompts):
        given = [torch.zeros(1, new, dtype=torch.long) for new in (9, 64, 120, 128, 700)]
        return [prompts.bucket(model, each, 1) for each in given]

    def called(new):
        tokens = torch.zeros(1, new, dtype=torch.long)
        return prompts(lambda *args: ["graph"], lambda: ["plain"], tokens, tokens, None, bucket_for(1, new), False)[0]

    everything = [16, 64, 128, 128, 704]
    assert called(60) == "graph" and rooms(prompts) == everything
    assert called(700) == "plain" and rooms(prompts) == [16, 64, 128, 128, None]
    assert called(120) == "plain" and rooms(prompts) == [16, 64, None, None, None]
    assert rooms(copy.deepcopy(prompts)) == everything
    prompts.runner.fingerprint = Fingerprint(nn.Linear(2, 2))  # the model has changed
    assert rooms(prompts) == everything


def test_what_will_pass_is_no_reason_to_try_no_longer():
    """A hook, while it is there; and a model that has changed is one for the runner to look at, at any length."""
    prompts, model = Anywhere(Bound()), nn.Linear(2, 2)
    model.config = make("llama").config
    prompts.runner.fingerprint = Fingerprint(model)
    tokens = torch.zeros(1, 128, dtype=torch.long)

    def called():
        return prompts(lambda *args: ["graph"], lambda: ["plain"], tokens, tokens, None, 128, False)[0]

    prompts.runner.reason = "forward hooks on it would not run"
    assert called() == "plain" and prompts.bucket(model, tokens, 1) == 128
    prompts.runner.reason = None
    assert called() == "plain" and prompts.bucket(model, tokens, 1) is None
    handle = model.register_forward_hook(lambda *args: None)
    assert prompts.bucket(model, tokens, 1) == 128
    handle.remove()
    assert prompts.bucket(model, tokens, 1) is None


def test_tables_of_positions_are_not_left():
    ours, stock = new_pair("gpt2", n_positions=90)
    for length, room in ((60, 64), (65, 90), (90, 90)):
        ids = prompt(1, length)
        same(talk(ours, ids, steps=0), talk(stock, ids, steps=0))
        assert shapes(ours).pop() == ((1, room), ("prompt",))


@pytest.mark.parametrize("name", ["llama-rope-dynamic", "phi3-longrope"])
def test_frequencies_that_change_with_the_length_do_not_follow_the_filling(name):
    ours, stock = new_pair(name)
    for length in (4, 9, 12, 13, 30, 11, 5):
        same(talk(ours, prompt(1, length)), talk(stock, prompt(1, length)))
    assert ((1, 12 if name == "llama-rope-dynamic" else 16), ("prompt",)) in shapes(ours)


def test_not_under_the_options_and_in_models_that_forbid_it():
    assert vars(accel.optimize(make("llama"), graphs=False))["forward"].prompts is None
    assert vars(accel.optimize(make("llama"), graphs=True))["forward"].prompts is not None
    assert vars(shared("mixtral").ours)["forward"].prompts is not None
    model = shared("bloom").ours  # no position_ids: it counts them itself
    assert vars(model)["forward"].convention.pads_prompts and vars(model)["forward"].prompts is not None


def test_a_class_that_slices_its_logits_otherwise_stays_out():
    """It takes a number to keep, and nothing else."""
    from transformers import LlamaForCausalLM

    class Other(LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
                    inputs_embeds=None, use_cache=None, logits_to_keep=0, **kwargs):  # fmt: skip
            given = {"position_ids": position_ids, "past_key_values": past_key_values, "use_cache": use_cache}
            output = super().forward(input_ids, attention_mask, inputs_embeds=inputs_embeds, **given, **kwargs)
            output.logits = output.logits[:, slice(-int(logits_to_keep), None)]
            return output

    stock = make("llama")
    stock.__class__ = Other
    ours = accel.optimize(copy.deepcopy(stock))
    assert vars(ours)["forward"].convention is not None, accel.report(ours)
    assert vars(ours)["forward"].prompts is None
    same(generate(ours, prompt(), None), generate(stock, prompt(), None))


def test_copies_fill_up_too():
    ours, stock = new_pair("llama")
    twin = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    same(flat(generate(twin, prompt(1, 20), None)), flat(generate(stock, prompt(1, 20), None)))
    assert shapes(twin) and not shapes(ours)
