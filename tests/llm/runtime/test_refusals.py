"""Models that compute something else in one part: what is refused, with the reason, and texts that stay stock's."""

import copy

import pytest
import torch
from torch import nn

import accel
from support.compatibility.tiny_language_models import build
from support.llm.edits.modules import llama_with
from support.llm.families import available, layers, make, padded, prompt
from support.llm.outputs import generate, same, write_alike


class Louder(nn.Linear):
    """A linear layer that is not one."""

    def forward(self, x):
        return super().forward(x) * 1.01


def test_strict_raises_the_reason_and_changes_nothing(tiny):
    model = replaced(1, self_attn=Bent)
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


@pytest.mark.parametrize("value", [torch.ones(2, 3), 0.5, True, None, False, 0.0], ids=str)
def test_an_attention_that_is_told_something_unknown_is_refused(value):
    """Also where it is a tensor, which cannot be compared with False. None, False and 0 say nothing."""

    def tell(layer):
        before = type(layer.self_attn).forward

        def forward(self, *args, **kwargs):
            return before(self, *args, **kwargs, temper=value)

        layer.self_attn.__class__ = type("Told", (type(layer.self_attn),), {"forward": forward})

    reasons = {reason for *_, reason in accel.report(accel.optimize(llama_with(tell))).sites}
    silent = not isinstance(value, torch.Tensor) and not value
    assert any("its attention is told temper" in (reason or "") for reason in reasons) != silent, reasons


REASONS = {
    "jetmoe": "no projection gives the values it stores, beside queries and keys in an order that is known",
    "recurrent_gemma": "it stores no keys and values",
    "diffllama": "what its attention gives is changed before it is projected",
    "git": "steps after a prompt hang on how much the cache holds",
}


@pytest.mark.parametrize("kind", REASONS)
def test_the_reason_is_true(kind):
    if not available(kind):
        pytest.skip(f"this transformers has no {kind}")
    stock = build(kind, "language")
    ours = accel.optimize(copy.deepcopy(stock))
    reasons = [reason for _, rule, _, reason in accel.report(ours).sites if rule in ("language model", "decoder layer")]
    assert any(REASONS[kind] in reason for reason in reasons), reasons
    write_alike(ours, stock)


def replaced(*numbers, **classes):
    """A llama in whose layers of these numbers, or in all, modules of these names are given another class: of the same
    children and weights.
    """
    model = make("llama")
    for number, layer in enumerate(layers(model).values()):
        for name, kind in classes.items() if number in numbers or not numbers else ():
            module = layer if name == "layer" else layer.get_submodule(name)
            module.__class__ = type(kind.__name__, (kind, type(module)), {})
    return model


class Gated:
    """Attention whose output a gate of its input scales."""

    def forward(self, hidden_states, **kwargs):
        output, weights = super().forward(hidden_states, **kwargs)
        return output * torch.sigmoid(hidden_states.mean(-1, keepdim=True)), weights


class Bent:
    """Attention bent after its last projection."""

    def forward(self, hidden_states, **kwargs):
        output, weights = super().forward(hidden_states, **kwargs)
        return output + 0.1 * output.square(), weights


class Scaled:
    """An MLP, or a layer, scaled after all it does."""

    def forward(self, *args, **kwargs):
        return 0.9 * super().forward(*args, **kwargs)


class Clamped:
    """An MLP that cuts what is large."""

    def forward(self, x):
        return super().forward(x).clamp(-0.5, 0.5)


class RarelyClamped:
    """An MLP that cuts what is very large: nothing it is given before its weights change."""

    def forward(self, x):
        return super().forward(x).clamp(-40, 40)


class Bending:
    """An MLP that bends far from zero alone, before its last projection."""

    def forward(self, x):
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-50, 50))


class Shifted:
    """A norm that adds what it was given."""

    def forward(self, x):
        return super().forward(x) + 0.1 * x


