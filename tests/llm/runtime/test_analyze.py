"""What is recognized of a language model, and kinds of attention that are tried in turn."""

import functools
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

import accel
from accel.libraries.cache import cache_of
from accel.llm.attention import kinds as all_kinds
from accel.llm.attention.attention import AttentionSpec
from accel.llm.attention.softmax_attention import SoftmaxSpec
from accel.llm.kv_cache.state_layer import StateLayer
from accel.llm.kv_cache.store_layer import StoreLayer
from accel.llm.recording.inputs import FEW, example_ids
from accel.llm.recording.record import LayerRecord, NotUnderstood
from accel.llm.runtime.analyze import formulas
from support.everything import EVERYTHING
from support.llm.families import FAMILIES, layers, make, prompt

CALLED = {
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "gpt-oss",
    "olmoe",
    "granite-moe",
    "phi-moe",
    "qwen3-next",
    "qwen3.5-moe-attention",
    "granite-hybrid",
    "llama4",
    "minimax",
}  # experts are called
FAST = [family for family in FAMILIES if family.expected == "fast"]
EACH = 1 if EVERYTHING else 3  # of so many families one


@functools.cache
def specs(name: str, dtype: torch.dtype = torch.float32) -> list:
    return [spec for _, spec in formulas(make(name, dtype=dtype), {})]


@pytest.mark.parametrize("name", ["granite", "granite-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("times", [1, 1000], ids=["tokens-alike", "one-token-large"])
@pytest.mark.share(2)
def test_multipliers_of_the_residual_are_recognized(name, dtype, times):
    """Also where one token is so large that rounding hides what the layers add to it, as first tokens often are."""
    model = make(name, dtype=dtype)
    model.get_input_embeddings().weight.data[example_ids(model, FEW)[0, 0]] *= times
    assert {spec.scales for _, spec in formulas(model, {})} == {(0.4, 0.4)}


@pytest.mark.parametrize("multiplier", [0.995, 1.004, 1.0])
def test_a_multiplier_of_the_residual_close_to_one_is_not_one(multiplier):
    """In bfloat16, whose numbers are further apart."""
    model = make("granite", dtype=torch.bfloat16)
    for layer in layers(model).values():
        layer.residual_multiplier = multiplier
    assert {spec.scales for _, spec in formulas(model, {})} == {(multiplier, multiplier)}
    for layer in layers(model).values():
        layer.residual_multiplier = torch.tensor(multiplier)  # nobody's number
    assert {bool(spec.around) for _, spec in formulas(model, {})} == {multiplier != 1.0}


@pytest.mark.parametrize("family", FAST[::EACH], ids=str)
@pytest.mark.share(6)
@pytest.mark.turns(2)
def test_formulas_are_the_same_in_the_coarsest_precision(family):
    """Experts have no linear layer to be made loud: beside a loud attention, rounding hides what they add."""
    coarse, fine = (repr(specs(family.name, dtype)) for dtype in (torch.bfloat16, torch.float32))
    for shows_in_one in ("wide", "rounded"):
        coarse, fine = (one.replace(f"{shows_in_one}=True", f"{shows_in_one}=False") for one in (coarse, fine))
    assert coarse == fine


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", FAST[EACH // 2 :: EACH], ids=str)
@pytest.mark.share(6)
def test_every_layer_is_reported_with_its_whole_model(family, pair_of):
    model, _ = pair_of(family.name)
    sites = accel.report(model).sites
    paths = [path for path, rule, status, _ in sites if rule == "decoder layer" and status == "patched"]
    assert sorted(paths) == sorted(layers(model))
    assert [status for _, rule, status, _ in sites if rule == "language model"] == ["patched"]
    fused = specs(family.name)[0].mlp.first
    assert bool(fused) == (family.name not in CALLED)


ONE_PART = ("mlp", "full_attention", "moe", "linear_attention")


@pytest.mark.parametrize("kinds", [ONE_PART, ONE_PART[:3]], ids=["beside-states", "without"])
def test_a_layer_may_be_an_attention_or_an_mlp_alone(kinds):
    """An MLP has no place in the store, and leaves the cache what it has there."""
    sizes = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, "chunk_size": 16}
    stock, model = (make("nemotron-h", layers_block_type=list(kinds), **sizes) for _ in range(2))
    accel.optimize(model)
    found = {name: one for name, one in enumerate(layers(model).values()) if "forward" in vars(one)}
    parts = [(vars(one)["forward"].spec.place, vars(one)["forward"].spec.mlp is None) for one in found.values()]
    assert parts == [(None, False), (1, True), (None, False), (3, True)][: len(kinds)]
    config = {"do_sample": False, "max_new_tokens": 5, "return_dict_in_generate": True}
    mine, wanted = (one.generate(prompt(2), **config) for one in (model, stock))
    assert torch.equal(mine.sequences, wanted.sequences) and not accel.report(model).fallbacks
    left = [type(layer) for layer in cache_of(wanted).layers]
    left[1::2] = [StoreLayer, StateLayer][: len(left[1::2])]
    assert [type(layer) for layer in cache_of(mine).layers] == left


def kind(answer) -> type:
    def understand(*_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return type("Kind", (AttentionSpec,), {"understand": staticmethod(understand)})


NO, UNKNOWN, WRONG = kind(None), kind(NotUnderstood("a gate")), kind(NotUnderstood("later"))
YES, ALSO = kind("yes"), kind("not asked")


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ((YES,), "yes"),
        ((NO, YES), "yes"),
        ((UNKNOWN, NO, YES, ALSO), "yes"),
        ((NO, UNKNOWN, WRONG), "a gate"),
        ((NO,), "of no kind that is known"),
        ((), "of no kind that is known"),
    ],
)
def test_the_first_kind_that_knows_it_answers_else_the_first_reason_is_told(kinds, found, monkeypatch):
    monkeypatch.setattr(all_kinds, "ATTENTION_KINDS", kinds)
    with nullcontext() if YES in kinds else pytest.raises(NotUnderstood, match=found):
        assert all_kinds.understand_attention(LayerRecord(None, "", {}), None) == found


MADE: list[tuple[str, int]] = []


@dataclass(frozen=True)
class FirstLayerSpec(SoftmaxSpec):
    """The attention of the first layer, as a kind of its own, which notes what is bound and laid out."""

    @classmethod
    def understand(cls, seen, record):
        return super().understand(seen, record) if seen.cached.place == 0 else None

    def bind(self, *given):
        MADE.append(("bound", self.index))
        return super().bind(*given)

    def cache_layout(self, *given):
        MADE.append(("laid out", self.index))
        return super().cache_layout(*given)


def test_kinds_stand_side_by_side_in_one_model(monkeypatch):
    monkeypatch.setattr(all_kinds, "ATTENTION_KINDS", (FirstLayerSpec, SoftmaxSpec))
    MADE.clear()
    stock = make("llama")
    model = accel.optimize(make("llama"))
    with torch.no_grad():
        tokens, wanted = (one.generate(prompt(2), max_new_tokens=5, do_sample=False) for one in (model, stock))
    kinds = [type(vars(one)["forward"].spec.attention) for one in model.model.layers]
    assert kinds == [FirstLayerSpec, SoftmaxSpec]
    assert set(MADE) == {("bound", 0), ("laid out", 0)}
    assert torch.equal(tokens, wanted) and not accel.report(model).fallbacks
