"""What layers are given in a call that is not understood: whether they compute of it what they compute in a text."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

import accel
from accel.errors import Unfit
from accel.llm.attention.rotary import HALF, Rotary
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.layer_inputs import NOT_CAUSAL, CheckedStep
from accel.llm.parts.residual import Widths
from support.llm.families import make, prompt
from support.llm.outputs import flat, same

START, NEW = 3, 4
END = START + NEW
PADDED = torch.ones(2, END, dtype=torch.long)
PADDED[1, :2] = 0


def shown(window: int | None = None, padding: torch.Tensor | None = None) -> torch.Tensor:
    """(2, 1, NEW, END): what is seen, written down query by query and key by key."""
    found = torch.zeros(2, 1, NEW, END, dtype=torch.bool)
    for row in range(2):
        for query in range(START, END):
            for key in range(query + 1):
                hidden = padding is not None and not padding[row, key]
                found[row, 0, query - START, key] = not hidden and (window is None or query - key < window)
    return found


def changed(query: int, key: int, **more) -> torch.Tensor:
    found = shown(**more)
    found[1, 0, query, key] ^= True
    return found


def added(mask: torch.Tensor, hidden: float = torch.finfo(torch.float32).min, seen: float = 0.0) -> torch.Tensor:
    return torch.where(mask, seen, hidden)


MASKS = {
    "causal": (shown(), {}, True),
    "of one row": (shown()[:1], {}, True),
    "added": (added(shown()), {}, True),
    "added infinities": (added(shown(), -torch.inf), {}, True),
    "a bias": (added(shown(), seen=0.5), {}, False),
    "of whole numbers": (shown().int(), {}, False),
    "hidden but for a little": (added(shown(), -1e4), {}, False),
    "sees the next token": (changed(1, START + 2), {}, False),
    "hides a token": (changed(1, 2), {}, False),
    "padding": (shown(padding=PADDED), {"mask": PADDED}, True),
    "padding seen": (shown(), {"mask": PADDED}, False),
    "padding that no mask hides": (shown(padding=PADDED), {}, False),
    "window": (shown(window=2), {"window": 2}, True),
    "no window": (shown(), {"window": 2}, False),
    "another window": (shown(window=3), {"window": 2}, False),
    "keys that its window has passed are dropped": (shown(window=2)[..., 2:], {"window": 2}, True),
    "keys that it sees are dropped": (shown(window=2)[..., 3:], {"window": 2}, False),
    "keys are dropped": (shown()[..., 2:], {}, False),
    "more keys": (torch.nn.functional.pad(shown(), (0, 1)), {}, False),
    "none": (None, {}, True),
    "none, and padding": (None, {"mask": PADDED}, False),
    "none, which is not causal": (None, {"bare": False}, False),
    "flat": (PADDED.bool(), {"mask": PADDED}, True),
    "another flat one": (PADDED, {"mask": PADDED.flip(1)}, False),
    "flat, of an attention that is not causal": (PADDED, {"mask": PADDED, "bare": False}, False),
    "of its own kind": ("blocks", {}, False),
}


CACHE = DynamicCache()


def step(mask: torch.Tensor | None = None, bare: bool = True) -> CheckedStep:
    convention, tokens = SimpleNamespace(unmasked_alike=bare, position_parts=()), torch.zeros(2, NEW, dtype=torch.long)
    forward = SimpleNamespace(convention=convention, masked=set(), embeddings=lambda: torch.zeros(1), module=None)
    return CheckedStep(forward, {}, CACHE, tokens, START, mask, True, frozenset())


def layer(given: dict | None = None, window: int | None = None, borrows: bool = False) -> SimpleNamespace:
    known = dict(given or {})
    keywords = tuple(known.pop("reads", ()))
    attention = SimpleNamespace(keeps_state=False, window=window)
    attention.mixers = (attention,)
    given, widths = frozenset(known.items()), Widths(torch.float32, torch.float32)
    more = {"keywords": keywords, "widths": widths, "borrows": borrows}
    return SimpleNamespace(spec=SimpleNamespace(given=given, attention=attention, **more))


X = torch.zeros(2, NEW, 8)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.share(1)
def test_a_mask_is_causal_or_all_layers_run_stock(name):
    mask, more, causal = MASKS[name]
    checked, one = step(more.get("mask"), more.get("bare", True)), layer(window=more.get("window"))
    given = {"cache": CACHE, "attention_mask": mask}
    assert checked.runs_stock(one, (X,), given) is not causal and checked.reason == (None if causal else NOT_CAUSAL)
    assert causal or checked.runs_stock(layer(), (X,), {})  # all of them


def test_what_padding_itself_sees_is_nobodys_concern():
    before = PADDED.flip(1)  # the last two tokens of the second row
    mask = shown(padding=before)
    mask[1, 0, -2:] = True
    assert not step(before).runs_stock(layer(), (X,), {"cache": CACHE, "attention_mask": mask})


TABLE = torch.zeros(2, NEW, 6)
TABLES = {"position_embeddings": ((3, True), (3, True)), "reads": ["position_embeddings"]}
TABLE_OF_ITS_OWN = {"position_ids": (2, False), "reads": ["position_ids"]}
INPUTS = {
    "tables": (TABLES, {"position_embeddings": (TABLE, TABLE)}, True),
    "tables of several parts": (TABLES, {"position_embeddings": (TABLE[None], TABLE[None])}, False),
    "one table": (TABLES, {"position_embeddings": (TABLE,)}, False),
    "places": ({}, {"position_ids": torch.zeros(3, 2, NEW, dtype=torch.long)}, True),
    "places of another form": (TABLE_OF_ITS_OWN, {"position_ids": torch.zeros(3, 2, NEW).long()}, False),
    "tables that are missing": (TABLES, {"position_embeddings": None}, False),
    "another cache besides": ({}, {"any_name": DynamicCache()}, False),
    "nothing": ({}, {"visual": None, "more": False, "others": ()}, True),
    "something": ({}, {"visual": TABLE}, False),
    "which logits": ({}, {"logits_to_keep": 1}, True),
    "a number": ({"use_cache": bool}, {"use_cache": True}, True),
    "a name": ({}, {"kind": "sliding"}, False),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.share(1)
def test_other_inputs_are_of_the_form_that_they_have_in_a_text(name):
    known, given, as_known = INPUTS[name]
    checked = step()
    assert checked.runs_stock(layer(known), (), {"hidden_states": X, "cache": CACHE} | given) is not as_known
    assert as_known or next(iter(given)) in checked.reason


@pytest.mark.parametrize("apart", [False, True])
def test_heads_turn_by_one_angle_a_pair(apart):
    one, angles = layer(TABLES), torch.randn(2, NEW, 3, generator=torch.Generator().manual_seed(0))
    one.spec.attention.rotary = Rotary("position_embeddings", True, HALF, interleaved=False)
    table = torch.cat((angles, angles.flip(0) if apart else angles), dim=-1)
    given = {"cache": CACHE, "position_embeddings": (table.cos(), table.sin())}
    assert step().runs_stock(one, (X,), given) is apart


@pytest.mark.parametrize("args", [(X[:, :2],), (X.double(),)], ids=["fewer", "another dtype"])
def test_hidden_states_are_those_of_the_tokens(args):
    assert step().runs_stock(layer(), args, {"cache": CACHE})
    assert not step().runs_stock(layer(), (X,), {"cache": CACHE})
    assert step().runs_stock(layer(), (X,), {}) and step().runs_stock(layer(), (X,), {"cache": DynamicCache()})


@pytest.mark.parametrize("name", ["padding", "window", "padding seen", "another window"])
def test_last_tokens_alone_attend_to_what_another_layer_has_stored(name):
    mask, more, causal = MASKS[name]
    one = layer(window=more.get("window"), borrows=True)
    given = {"cache": CACHE, "attention_mask": mask[:, :, -2:]}
    assert step(more.get("mask")).runs_stock(one, (X[:, -2:],), given) is not causal


def test_a_later_layer_that_is_given_something_else_ends_the_forward():
    """Layers before it have stored nothing in the caller's cache yet, so that stock can begin anew."""
    checked, given = step(), {"cache": CACHE, "attention_mask": shown()}
    assert not checked.runs_stock(layer(), (X,), given)
    with pytest.raises(Unfit, match=NOT_CAUSAL):
        checked.runs_stock(layer(window=2), (X,), given)


