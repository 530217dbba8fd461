"""Short prompts filled up to the lengths of graphs, against an unpatched deep copy; run eagerly, as captured."""

import copy
import io
import pickle

import pytest
import torch
from accel_kernels.attention.paged.kv import LENGTH
from torch import nn

import accel
from accel.cuda_graphs.fingerprint import Fingerprint
from accel.cuda_graphs.runner import GraphPool, GraphRunner
from accel.llm.generation import prefill as short
from accel.llm.generation.prefill import FINE, MOST, STEP, Prompts, bucket_for, pad_to_bucket
from accel.patching.ledger import Ledger
from support.llm.families import BY_NAME, FAMILIES, available, every, make, padded, prompt
from support.llm.modes import MODES
from support.llm.outputs import flat, generate, same

FAST = [family.name for family in FAMILIES if family.expected == "fast"]
# Rotated, with a table of positions, with a window, with a softcap, with biases by distance, side by side, rotated by a
# table of its own, with positions counted from 2, with normed heads.
SOME = ("llama", "gpt2", "mistral", "gemma2", "falcon-alibi", "phi", "gptj", "opt", "qwen3")
LENGTHS = (1, 2, 15, 16, 17, 32, 33, 63, 64, 65, 100)
MODE = {mode.name: mode for mode in MODES}


class Eager:
    """Takes the place of the graphs: runs what would be captured, on buffers of its own."""

    def __init__(self):
        self.shapes = []

    def __call__(self, eager, args, kwargs, variant=(), instead=None):
        self.shapes.append((tuple(args[0].shape[:2]), variant))
        return eager(*(each.clone() for each in args), **kwargs)


class Anywhere(Prompts):
    """On a CPU too."""

    @staticmethod
    def captures(tokens):
        return True


def new_pair(name: str, **changes):
    """(optimized, and every short prompt of it filled up; stock)."""
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    stock = make(name, **changes)
    ours = accel.optimize(copy.deepcopy(stock))
    if vars(ours)["forward"].prompts is not None:
        vars(ours)["forward"].prompts = Anywhere(Eager())
    return ours, stock


@pytest.fixture(scope="module")
def pair_of():
    made = {}

    def pair(name):
        if name not in made:
            made[name] = new_pair(name)
        shapes(made[name][0]).clear()
        return made[name]

    return pair


def shapes(model) -> list:
    """((rows, tokens), variant) of every prompt that was filled up."""
    prompts = vars(model)["forward"].prompts
    return [] if prompts is None else prompts.runner.shapes


