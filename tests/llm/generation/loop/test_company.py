"""The loop that runs ahead of its tokens, and what others do meanwhile: a user's criteria and streamers, errors."""

import itertools

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from accel.llm.generation.loop import store_loop, token_loop
from support.llm.calls import Kept, followed_by_numbers
from support.llm.families import in_turn, prompt
from support.llm.outputs import same

NEW = 20  # tokens of a call


class Loud(StoppingCriteria):
    """Notes what it is shown, ends rows as it likes, and may do something besides."""

    def __init__(self, model, ends=None, act=None):
        self.model, self.ends, self.act, self.seen = model, ends, act, []

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is None and not kwargs
        self.seen.append(input_ids)
        if self.act is not None:
            self.act(self.model, input_ids, len(self.seen))
        if self.ends is None:
            return torch.zeros(len(input_ids), dtype=torch.bool)
        return self.ends(input_ids)


def rewrite(model, ids, calls):
    ids[:, -1] = (ids[:, -1] + 1) % 50


def edit(model, ids, calls):
    if calls == 5:
        model.model.layers[1].mlp.down_proj.weight.mul_(-1.5)


def hook(model, ids, calls):
    if calls == 5:
        model.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"input_ids": (kwargs["input_ids"] + 3) % 50}),
            with_kwargs=True,
        )


def train(model, ids, calls):
    if calls == 5:
        model.train()


def seed(model, ids, calls):
    if calls == 5:
        torch.manual_seed(77)


def numbers(model, ids, calls):
    torch.rand(2)


def nest(model, ids, calls):
    if calls in (1, 5):
        model.generate(prompt(1, 3), max_new_tokens=4, do_sample=False, pad_token_id=0)


def nest_and_fail(model, ids, calls):
    """A call that breaks off, inside another that goes on."""
    if calls in (1, 5):
        with pytest.raises(ZeroDivisionError):
            model.generate(prompt(1, 3), max_new_tokens=4, do_sample=False, pad_token_id=0, streamer=Breaks(2))


def look(model, ids, calls):
    """At the cache: it holds what stock's holds, all tokens but the last."""
    assert calls == 0 or model.cache.get_seq_length() == model.prompt + calls - 1
    if calls == 6:
        assert model.cache.layers[1].keys.shape[2] == model.prompt + calls - 1


def change(model, ids, calls):
    if calls == 5:
        model.cache.layers[0].keys.mul_(-1)


ACTS = {act.__name__: act for act in (edit, hook, train, seed, numbers, nest, nest_and_fail, look, change)}


def nested(act) -> int:
    """How many loops run inside the one that is looked at."""
    return 2 if act is nest else 0