class Shallow(LlamaForCausalLM):
    """Where it is told so, leaves its last layer out."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None,
                logits_to_keep=0, shallow=False, **kwargs):  # fmt: skip
        given = {"position_ids": position_ids, "past_key_values": past_key_values, "use_cache": use_cache}
        self.config.num_hidden_layers -= shallow
        try:
            return super().forward(input_ids, attention_mask, **given, logits_to_keep=logits_to_keep, **kwargs)
        finally:
            self.config.num_hidden_layers += shallow


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_that_are_left_out_are_noticed_and_not_tried_again(monkeypatch):
    stock = make("llama")
    stock.__class__ = Shallow
    ours = accel.optimize(copy.deepcopy(stock))
    tried, own = [], DecoderForward.run_own_code
    monkeypatch.setattr(DecoderForward, "run_own_code", lambda *given, **more: tried.append(1) or own(*given, **more))
    for call in (1, 2):
        mine, theirs = (model(prompt(2), use_cache=True, shallow=True) for model in (ours, stock))
        same(flat(mine), flat(theirs))
        reason = "its layers do not run one after another"
        assert accel.report(ours).fallbacks == [("", reason, call)] and tried == [1]
    same(flat(ours(prompt(2))), flat(stock(prompt(2))))
    assert len(accel.report(ours).fallbacks) == 1
