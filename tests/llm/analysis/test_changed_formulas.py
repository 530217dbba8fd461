"""Models that look like something known, and compute something else in one part."""

import pytest
import torch

import accel
from support.llm.families import layers, make, padded, prompt
from support.llm.outputs import generate, same


def replaced(**classes):
    """A llama in which modules of these names are given another class: of the same children and weights."""

    def build():
        model = make("llama")
        for layer in layers(model).values():
            for name, kind in classes.items():
                module = layer if name == "layer" else layer.get_submodule(name)
                module.__class__ = type(kind.__name__, (kind, type(module)), {})
        return model

    return build


class Gated:
    """Attention whose output a gate of its input scales."""

    def forward(self, hidden_states, **kwargs):
        output, weights = super().forward(hidden_states, **kwargs)
        return output * torch.sigmoid(hidden_states.mean(-1, keepdim=True)), weights


class Clamped:
    """An MLP that cuts what is large."""

    def forward(self, x):
        return super().forward(x).clamp(-0.5, 0.5)


class RarelyClamped:
    """An MLP that cuts what is very large: nothing it is given before its weights change."""

    def forward(self, x):
        return super().forward(x).clamp(-40, 40)


class Shifted:
    """A norm that adds what it was given."""

    def forward(self, x):
        return super().forward(x) + 0.1 * x


class Scaled:
    """A layer whose residual is scaled."""

    def forward(self, hidden_states, *args, **kwargs):
        return 0.9 * super().forward(hidden_states, *args, **kwargs)


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


PARTS = {
    "gated-attention": replaced(self_attn=Gated),
    "clamped-mlp": replaced(mlp=Clamped),
    "shifted-norm": replaced(input_layernorm=Shifted),
    "scaled-layer": replaced(layer=Scaled),
    "by-position": replaced(layer=ByPosition),
    "by-length": replaced(layer=ByLength),
    "counting": replaced(layer=Counting),
    "mixing-mlp": replaced(mlp=Mixing),
    "other-keys": replaced(self_attn=NoisyKeys),
    "both": replaced(self_attn=Gated, mlp=Clamped),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_that_computes_something_else(kind):
    stock, ours = PARTS[kind](), PARTS[kind]()
    plain = make("llama")
    ids, mask = padded()
    accel.optimize(ours)
    for layer in (*layers(stock).values(), *layers(ours).values()):
        layer.calls = 0  # what optimize tries out counts too
    theirs = generate(stock, ids, mask)
    assert not torch.equal(theirs["sequences"], generate(plain, ids, mask)["sequences"])
    same(generate(ours, ids, mask), theirs)
    same({"x": ours(prompt(2, 12)).logits}, {"x": stock(prompt(2, 12)).logits})
    same(generate(ours, ids, mask, num_beams=2), generate(stock, ids, mask, num_beams=2))


def test_a_bend_far_from_zero():
    """Without effect on what the model was optimized with, and not forgotten when it matters."""
    stock, ours, plain = replaced(mlp=RarelyClamped)(), replaced(mlp=RarelyClamped)(), make("llama")
    ids, mask = padded()
    accel.optimize(ours)
    same(generate(ours, ids, mask), generate(plain, ids, mask))
    for model in (stock, ours, plain):
        for layer in layers(model).values():
            layer.mlp.down_proj.weight.mul_(40)
    theirs = generate(stock, ids, mask)
    assert not torch.equal(theirs["sequences"], generate(plain, ids, mask)["sequences"])
    same(generate(ours, ids, mask), theirs)


def test_one_layer_of_another_kind():
    """The others may be fast; the whole has to be right."""
    ours, stock = make("llama"), make("llama")
    for model in (ours, stock):
        last = list(layers(model).values())[-1]
        last.mlp.__class__ = type("Own", (Clamped, type(last.mlp)), {})
    accel.optimize(ours)
    ids, mask = padded()
    same(generate(ours, ids, mask), generate(stock, ids, mask))
