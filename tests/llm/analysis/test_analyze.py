"""What is recognized of a language model, what is refused with which reason, and that looking at it leaves no trace."""

import copy

import pytest
import torch
from torch import nn
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

import accel
from accel.fusion.norm_kind import norm_kind
from accel.llm.analysis.analyze import formulas
from accel.llm.family import is_causal_lm
from accel.llm.generation.self_test import _off
from accel.llm.recording.errors import NotUnderstood
from accel.llm.recording.inputs import FEW
from accel.llm.recording.record import Record
from accel.llm.recording.recorder import NAME, example_ids
from accel.llm.runtime.attention_kinds import KINDS
from support.llm.families import BY_NAME, EVERYTHING, FAMILIES, available, layers, make, padded

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


def specs(name: str, dtype: torch.dtype = torch.float32) -> list:
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    return [spec for _, spec in formulas(make(name, dtype=dtype), {}, KINDS)]


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
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
def test_multipliers_of_the_residual_are_recognized(name, dtype, times):
    """Also where one token is so large that rounding hides what the layers add to it, as first tokens often are."""
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    model = make(name, dtype=dtype)
    model.get_input_embeddings().weight.data[example_ids(model, FEW)[0, 0]] *= times
    assert {spec.scales for _, spec in formulas(model, {}, KINDS)} == {(0.4, 0.4)}


@pytest.mark.parametrize("family", FAST[::EACH], ids=str)
def test_formulas_are_the_same_in_the_coarsest_precision(family):
    """Experts have no linear layer to be made loud: beside a loud attention, rounding hides what they add."""
    assert repr(specs(family.name, torch.bfloat16)) == repr(specs(family.name))


@pytest.mark.parametrize("family", FAST[EACH // 2 :: EACH], ids=str)
def test_every_layer_is_reported_with_its_whole_model(family):
    model = make(family) if available(family.kind) else pytest.skip("not in this transformers")
    sites = accel.report(accel.optimize(model)).sites
    paths = [path for path, rule, status, _ in sites if rule == "decoder layer" and status == "patched"]
    assert sorted(paths) == sorted(layers(model))
    assert [status for _, rule, status, _ in sites if rule == "language model"] == ["patched"]
    fused = specs(family.name)[0].mlp.first
    assert bool(fused) == (family.name not in CALLED)


# -- refused, and why --------------------------------------------------------------------------------------------------


def llama_with(change):
    model = make("llama")
    change(model.model.layers[1])
    return model


class Louder(nn.Linear):
    """A linear layer that is not one."""

    def forward(self, x):
        return super().forward(x) * 1.01


def scaled_output(layer):
    before = type(layer.mlp).forward
    layer.mlp.__class__ = type("Scaled", (type(layer.mlp),), {"forward": lambda self, x: 1.01 * before(self, x)})


def squared_values(layer):
    attention = layer.self_attn
    before = type(attention).forward

    def forward(self, hidden_states, **kwargs):
        output, weights = before(self, hidden_states, **kwargs)
        return output + 1e-3 * output.square(), weights

    attention.__class__ = type("Bent", (type(attention),), {"forward": forward})


def clamped(layer):
    def forward(self, x):  # bends far from zero only
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-50, 50))

    layer.mlp.__class__ = type("Clamped", (type(layer.mlp),), {"forward": forward})


REFUSED = {
    "an MLP scaled after its last projection": (scaled_output, "is not the sum of its input, attention and MLP"),
    "an attention bent after its last projection": (squared_values, "what follows the attention is not the sum"),
    "an MLP that clamps what is far from zero": (clamped, "something else where numbers are large"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_changed_formula_is_refused_with_the_reason(name):
    change, reason = REFUSED[name]
    model = llama_with(change)
    stock = copy.deepcopy(model)
    sites = accel.report(accel.optimize(model)).sites
    (told,) = [told for path, rule, status, told in sites if (path, rule) == ("model.layers.1", "decoder layer")]
    assert reason in told
    patched = [path for path, rule, status, _ in sites if rule == "decoder layer" and status == "patched"]
    assert patched in ([], ["model.layers.0"])
    ids, mask = padded()
    assert torch.equal(model.generate(ids, attention_mask=mask), stock.generate(ids, attention_mask=mask))


def test_strict_raises_the_reason_and_changes_nothing(tiny):
    model = llama_with(scaled_output)
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match="strict=True: .*model.layers.1"):
        accel.optimize(model, strict=True)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_a_hook_inside_keeps_the_model_from_being_looked_at():
    model, calls = make("llama"), []
    model.model.layers[0].mlp.register_forward_hook(lambda *args: calls.append(1))
    sites = accel.report(accel.optimize(model)).sites
    assert (
        "",
        "language model",
        "skipped",
        "forward hooks on model.layers.0.mlp, which examining it would call",
    ) in sites
    assert not calls


def test_a_module_that_is_run_to_be_understood_is_not_recorded():
    """A layer is understood while the hooks of the recording are still on what is inside its modules."""

    def contained(layer):
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn)

    assert all(spec.mlp.activation == "silu" for _, spec in formulas(llama_with(contained), {}, KINDS))


