"""Lightning attention: what is taken for it and what is not, and the cache of its own class that keeps its states."""

import copy
import pickle

import pytest
import torch

import accel
from accel.llm.attention.linear.lightning_attention import LightningSpec
from accel.llm.recording.record import NotUnderstood
from accel.llm.runtime.analyze import formulas
from support.llm.families import make, padded
from support.llm.outputs import same, write_alike

LINEAR, FULL = "linear_attention", "full_attention"


def pair(**changes):
    return accel.optimize(make("minimax", **changes)), make("minimax", **changes)


def fallbacks(model) -> list[str]:
    return [reason for path, reason, _ in accel.report(model).fallbacks if path == ""]


def cache_of(output):
    return output["cache"] if "cache" in output else output["past_key_values"]


def step(model, ids, cache, place):
    """As generate() calls it."""
    name = "cache" if "cache" in model.forward.__code__.co_varnames else "past_key_values"
    with torch.no_grad():
        return model(ids, position_ids=torch.full((len(ids), 1), place), use_cache=True, **{name: cache})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_found_in_each_dtype(dtype):
    (_, first), (_, second) = formulas(make("minimax", dtype), {})[:2]
    assert type(second.attention) is LightningSpec and second.keeps_state and not first.keeps_state
    assert first.entering is not None and first.bases == (3.5, 1.7) and first.scales == (1.0, 0.9)
    assert second.bases == (2.5, 1.7) and second.scales == (0.8, 0.9)


CHANGES = {
    "a decay of tokens": lambda attention: attention.diagonal_decay.pow_(2),
    "blocks that forget": lambda attention: attention.query_decay.mul_(0.5),
    "blocks that keep less": lambda attention: attention.key_decay.mul_(0.5),
    "rates that grow": lambda attention: attention.slope_rate.neg_(),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("block_size", [4, 64])
def test_another_formula_runs_stock(name, block_size):
    """Also where it shows in a text of several blocks alone."""
    stock = make("minimax", block_size=block_size)
    CHANGES[name](stock.model.layers[1].self_attn)
    with pytest.raises(NotUnderstood, match="of another formula"):
        formulas(stock, {})


def test_a_state_that_is_changed_on_the_way_is_not_taken_for_one():
    stock = make("minimax")
    attention = stock.model.layers[1].self_attn
    before = type(attention).forward

    def forward(self, hidden_states, *args, **kwargs):
        y, state = before(self, hidden_states, *args, **kwargs)
        return y * (1.5 if hidden_states.shape[1] > 20 else 1.0), state

    attention.__class__ = type("Longer", (type(attention),), {"forward": forward, "block_size": 4})
    with pytest.raises(NotUnderstood, match="of another formula"):
        formulas(stock, {})


@pytest.mark.parametrize("block_size", [4, 64])
def test_factors_and_blocks_write_what_stock_writes(block_size):
    ours, stock = pair(block_size=block_size)
    write_alike(ours, stock, (23, 15))
    assert not fallbacks(ours)


def test_behind_a_first_layer_of_states_stock_loses_count_and_what_it_masks_by_that_runs_stock():
    ours, stock = pair(layer_types=[LINEAR, LINEAR, FULL])
    write_alike(ours, stock, (9, 9))
    assert not fallbacks(ours)
    write_alike(ours, stock, (9, 5))
    assert any("lost count" in reason for reason in fallbacks(ours))


def test_its_cache_is_one_of_its_own_class():
    ours, stock = pair()
    ids, _ = padded((9, 9))
    with torch.no_grad():
        caches = [cache_of(model(ids, use_cache=True)) for model in (ours, stock)]
    kind = type(caches[1])
    assert isinstance(caches[0], kind) and type(caches[0]) is not kind
    copies = [copy.deepcopy(caches[0]), pickle.loads(pickle.dumps(caches[0]))]
    wanted = caches[1].linear_cache
    for cache in (*copies, caches[0]):
        held = cache.linear_cache
        assert type(cache) is kind and len(held) == len(wanted) == 2 and held[0] == wanted[0] == []
        torch.testing.assert_close(held[1], wanted[1], rtol=2e-4, atol=2e-5)
    mine, theirs = (step(m, ids[:, :1], cache, 9) for m, cache in zip((ours, stock), caches, strict=True))
    same({"logits": mine.logits}, {"logits": theirs.logits}, 4e-5)
    assert type(caches[0]) is not kind and not fallbacks(ours)  # it was taken back
    with pytest.raises(RuntimeError, match="does not support `crop`"):
        caches[0].crop(-1)
    for cache in caches:  # which stock does with keys and values alone
        cache.reorder_cache(torch.tensor([1, 0]))
    mine, theirs = (step(m, ids[:, 1:2], cache, 10) for m, cache in zip((ours, stock), caches, strict=True))
    same({"logits": mine.logits}, {"logits": theirs.logits}, 4e-5)
    torch.testing.assert_close(caches[0].linear_cache[1], caches[1].linear_cache[1], rtol=2e-4, atol=2e-5)


def test_rates_that_a_cast_has_rounded_run_stock():
    """Each of stock's buffers of decays is rounded by itself."""
    ours, stock = pair()
    write_alike(ours, stock, (4, 3))
    assert not fallbacks(ours)
    for model in (ours, stock):
        model.to(torch.bfloat16).float()
    write_alike(ours, stock, (4, 3))
    assert any("rounded or changed" in reason for reason in fallbacks(ours))
