"""What is recognized of a language model, and kinds of attention that are tried in turn."""

import functools
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

import accel
from accel.llm.recording.inputs import FEW
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.recorder import example_ids
from accel.llm.runtime import layer
from accel.llm.runtime.analyze import formulas
from accel.llm.runtime.attention import AttentionSpec
from accel.llm.runtime.softmax_attention import SoftmaxSpec
from support.everything import EVERYTHING
from support.llm.families import FAMILIES, layers, make, prompt

CALLED = {"mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "olmoe", "granite-moe", "phi-moe"}  # experts are called
BEFORE = {"before_attention", "before_mlp"}
# What tells some families apart: fields of the attention spec; (form, interleaved) of its rotation; (activation, number
# of first products, halves) of the MLP; which norms there are; whether it is (parallel, shared).
FACTS = {
    "llama": {
        "layout": "separate", "heads": 4, "groups": 2, "kv_heads": 2, "dim": 16, "scale": 0.25,
        "rotation": ("first half", False), "mlp": ("silu", 2, None), "norms": BEFORE, "skeleton": (False, False),
    },
    "phi3": {"layout": "joined", "heads": 4, "groups": 2, "mlp": ("silu", 1, True)},
    "gpt2": {"layout": "joined", "groups": 4, "rotary": None, "mlp": ("gelu_tanh", 1, None)},
    "gpt-neox": {
        "layout": "grouped", "groups": 4, "mlp": ("gelu", 1, None), "norms": BEFORE, "skeleton": (True, False),
    },
    "falcon-one-key": {"layout": "joined", "groups": 1, "kv_heads": 1},
    "falcon-grouped": {"layout": "grouped", "groups": 2, "kv_heads": 4},
    "mistral": {"window": 5},
    "gemma2": {
        "softcap": 2.0, "scale": 10**-0.5, "mlp": ("gelu_tanh", 2, None),
        "norms": BEFORE | {"post_attention", "post_mlp"}, "skeleton": (False, False),
    },
    "granite": {"scale": 0.2},
    "opt": {"scale": 0.25, "mlp": ("relu", 1, None)},
    "opt-post-norm": {"norms": {"after_attention", "after_mlp"}, "skeleton": (False, False)},
    "olmo2": {"norms": {"post_attention", "post_mlp"}, "skeleton": (False, False)},
    "glm": {"rotation": ("first half", True)},
    "cohere": {"rotation": ("even channels", True), "norms": {"before_attention"}, "skeleton": (True, True)},
    "gptj": {"rotation": ("all", True), "norms": {"before_attention"}, "skeleton": (True, True)},
    "gpt-oss": {"sinks": "sinks", "rotation": ("all", False)},
    "nemotron": {"mlp": ("relu2", 1, None)},
    "bloom": {"mlp": ("gelu_tanh", 1, None)},
}  # fmt: skip
# Of each layer its window, or whether it has no rotation.
LAYERS = {
    "gemma3": ("window", [5, None]),
    "cohere2": ("window", [5, None]),
    "olmo3": ("window", [5, None]),
    "qwen2-sliding": ("window", [None, 5]),
    "smollm3": ("rotary", [True, False, True]),
}
NORMS = ("before_attention", "post_attention", "after_attention", "before_mlp", "post_mlp", "after_mlp")

FAST = [family for family in FAMILIES if family.expected == "fast"]
EACH = 1 if EVERYTHING else 3  # of so many families one


@functools.cache
def specs(name: str, dtype: torch.dtype = torch.float32) -> list:
    return [spec for _, spec in formulas(make(name, dtype=dtype), {})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FACTS)
@pytest.mark.share(2)
def test_what_a_layer_is_made_of_is_recognized(name, dtype):
    spec = specs(name, dtype)[0]
    rotary, mlp = spec.attention.rotary, spec.mlp
    norms = {norm for norm in NORMS if getattr(spec, norm) is not None}
    assert all(getattr(spec, norm).kind is not None for norm in norms)
    found = {
        "rotation": rotary and (rotary.form, rotary.interleaved),
        "mlp": (mlp.activation, len(mlp.first), mlp.halves),
        "norms": norms,
        "skeleton": (spec.parallel, spec.shared),
    }
    for fact, value in FACTS[name].items():
        assert (found[fact] if fact in found else getattr(spec.attention, fact)) == value, fact


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.share(2)
def test_layers_are_recognized_one_by_one(name):
    fact, wanted = LAYERS[name]
    found = [getattr(spec.attention, fact) for spec in specs(name)]
    assert [one is not None for one in found] == wanted if fact == "rotary" else found == wanted


@pytest.mark.parametrize("name", ["granite", "granite-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("times", [1, 1000], ids=["tokens-alike", "one-token-large"])
@pytest.mark.share(2)
def test_multipliers_of_the_residual_are_recognized(name, dtype, times):
    """Also where one token is so large that rounding hides what the layers add to it, as first tokens often are."""
    model = make(name, dtype=dtype)
    model.get_input_embeddings().weight.data[example_ids(model, FEW)[0, 0]] *= times
    assert {spec.scales for _, spec in formulas(model, {})} == {(0.4, 0.4)}


@pytest.mark.parametrize("family", FAST[::EACH], ids=str)
@pytest.mark.share(2)
def test_formulas_are_the_same_in_the_coarsest_precision(family):
    """Experts have no linear layer to be made loud: beside a loud attention, rounding hides what they add."""
    assert repr(specs(family.name, torch.bfloat16)) == repr(specs(family.name))


@pytest.mark.parametrize("family", FAST[EACH // 2 :: EACH], ids=str)
@pytest.mark.share(2)
def test_every_layer_is_reported_with_its_whole_model(family, pair_of):
    model, _ = pair_of(family.name)
    sites = accel.report(model).sites
    paths = [path for path, rule, status, _ in sites if rule == "decoder layer" and status == "patched"]
    assert sorted(paths) == sorted(layers(model))
    assert [status for _, rule, status, _ in sites if rule == "language model"] == ["patched"]
    fused = specs(family.name)[0].mlp.first
    assert bool(fused) == (family.name not in CALLED)


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
    monkeypatch.setattr(layer, "ATTENTION_KINDS", kinds)
    with nullcontext() if YES in kinds else pytest.raises(NotUnderstood, match=found):
        assert layer.understand_attention(None, None) == found


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
    monkeypatch.setattr(layer, "ATTENTION_KINDS", (FirstLayerSpec, SoftmaxSpec))
    MADE.clear()
    stock = make("llama")
    model = accel.optimize(make("llama"))
    with torch.no_grad():
        tokens, wanted = (one.generate(prompt(2), max_new_tokens=5, do_sample=False) for one in (model, stock))
    kinds = [type(vars(one)["forward"].spec.attention) for one in model.model.layers]
    assert kinds == [FirstLayerSpec, SoftmaxSpec]
    assert set(MADE) == {("bound", 0), ("laid out", 0)}
    assert torch.equal(tokens, wanted) and not accel.report(model).fallbacks
