"""What is recognized of a language model, and kinds of attention that are tried in turn."""

import functools
from dataclasses import dataclass, fields

import pytest
import torch

import accel
from accel.llm import stages
from accel.llm.analysis.analyze import formulas
from accel.llm.analysis.attention_kind import AttentionKind, understand_attention
from accel.llm.analysis.softmax_attention import SoftmaxSpec
from accel.llm.recording.errors import NotUnderstood
from accel.llm.recording.inputs import FEW
from accel.llm.recording.recorder import example_ids
from accel.llm.runtime import attention_kinds
from accel.llm.runtime.attention_kinds import KINDS
from support.everything import EVERYTHING
from support.llm.families import BY_NAME, FAMILIES, available, layers, make, prompt

CALLED = {"mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "olmoe", "granite-moe", "phi-moe"}  # experts are called
# What tells some families apart; (rotary form, interleaved) and the rest as in the specs.
ATTENTION = {
    "llama": {"layout": "separate", "heads": 4, "groups": 2, "kv_heads": 2, "dim": 16, "scale": 0.25},
    "phi3": {"layout": "joined", "heads": 4, "groups": 2},
    "gpt2": {"layout": "joined", "groups": 4, "rotary": None},
    "gpt-neox": {"layout": "grouped", "groups": 4},
    "falcon-one-key": {"layout": "joined", "groups": 1, "kv_heads": 1},
    "falcon-grouped": {"layout": "grouped", "groups": 2, "kv_heads": 4},
    "mistral": {"window": 5},
    "gemma2": {"softcap": 2.0, "scale": 10**-0.5},
    "granite": {"scale": 0.2},
    "opt": {"scale": 0.25},
    "gpt-oss": {"sinks": "sinks"},
}
WINDOWS = {"gemma3": [5, None], "cohere2": [5, None], "olmo3": [5, None], "qwen2-sliding": [None, 5]}
ROTARY = {
    "llama": ("first half", False),
    "glm": ("first half", True),
    "cohere": ("even channels", True),
    "gptj": ("all", True),
    "gpt-oss": ("all", False),
}
MLP = {
    "llama": ("silu", 2, None),
    "phi3": ("silu", 1, True),
    "gemma2": ("gelu_tanh", 2, None),
    "gpt2": ("gelu_tanh", 1, None),
    "gpt-neox": ("gelu", 1, None),
    "opt": ("relu", 1, None),
    "nemotron": ("relu2", 1, None),
    "bloom": ("gelu_tanh", 1, None),
}
NORMS = ("before_attention", "post_attention", "after_attention", "before_mlp", "post_mlp", "after_mlp")
SKELETON = {
    "llama": ({"before_attention", "before_mlp"}, False, False),
    "gemma2": ({"before_attention", "post_attention", "before_mlp", "post_mlp"}, False, False),
    "olmo2": ({"post_attention", "post_mlp"}, False, False),
    "opt-post-norm": ({"after_attention", "after_mlp"}, False, False),
    "gpt-neox": ({"before_attention", "before_mlp"}, True, False),
    "gptj": ({"before_attention"}, True, True),
    "cohere": ({"before_attention"}, True, True),
}

FAST = [family for family in FAMILIES if family.expected == "fast"]
EACH = 1 if EVERYTHING else 3  # of so many families one


@functools.cache
def specs(name: str, dtype: torch.dtype = torch.float32) -> list:
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    return [spec for _, spec in formulas(make(name, dtype=dtype), {}, KINDS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.share(2)
def test_attention_is_recognized(name, dtype):
    found = specs(name, dtype)[0].attention
    assert {key: getattr(found, key) for key in ATTENTION[name]} == pytest.approx(ATTENTION[name])


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_recognized_layer_by_layer(name):
    assert [spec.attention.window for spec in specs(name)] == WINDOWS[name]


@pytest.mark.parametrize("name", ROTARY)
def test_rotations_are_recognized(name):
    rotary = specs(name)[0].attention.rotary
    assert (rotary.form, rotary.interleaved) == ROTARY[name]


def test_a_layer_without_rotation_among_others_is_recognized():
    assert [spec.attention.rotary is None for spec in specs("smollm3")] == [False, True, False]


@pytest.mark.parametrize("name", MLP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mlps_are_recognized(name, dtype):
    found = specs(name, dtype)[0].mlp
    assert (found.activation, len(found.first), found.halves) == MLP[name]


@pytest.mark.parametrize("name", SKELETON)
def test_skeletons_are_recognized(name):
    found = specs(name)[0]
    there, parallel, shared = SKELETON[name]
    assert {norm for norm in NORMS if getattr(found, norm) is not None} == there
    assert (found.parallel, found.shared) == (parallel, shared)
    assert all(getattr(found, norm).kind is not None for norm in there)


@pytest.mark.parametrize("name", ["granite", "granite-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("times", [1, 1000], ids=["tokens-alike", "one-token-large"])
@pytest.mark.share(2)
def test_multipliers_of_the_residual_are_recognized(name, dtype, times):
    """Also where one token is so large that rounding hides what the layers add to it, as first tokens often are."""
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    model = make(name, dtype=dtype)
    model.get_input_embeddings().weight.data[example_ids(model, FEW)[0, 0]] *= times
    assert {spec.scales for _, spec in formulas(model, {}, KINDS)} == {(0.4, 0.4)}


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


def kind(name: str, answer) -> AttentionKind:
    def understand(layer, record):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return AttentionKind(name, SoftmaxSpec, understand, None, None)


NO, UNKNOWN, WRONG = kind("no", None), kind("unknown", NotUnderstood("a gate")), kind("wrong", NotUnderstood("later"))
YES, ALSO = kind("yes", "found"), kind("also", "not asked")


@pytest.mark.parametrize("kinds", [(YES,), (NO, YES), (UNKNOWN, NO, YES, ALSO)])
def test_the_first_that_knows_it_answers(kinds):
    assert understand_attention(None, None, kinds) == "found"


@pytest.mark.parametrize(
    ("kinds", "reason"), [((NO, UNKNOWN, WRONG), "a gate"), ((NO,), "of no kind that is known"), ((), "of no kind")]
)
def test_the_first_reason_is_told(kinds, reason):
    with pytest.raises(NotUnderstood, match=reason):
        understand_attention(None, None, kinds)


@dataclass(frozen=True)
class FirstLayerSpec(SoftmaxSpec):
    """The attention of the first layer, as a kind of its own."""


@pytest.fixture
def bound(monkeypatch):
    """A kind that is asked before ours, and what it bound and laid out."""
    (ours,) = attention_kinds.KINDS
    made = []

    def understand(layer, record):
        found = ours.understand(layer, record)
        given = {field.name: getattr(found.spec, field.name) for field in fields(SoftmaxSpec)}
        return found._replace(spec=FirstLayerSpec(**given)) if found.spec.index == 0 else None

    def bind(kernels, layer, spec, stack):
        made.append(("bound", spec.index))
        return ours.bind(kernels, layer, spec, stack)

    def cache_layout(spec, *rest):
        made.append(("laid out", spec.index))
        return ours.cache_layout(spec, *rest)

    kinds = (AttentionKind("first", FirstLayerSpec, understand, bind, cache_layout), ours)
    monkeypatch.setattr(stages, "KINDS", kinds)
    monkeypatch.setattr(attention_kinds, "KINDS", kinds)
    return made


def test_kinds_stand_side_by_side_in_one_model(bound):
    stock = make("llama")
    model = accel.optimize(make("llama"))
    with torch.no_grad():
        tokens, wanted = (one.generate(prompt(2), max_new_tokens=5, do_sample=False) for one in (model, stock))
    kinds = [type(vars(layer)["forward"].spec.attention) for layer in model.model.layers]
    assert kinds == [FirstLayerSpec, SoftmaxSpec]
    assert set(bound) == {("bound", 0), ("laid out", 0)}
    assert torch.equal(tokens, wanted) and not accel.report(model).fallbacks
