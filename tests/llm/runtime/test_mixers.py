"""Linear attention with decays of channels, and layers with two attentions: what is understood, and what is not."""

import pytest
import torch

import accel
from accel.llm.attention.linear.linear_attention import LinearSpec
from accel.llm.attention.mixer_pair import PairSpec
from accel.llm.attention.softmax_attention import SoftmaxSpec
from accel.llm.runtime.analyze import analyze
from support.llm.families import make, prompt
from support.llm.outputs import generate, same

FIRST = "model.layers.0"
PLAIN = {"ssm_multipliers": None, "mlp_multipliers": None, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
         "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "key_multiplier": 1.0}  # fmt: skip
NORMED = PLAIN | {"mamba_rms_norm": True}


def first_layer(name: str, change=lambda layer: None, dtype: torch.dtype = torch.float32, **config):
    model = make(name, dtype=dtype, **config)
    change(model.get_submodule(FIRST))
    found = analyze(model).layers[FIRST]
    return found if isinstance(found, str) else found.runs_stock or found


def instead(part: str, forward):
    """The part's class is one with another forward, a function of the part, its own forward and what that is given."""

    def change(layer):
        module = layer.get_submodule(part)
        own = type(module).forward
        kind = type("Another", (type(module),), {"forward": lambda self, *a, **k: forward(self, own, *a, **k)})
        module.__class__ = kind

    return change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "pairs", "least"), [("kimi-linear", 2, None), ("bailing-hybrid", 0, -5.0)], ids=str)
def test_decays_of_channels_are_understood(name, pairs, least, dtype):
    spec = first_layer(name, dtype=dtype).attention
    assert type(spec) is LinearSpec and len(spec.formula.pairs) == pairs and spec.formula.lower_bound == least
    assert dict(spec.formula.columns)["a"].sizes == (4, 1, 20) and spec.norm.activation == "sigmoid"
    assert set(spec.linears) >= {pair.name for pair in spec.formula.pairs}
    assert spec.formula.rounded == (dtype == torch.float32 or least is not None)  # of float32 it does not matter


def louder(self, own, *args, **kwargs):
    return 1.01 * own(self, *args, **kwargs)


def squared(self, own, x):
    return own(self, x) ** 2


def sparser(self, own, *args, **kwargs):
    output = own(self, *args, **kwargs)
    return output * (output > output.mean())


@pytest.mark.parametrize("name", ["kimi-linear", "bailing-hybrid"])
@pytest.mark.parametrize("change", [louder, sparser], ids=lambda one: one.__name__)
@pytest.mark.parametrize("part", ["forget_gate", "o_norm"])
def test_another_formula_is_not_understood(name, change, part):
    assert first_layer(name, instead(f"self_attn.{part}", change)) == (
        "its state, or what it gives, is of another formula"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaled", [True, False])
def test_two_attentions_are_understood_with_their_multipliers(scaled, dtype):
    layer = first_layer("falcon-h1", dtype=dtype, **({} if scaled else NORMED))
    spec = layer.attention
    assert type(spec) is PairSpec and [type(one) for one in spec.mixers] == [SoftmaxSpec, LinearSpec]
    assert layer.places == (0, 2) and spec.keeps_state
    assert spec.outputs == ((0.9, 0.7) if scaled else (1.0, 1.0))
    assert spec.inputs == ((0.8, 1.0) if scaled else (1.0, 1.0))
    softmax, linear = spec.mixers
    assert softmax.key_scale == (0.6 if scaled else 1.0) and linear.factor == (1.25 if scaled else 1.0)
    assert linear.formula.multiplier == "mamba.mup_vector" and bool(linear.norm.name) != scaled
    assert (layer.mlp.scale, layer.scales) == ((0.9, (1.0, 0.6)) if scaled else (1.0, (1.0, 1.0)))


@pytest.mark.parametrize("first", [True, False])
def test_a_norm_behind_the_gate_or_before_it_writes_what_stock_writes(first):
    config = NORMED | {"mamba_norm_before_gate": first}
    ours, stock = accel.optimize(make("falcon-h1", **config)), make("falcon-h1", **config)
    told = next(reason for path, _, _, reason in accel.report(ours).sites if not path)
    if "could not be tried: RuntimeError: The size of tensor" in told:
        pytest.skip("this transformers multiplies each row by the gates of all, in a step")
    same(generate(ours, prompt(1, 9), None), generate(stock, prompt(1, 9), None))
    assert "forward" in vars(ours) and not accel.report(ours).fallbacks


def first_louder(self, own, *args, **kwargs):
    output, *rest = own(self, *args, **kwargs)
    return (1.01 * output, *rest)


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("self_attn", first_louder, "is not the sum of them and the layer's input"),
        ("mamba", louder, "is not the sum of them and the layer's input"),
        ("feed_forward.act_fn", squared, None),
    ],
    ids=["attention", "state", "activation"],
)
def test_what_follows_two_attentions_is_compared(part, change, reason):
    found = first_layer("falcon-h1", instead(part, change))
    if reason is None:
        assert not found.mlp.first, "it is called as it is"
    else:
        assert reason in found