def test_a_model_that_keeps_its_attention_is_judged_by_all_masks_it_makes():
    """It may have added something to its mask: which one a layer was given cannot be told, and all must be alike."""
    zeros, sliding = torch.zeros(1), sliding_window_causal_mask_function(5)
    alike = [(zeros, causal_mask_function), (None, causal_mask_function)]
    assert Record([], own=True, masks=alike).window(zeros + 1) is None
    with pytest.raises(NotUnderstood, match="in a way of its own"):
        Record([], own=True, masks=[*alike, (zeros, sliding)]).window(zeros)
    assert Record([], masks=[*alike, (None, sliding)]).window(zeros) is None


def test_a_linear_that_is_none_is_called_and_not_multiplied():
    def louder(layer):
        layer.mlp.up_proj.__class__ = Louder

    model = llama_with(louder)
    stock = copy.deepcopy(model)
    accel.optimize(model)
    ids, mask = padded()
    ours, theirs = (m(input_ids=ids, attention_mask=mask).logits[mask.bool()] for m in (model, stock))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert not accel.report(model).fallbacks


# -- no trace ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-alibi", "llama-rope-dynamic", "phi3-longrope", "mamba"])
def test_looking_leaves_no_trace(name, tiny):
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    model = make(name).train()
    before, registries = tiny.snapshot(model), [AttentionInterface, AttentionMaskInterface]
    entries = [dict(registry._global_mapping) for registry in registries]
    config, rng = model.config.to_dict(), torch.get_rng_state()
    accel.restore(accel.optimize(model))
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert [registry._global_mapping for registry in registries] == entries
    assert NAME not in AttentionInterface._global_mapping
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), rng)


def test_an_error_while_looking_leaves_no_trace(tiny):
    def broken(layer):
        layer.mlp.__class__ = type("Broken", (type(layer.mlp),), {"forward": lambda self, x: 1 / 0})

    model = llama_with(broken)
    before = tiny.snapshot(model)
    sites = accel.report(accel.optimize(model)).sites
    assert sites[0] == ("", "language model", "skipped", "could not be examined: ZeroDivisionError: division by zero")
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_optimizing_twice_plans_anew(tiny):
    model = make("llama")
    before = tiny.snapshot(model)
    accel.optimize(model)
    accel.optimize(model, graphs=False)
    assert accel.report(model).summary().startswith("5 sites patched, 0 skipped")
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_what_is_a_causal_lm():
    from transformers import AutoModel, CLIPTextConfig, CLIPTextModel, T5Config, T5ForConditionalGeneration

    model = make("llama")
    assert is_causal_lm(model) and is_causal_lm(make("gpt2"))
    assert not is_causal_lm(AutoModel.from_config(model.config)) and not is_causal_lm(nn.Linear(2, 2))
    text = CLIPTextConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    assert not is_causal_lm(CLIPTextModel(text))
    both = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20, decoder_start_token_id=0)
    assert not is_causal_lm(T5ForConditionalGeneration(both))


# -- norms -------------------------------------------------------------------------------------------------------------


class Rms(nn.Module):
    def __init__(self, size, offset=0.0, eps=1e-6):
        super().__init__()
        self.weight, self.offset, self.variance_epsilon = nn.Parameter(torch.ones(size)), offset, eps

    def forward(self, x):
        return (self.weight + self.offset) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class Twice(Rms):
    def forward(self, x):
        return super().forward(super().forward(x))


class Halved(Rms):
    def forward(self, x):
        return super().forward(x) * 0.5


def test_norms_are_told_by_what_they_compute():
    plain, gemma = norm_kind(Rms(12)), norm_kind(Rms(12, offset=1.0))
    assert (plain.centred, plain.offset, plain.bias, plain.eps) == (False, 0.0, None, "variance_epsilon")
    assert (gemma.centred, gemma.offset) == (False, 1.0)
    layer = norm_kind(nn.LayerNorm(12))
    assert (layer.centred, layer.weight, layer.bias) == (True, "weight", "bias")
    assert norm_kind(nn.LayerNorm(12, bias=False)).bias is None
    assert norm_kind(nn.LayerNorm(12, elementwise_affine=False), 12).weight is None


@pytest.mark.parametrize("module", [Twice(12), Halved(12), nn.Linear(12, 12), nn.ReLU(), nn.GroupNorm(2, 12)], ids=repr)
def test_what_is_no_norm_is_not_taken_for_one(module):
    assert norm_kind(module, 12) is None


def test_single_rms_norms_are_fused_where_the_layer_is_not():
    sites = accel.report(accel.optimize(make("deepseek-v3"))).sites
    assert sum(rule == "RMS norm" and status == "patched" for _, rule, status, _ in sites) >= 5


def test_the_manner_of_a_model_is_found_by_trying():
    model = accel.optimize(make("opt"))
    assert vars(model)["forward"].convention.positions == "counted by the mask"
    assert vars(accel.optimize(make("llama")))["forward"].convention.positions == "0, 1, 2 .."
    assert not vars(accel.optimize(make("bloom")))["forward"].convention.mask


@pytest.mark.parametrize("chooses", [False, True], ids=["every token", "the median token"])
@pytest.mark.parametrize("token", [0, 1, 2])
def test_logits_that_are_no_numbers_are_never_near_enough(token, chooses):
    wanted = torch.randn(2, 3, 8)
    got = wanted.clone()
    got[1, token] = torch.nan
    if chooses:
        got[1, (token + 1) % 3] = torch.nan
    assert _off(wanted, wanted, chooses) == 0 and _off(got, wanted, chooses) == float("inf")