class ByPosition:
    """A layer that depends on where a word is."""

    def forward(self, hidden_states, *args, position_ids=None, **kwargs):
        output = super().forward(hidden_states, *args, position_ids=position_ids, **kwargs)
        return output * (1 + 0.1 * (position_ids[..., None] % 3))


class ByLength:
    """A layer that does something else for a single word than for many."""

    def forward(self, hidden_states, *args, **kwargs):
        output = super().forward(hidden_states, *args, **kwargs)
        return output if hidden_states.shape[1] > 1 else 1.1 * output


class Counting:
    """A layer that remembers how often it was called."""

    def forward(self, hidden_states, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(hidden_states, *args, **kwargs) * (1 + 0.01 * self.calls)


class Mixing:
    """An MLP in which positions see each other's mean: of the words of this call."""

    def forward(self, x):
        return super().forward(x) + 0.3 * x.mean(1, keepdim=True)


class NoisyKeys:
    """Keys that depend on the values: attention no candidate has."""

    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states + 0.1 * hidden_states.roll(1, -1), **kwargs)


# By which modules of all layers, or of the second, compute something else; and words of the reason, where all is stock.
PARTS = [
    ((), {"self_attn": Gated}, "what follows the attention is not the sum"),
    ((1,), {"self_attn": Bent}, "what follows the attention is not the sum"),
    ((), {"mlp": Clamped}, None),  # the layer's own code runs around a fused attention
    ((1,), {"mlp": Scaled}, None),
    ((1,), {"mlp": Bending}, "something else where numbers are large"),
    ((), {"input_layernorm": Shifted}, None),
    ((), {"layer": Scaled}, None),
    ((), {"layer": ByPosition}, None),
    ((), {"layer": ByLength}, None),
    ((), {"layer": Counting}, None),
    ((), {"mlp": Mixing}, None),
    ((), {"self_attn": NoisyKeys}, None),
    ((), {"self_attn": Gated, "mlp": Clamped}, "what follows the attention is not the sum"),
]


@pytest.mark.parametrize(("numbers", "classes", "reason"), PARTS, ids=str)
def test_a_part_that_computes_something_else(numbers, classes, reason):
    """Other layers may be fast; the whole has to be right."""
    stock, ours, plain = replaced(*numbers, **classes), replaced(*numbers, **classes), make("llama")
    sites = accel.report(accel.optimize(ours)).sites
    if reason is not None:
        told = [told for path, rule, _, told in sites if (path, rule) == ("model.layers.1", "decoder layer")]
        assert len(told) == 1 and reason in told[0], told
        patched = [path for path, rule, status, _ in sites if rule == "decoder layer" and status == "patched"]
        assert patched in ([], ["model.layers.0"]) or told[0].startswith("attention runs stock")
    for layer in (*layers(stock).values(), *layers(ours).values()):
        layer.calls = 0  # what optimize tries out counts too
    ids, mask = padded()
    theirs = generate(stock, ids, mask)
    assert Bending in classes.values() or not torch.equal(theirs["sequences"], generate(plain, ids, mask)["sequences"])
    same(generate(ours, ids, mask), theirs)
    same({"x": ours(prompt(2, 12)).logits}, {"x": stock(prompt(2, 12)).logits})
    same(generate(ours, ids, mask, num_beams=2), generate(stock, ids, mask, num_beams=2))


def test_a_bend_far_from_zero():
    """Without effect on what the model was optimized with, and not forgotten when it matters."""
    stock, ours, plain = replaced(mlp=RarelyClamped), replaced(mlp=RarelyClamped), make("llama")
    ids, mask = padded()
    accel.optimize(ours)
    same(generate(ours, ids, mask), generate(plain, ids, mask))
    for model in (stock, ours, plain):
        for layer in layers(model).values():
            layer.mlp.down_proj.weight.mul_(40)
    theirs = generate(stock, ids, mask)
    assert not torch.equal(theirs["sequences"], generate(plain, ids, mask)["sequences"])
    same(generate(ours, ids, mask), theirs)