@pytest.mark.parametrize(
    ("act", "call"),
    in_turn([rewrite, None, *ACTS.values()], [{}, {"do_sample": True, "eos_token_id": [5, 9, 11]}]),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_criteria_of_the_users_own(act, call, twins, ran):
    found = []
    for model in twins():
        loud = Loud(model, act=act)
        end = Loud(model, lambda ids: ids[:, -1] % 9 == 0)
        model.cache, model.prompt = DynamicCache(config=model.config), 7
        given = followed_by_numbers(
            model, (7, 4, 6), stopping_criteria=StoppingCriteriaList([loud, end]), past_key_values=model.cache, **call
        )
        found.append(given | {f"seen {step}": ids for step, ids in enumerate(loud.seen)})
    same(*found)
    assert ran[0] == 1 + nested(act)


class Stream(Kept):
    """Keeps what it is given, and may do something besides."""

    def __init__(self, model, act=None):
        super().__init__()
        self.model, self.act = model, act

    def put(self, value):
        assert not self.ended and value.device.type == "cpu" and not value.is_pinned()
        super().put(value)
        if self.act is not None:
            self.act(self.model, value, len(self.given) - 1)


@pytest.mark.parametrize(
    ("act", "drawn"), list(itertools.product([None, *ACTS.values()], [False, True])),
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_streamers(act, drawn, twins, ran):
    found, lengths = [], (7, 4, 6) if drawn else (6,)
    for model in twins():
        streamer = Stream(model, act)
        model.cache, model.prompt = DynamicCache(config=model.config), max(lengths)
        given = followed_by_numbers(
            model, lengths, streamer=streamer, past_key_values=model.cache, eos_token_id=[5, 9, 11], do_sample=drawn
        )
        assert streamer.ended
        found.append(given | {f"put {step}": value for step, value in enumerate(streamer.given)})
    same(*found)
    assert ran[0] == 1 + nested(act)


class Breaks:
    """Raises at one of its calls."""

    def __init__(self, at, error=ZeroDivisionError):
        self.at, self.error, self.calls = at, error, 0

    def put(self, value):
        self.calls += 1
        if self.calls == self.at:
            raise self.error

    def end(self):
        raise AssertionError("not after an error")


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [2, 3, 9])
def test_a_streamer_that_breaks_off(at, error, pair_of, ran):
    """The cache then holds what stock's holds, and can be used."""
    found = []
    for model in pair_of("llama"):
        cache, ids = DynamicCache(config=model.config), prompt(1, 6)
        torch.manual_seed(5)
        with pytest.raises(error):
            model.generate(
                ids,
                past_key_values=cache,
                streamer=Breaks(at, error),
                do_sample=True,
                max_new_tokens=NEW,
                pad_token_id=0,
            )
        kept = {"length": torch.tensor(cache.get_seq_length()), "random": torch.rand(2)}
        kept["keys"] = torch.stack([layer.keys for layer in cache.layers])
        found.append(kept | {"logits": model(prompt(1, 2, 4), past_key_values=cache).logits})
    same(*found)
    assert ran[0] == (at > 2)


def test_a_step_that_raises(pair_of, ran, monkeypatch):
    """What was chosen before it is handed on first."""
    ours, _ = pair_of("llama")
    step, calls = store_loop.next_logits, itertools.count()

    def failing(*args):
        if next(calls) >= 4:
            raise torch.OutOfMemoryError("no more")
        return step(*args)

    monkeypatch.setattr(store_loop, "next_logits", failing)
    streamer, cache = Stream(ours), DynamicCache(config=ours.config)
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        followed_by_numbers(ours, (6,), streamer=streamer, past_key_values=cache, do_sample=True)
    assert len(streamer.given) == 1 + 1 + 4 and cache.get_seq_length() == 6 + 4


def test_not_a_number(twins, ran):
    found = []
    for model in twins():

        def spoil(model, value, calls):
            if calls == 4:
                model.get_output_embeddings().weight.fill_(float("nan"))

        streamer = Stream(model, spoil)
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            followed_by_numbers(model, (6,), do_sample=True, streamer=streamer)
        found.append({"streamed": torch.cat(streamer.given), "random": torch.rand(2)})
    same(*found)
    assert ran[0] == 1


def test_an_interrupt_while_a_step_is_launched(pair_of, ran, monkeypatch):
    """Between two tokens, as stock has it: the random numbers and the cache are those of the tokens handed on."""
    ours, stock = pair_of("llama")
    draw, calls, streamer, cache = token_loop.draw, itertools.count(), Stream(ours), DynamicCache(config=ours.config)

    def interrupted(probabilities):
        drawn = draw(probabilities)
        if next(calls) == 5:
            raise KeyboardInterrupt
        return drawn

    monkeypatch.setattr(token_loop, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        followed_by_numbers(ours, (6,), streamer=streamer, past_key_values=cache, do_sample=True)
    after, put = torch.rand(3), len(streamer.given) - 1
    assert cache.get_seq_length() == 6 + 5 and put == 1 + 4
    wanted = followed_by_numbers(stock, (6,), do_sample=True, max_new_tokens=1 + 5)
    assert torch.equal(torch.cat(streamer.given), wanted["sequences"][0, : 6 + put]) and torch.equal(
        after, wanted["random"]
    )