def cache_of(model):
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def talk(model, ids, mask=None, steps: int = 4, **given) -> dict:
    """Logits of a prompt's last token and of given words after it, and what the cache holds in the end."""
    cache, found = cache_of(model), {}
    if mask is not None:
        given["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    output = model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1, **given)
    found["prompt"] = output.logits
    for step in range(steps):
        more = {}
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            more = {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
        output = model(prompt(len(ids), 1, 40 + step), past_key_values=cache, logits_to_keep=1, **more)
        found[f"step {step}"] = output.logits
    found["length"] = torch.tensor(cache.get_seq_length())
    return found


# -- lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 32, 33, 64, 100, 1024])
def test_few_lengths_and_little_filling(rows):
    rooms = [bucket_for(rows, new) for new in range(1, MOST // rows + 1)]
    assert all(room >= new for new, room in enumerate(rooms, 1))
    steps = (STEP if new * rows <= FINE else 2 * STEP for new in range(1, len(rooms) + 1))
    assert all((room - new) * rows < step for (new, room), step in zip(enumerate(rooms, 1), steps, strict=True))
    assert rooms == sorted(rooms) and len(set(rooms)) <= 2 * MOST // STEP + 2
    assert len(set(rooms)) <= 50 or rows & (rows - 1)
    assert bucket_for(rows, MOST // rows + 1) is None


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

    def __call__(self, eager, args, kwargs, variant, instead):
        instead()
        return instead() if self.reason is not None or args[0].shape[1] >= 128 else eager(*args)


def test_where_a_graph_gains_nothing_longer_ones_are_not_tried():
    prompts, model = Anywhere(Bound()), make("llama", max_position_embeddings=MOST)

    def rooms(prompts):
        given = [(torch.zeros(1, new, dtype=torch.long), torch.zeros(1, new)) for new in (9, 64, 120, 128, 700)]
        return [prompts.bucket(model, *each, 1) for each in given]

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
    assert called() == "plain" and prompts.bucket(model, tokens, tokens, 1) == 128
    prompts.runner.reason = None
    assert called() == "plain" and prompts.bucket(model, tokens, tokens, 1) is None
    handle = model.register_forward_hook(lambda *args: None)
    assert prompts.bucket(model, tokens, tokens, 1) == 128
    handle.remove()
    assert prompts.bucket(model, tokens, tokens, 1) is None


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


# -- the same as stock -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SOME)
def test_logits_and_the_steps_after(name, length, pair_of):
    ours, stock = pair_of(name)
    ids = prompt(1, length, length)
    same(talk(ours, ids), talk(stock, ids))
    assert shapes(ours) == [((1, bucket_for(1, length)), ("prompt",))]


@pytest.mark.parametrize("lengths", [(9, 5), (16, 1, 7), (31, 33), (20, 20)], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_padded_on_the_left(name, lengths, pair_of):
    ours, stock = pair_of(name)
    ids, mask = padded(lengths)
    same(talk(ours, ids, mask), talk(stock, ids, mask))
    variant = ("prompt",) if len(set(lengths)) == 1 else ("prompt", "mask")
    assert shapes(ours) == [((len(lengths), bucket_for(len(lengths), max(lengths))), variant)]


@pytest.mark.parametrize(("name", "mode"), [*every(2, FAST, ["greedy-padded"]), *every(4, FAST, ["greedy"])], ids=str)
def test_every_family(name, mode, pair_of):
    """That the filling is taken, or that the family stays out, is what its way of being called says."""
    ours, stock = pair_of(name)
    inputs = padded(MODE[mode].lengths)
    same(MODE[mode](ours, *inputs), MODE[mode](stock, *inputs))
    assert len(shapes(ours)) == vars(ours)["forward"].convention.fills


CALLS = (
    "greedy-long", "one-word", "no-prompt", "sample", "sample-top", "sample-several", "beam", "beam-sample", "assisted",
    "prompt-lookup", "continued", "cropped", "given-cache", "prefilled", "fanned-out", "chunked-prefill", "embeddings",
    "streamer", "inference-mode", "positions", "padded-right", "guided",
)  # fmt: skip


@pytest.mark.parametrize("mode", [MODE[name] for name in CALLS], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
@pytest.mark.share(2)
def test_ways_of_generating(name, mode, pair_of):
    ours, stock = pair_of(name)
    inputs = padded(mode.lengths)
    try:
        theirs = mode(stock, *inputs)
    except (ValueError, TypeError, AttributeError, RuntimeError, IndexError):
        pytest.skip("stock cannot do this itself")
    same(mode(ours, *inputs), theirs)


def test_embeddings_are_filled_up_too(pair_of):
    ours, stock = pair_of("llama")
    ids = prompt(2, 11)

    def call(model):
        return {"logits": model(inputs_embeds=model.get_input_embeddings()(ids), logits_to_keep=1).logits}

    same(call(ours), call(stock))
    assert shapes(ours) == [((2, 16), ("prompt",))]


# -- what is filled up stays without effect ----------------------------------------------------------------------------


def with_filling(monkeypatch, model, change, ids, mask) -> tuple[dict, list[torch.Tensor]]:
    """What comes out, and the cache, where change(tokens behind the prompt) is what it is filled up with."""
    whole = short.pad_to_bucket

    def other(tokens, positions, room):
        new = tokens.shape[1]
        tokens, positions, last = whole(tokens, positions, room)
        assert tokens.shape[1] > new
        change(tokens[:, new:])
        return tokens, positions, last

    cache = cache_of(model)
    monkeypatch.setattr(short, "pad_to_bucket", other)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    embeds = model.get_input_embeddings()(ids)
    output = model(
        inputs_embeds=embeds, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
    )
    monkeypatch.setattr(short, "pad_to_bucket", whole)
    found = {"logits": output.logits}
    grown = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    at = grown.sum(1, keepdim=True) - 1
    word = prompt(len(ids), 1, 3)
    found["next"] = model(word, attention_mask=grown, position_ids=at, past_key_values=cache).logits
    return found, [t.clone() for layer in cache.layers for t in (layer.keys, layer.values)]


@pytest.mark.parametrize("value", [0.0, 50.0, float("inf"), float("nan")])
@pytest.mark.parametrize("lengths", [(10,), (10, 6), (41,)], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_bit_for_bit_whatever_it_is_filled_up_with(name, lengths, value, pair_of, monkeypatch):
    ours, _ = pair_of(name)
    ids, mask = padded(lengths)
    wanted, kept = with_filling(monkeypatch, ours, lambda t: None, ids, mask)
    found, held = with_filling(monkeypatch, ours, lambda t: t.fill_(value), ids, mask)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert all(map(torch.equal, held, kept)) and all(t.isfinite().all() for t in held)
    assert all(t.shape[2] == max(lengths) + 1 for t in held)


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-alibi"])
def test_what_is_done_with_the_cache_afterwards(name, pair_of):
    """Rows reordered, repeated, chosen, cut, copied and pickled: the filling behind them is nowhere read."""
    ours, stock = pair_of(name)

    def call(model):
        cache, found = cache_of(model), {}
        model(prompt(2, 70), past_key_values=cache, logits_to_keep=1)

        def word(name, seed):
            rows = cache.layers[0].keys.shape[0]
            found[name] = model(prompt(rows, 1, seed), past_key_values=cache).logits
            found[f"{name}, keys"] = torch.stack([layer.keys for layer in cache.layers])

        cache.reorder_cache(torch.tensor([1, 1]))
        word("reordered", 1)
        cache.batch_repeat_interleave(2)
        word("repeated", 2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        word("selected", 3)
        cache.crop(-8)  # into the prompt, and across a block
        word("cropped", 4)
        cache = copy.deepcopy(cache)
        word("copied", 5)
        cache = pickle.loads(pickle.dumps(cache))
        word("pickled", 6)
        held = io.BytesIO()
        torch.save(cache, held)
        held.seek(0)
        cache = torch.load(held, weights_only=False)
        word("saved", 7)
        return found

    same(call(ours), call(stock))
    assert shapes(ours) == [((2, 96), ("prompt",))]


def test_two_lengths_of_one_room_in_turn(pair_of):
    """The shorter prompt after the longer, in one cache that is emptied between."""
    ours, stock = pair_of("llama")

    def call(model):
        cache, found = cache_of(model), {}
        for length in (60, 35, 50):
            cache.crop(-cache.get_seq_length())
            found[f"{length}"] = model(prompt(1, length), past_key_values=cache, logits_to_keep=1).logits
            found[f"{length}, then"] = model(prompt(1, 1, 7), past_key_values=cache).logits
        return found

    same(call(ours), call(stock))
    assert shapes(ours) == 3 * [((1, 64), ("prompt",))]


def test_the_kernels_are_told_the_real_length(pair_of):
    ours, _ = pair_of("llama")
    cache = cache_of(ours)
    ours(prompt(1, 10), past_key_values=cache, logits_to_keep=1)
    store = cache.layers[0].store
    assert store.length == 10 and int(store.metadata[LENGTH]) == 10


# -- what is not filled up ---------------------------------------------------------------------------------------------


def test_other_calls_are_as_they_were(pair_of):
    ours, _stock = pair_of("llama")
    cache = cache_of(ours)
    ours(prompt(1, 10))  # all logits
    ours(prompt(1, 10), logits_to_keep=3)
    ours(prompt(1, 10), past_key_values=cache)
    ours(prompt(1, 70), past_key_values=cache, logits_to_keep=1)  # not the beginning
    ours(prompt(1, MOST + 1), logits_to_keep=1)
    assert shapes(ours) == []


def test_not_under_the_options_and_in_models_that_forbid_it():
    assert vars(accel.optimize(make("llama"), graphs=False))["forward"].prompts is None
    assert vars(accel.optimize(make("llama"), graphs=True))["forward"].prompts is not None
    for name in ("mixtral", "bloom"):  # experts; no position_ids
        model = accel.optimize(make(name))
        assert not vars(model)["forward"].convention.fills and vars(model)["forward"].prompts is None


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


def runner_of(reason: str | None) -> GraphRunner:
    return GraphRunner(nn.Linear(2, 2), "", GraphPool(None), Ledger(), lambda module: reason, True)


def test_where_no_graph_will_be_the_prompt_is_read_as_it_is():
    runner = runner_of(None)

    def run():
        return runner(lambda x: "filled", (torch.zeros(2),), {}, ("prompt",), instead=lambda: "plain")

    assert run() == "filled"  # the first of its shape: what its graph is going to give
    (entry,) = runner.entries.values()
    assert entry.graph is None and entry.reason is None
    entry.reason = "a graph gains nothing here"
    assert run() == "plain"


def test_hooks_never_see_the_filling():
    """They would be no part of a graph."""
    runner = runner_of("forward hooks on it would not run")
    assert runner(lambda x: "filled", (torch.zeros(2),), {}, instead=lambda: "plain") == "plain"
    assert runner.ledger.rows() == [("", "no graph: forward hooks on it would not run", 1)]
