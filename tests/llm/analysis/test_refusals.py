"""Models that analyzing refuses, with the reason that the report gives."""

import copy

import pytest
import torch
from torch import nn

import accel
from support.llm.edits.modules import llama_with
from support.llm.families import make, padded


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
