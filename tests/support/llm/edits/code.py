"""What users change in the code, the settings and the modules that a fused language model stands in for, as a table."""

import copy
import inspect
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from accel.libraries.cache import generating_cache
from support.llm.edits.places import attention, first


def halved(function):
    """A function that gives half of what this one does, in the first place if in several."""

    def half(*args, **kwargs):
        found = function(*args, **kwargs)
        return (found[0] / 2, *found[1:]) if isinstance(found, tuple) else found / 2

    return half


@contextmanager
def put(mapping, name, value):
    """mapping: a dictionary, or an object with attributes."""
    old = mapping.get(name) if isinstance(mapping, dict) else vars(mapping).get(name)
    write = dict.__setitem__ if isinstance(mapping, dict) else setattr
    write(mapping, name, value)
    try:
        yield
    finally:
        if old is not None:
            write(mapping, name, old)
        elif isinstance(mapping, dict):
            del mapping[name]
        else:
            delattr(mapping, name)


def blind(*args, **kwargs):
    """A mask that hides the first token of all from all but itself."""
    mask = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    mask = mask.clone()
    mask[:, :, 1:, 0] = False
    return mask


@contextmanager
def custom(*models):
    with (
        put(AttentionInterface._global_mapping, "halves", halved(sdpa_attention_forward)),
        put(AttentionMaskInterface._global_mapping, "halves", sdpa_mask),
    ):
        before = models[0].config._attn_implementation
        for model in models:
            model.set_attn_implementation("halves")
        try:
            yield
        finally:
            for model in models:
                model.set_attn_implementation(before)


def registered(interface, name, function):
    return lambda *models: put(interface._global_mapping, name, function)


def on_class(find, name="forward"):
    return lambda *models: put(type(find(models[0])), name, halved(getattr(type(find(models[0])), name)))


def in_file(name):
    """A function of the file that the model's class is written in."""

    def change(*models):
        file = vars(inspect.getmodule(type(models[0])))
        return put(file, name, halved(file[name]))

    return change


@contextmanager
def on_each(find, name, make_value, models):
    """A setting or a module, another one on each model."""
    held = [(owner, vars(owner).get(name, getattr(owner, "_modules", {}).get(name))) for owner in map(find, models)]
    for owner, _ in held:
        setattr(owner, name, make_value(owner))
    try:
        yield
    finally:
        for owner, value in held:
            setattr(owner, name, value) if value is not None else delattr(owner, name)


def inside(find, name, make_value):
    return lambda *models: on_each(find, name, make_value, models)


def field(name, value):
    return inside(lambda model: model.config, name, lambda _: value)


def other_config(*models):
    def changed(owner):
        config = copy.deepcopy(owner.config)
        config._attn_implementation = "eager"
        return config

    return on_each(attention, "config", changed, models)


class Half(nn.Module):
    def forward(self, x):
        return x / 2


class Negated(nn.Module):
    """Around a module of the model's."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        output = self.inner(*args, **kwargs)
        if isinstance(output, torch.Tensor):
            return -output
        output.last_hidden_state = -output.last_hidden_state
        return output


@contextmanager
def other_inside(*models):
    """Of a class that looks at the cache, as code of the user's may."""
    kind = type(models[0].model)

    class Counting(kind):
        def forward(self, *args, **kwargs):
            stored = generating_cache(kwargs).get_seq_length()
            output = super().forward(*args, **kwargs)
            output.last_hidden_state = output.last_hidden_state * (2 + stored)
            return output

    for model in models:
        model.model.__class__ = Counting
    try:
        yield
    finally:
        for model in models:
            model.model.__class__ = kind


def counted(inner):
    """A forward that looks at the cache, in the place of the instance's own."""
    forward = inner.forward

    def replaced(*args, **kwargs):
        stored = generating_cache(kwargs).get_seq_length()
        output = forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state * (2 + stored)
        return output

    return replaced


# (family, what changes, whether it shows in what stock computes, words of the reason)
CHANGES = {
    "an attention of the user's": ("llama", custom, True, "_attn_implementation"),
    "the attention under its name": (
        "llama", registered(AttentionInterface, "sdpa", halved(sdpa_attention_forward)), True, "AttentionInterface.sdpa"
    ),
    "the mask under its name": ("llama", registered(AttentionMaskInterface, "sdpa", blind), True, "MaskInterface.sdpa"),
    "torch's attention": (
        "llama", lambda *_: put(F, "scaled_dot_product_attention", halved(F.scaled_dot_product_attention)), True,
        "scaled_dot_product_attention",
    ),
    "a linear's product": ("llama", lambda *_: put(F, "linear", halved(F.linear)), True, "functional.linear"),
    "the class of attention": ("llama", on_class(attention), True, "LlamaAttention.forward"),
    "the class of norms": ("llama", on_class(lambda m: first(m).input_layernorm), True, "LlamaRMSNorm.forward"),
    "the class of the model inside": ("llama", on_class(lambda m: m.lm_head), True, "Linear.forward"),
    "how a layer is called": ("llama", on_class(attention, "__call__"), True, "__call__"),
    "the rotation": ("llama", in_file("rotate_half"), True, "rotate_half"),
    "how masks are made": ("llama", lambda *models: put(vars(inspect.getmodule(type(models[0]))), "create_causal_mask",
                                                        lambda **_: None), True, "create_causal_mask"),
    "a method of attention": ("falcon-grouped", on_class(attention, "_split_heads"), True, "_split_heads"),
    "no causality": ("llama", field("is_causal", False), True, "is_causal"),
    "a window": ("mistral", field("sliding_window", 3), True, "sliding_window"),
    "kinds of layers": ("gemma2", field("layer_types", ["full_attention"] * 2), True, "layer_types"),
    "a configuration of its own": ("llama", other_config, False, "configuration of model.layers.0.self_attn"),
    "a module beside": (
        "gpt2", inside(attention, "resid_dropout", lambda _: Half()), True, "attn.resid_dropout"
    ),
    "a module inside": (
        "gpt2", inside(lambda m: first(m).mlp, "dropout", lambda _: Half()), True, "mlp.dropout"
    ),
    "something around the model inside": (
        "llama", inside(lambda m: m, "model", lambda m: Negated(m.model)), True, "its input embeddings"
    ),
    "something around the words": (
        "llama", inside(lambda m: m.model, "embed_tokens", lambda m: Negated(m.embed_tokens)), True,
        "its input embeddings",
    ),
    "a model inside of another class": ("llama", other_inside, True, "model: Counting where LlamaModel is expected"),
    "a forward of the model inside": (
        "llama", inside(lambda m: m.model, "forward", counted), True, "model has a replaced"
    ),
    "a module that was not there": (
        "llama", inside(attention, "q_norm", lambda _: Half()), False, "self_attn.q_norm"
    ),
    "a function on a module": (
        "llama", inside(lambda m: first(m).mlp, "other", lambda _: F.relu), False, "mlp.other"
    ),
}  # fmt: skip
