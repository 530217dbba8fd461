"""Stock over caches and activations that round as ours do."""

import copy
from collections.abc import Callable
from contextlib import contextmanager

import torch
from accel_kernels.attention.paged.kv_quantization import restored, rounded
from torch import nn
from transformers import DynamicCache

from accel.quantization.activations import RowProducts
from accel.quantization.module import QuantizedLinear
from support.llm import optimized_models
from support.llm.families import prompt


@contextmanager
def rounding(codes: torch.dtype, except_layer: int | None = None):
    """Inside, every dynamic cache rounds what it is given, but for what stands beside latents, of another size."""
    update, init = DynamicCache.update, DynamicCache.__init__

    def rounds(self, keys, values, layer, *args, **kwargs):
        if layer != except_layer:
            whole = keys.shape[-1] == values.shape[-1]
            keys = restored(*rounded(keys, codes), keys.dtype)
            values = restored(*rounded(values, codes), values.dtype) if whole else values
        return update(self, keys, values, layer, *args, **kwargs)

    def plain(self, *args, config=None, **kwargs):  # layers with a window forget, and ours keep; masks hide the rest
        init(self, *args, **kwargs)

    DynamicCache.update, DynamicCache.__init__ = rounds, plain
    try:
        yield
    finally:
        DynamicCache.update, DynamicCache.__init__ = update, init


def pair(name: str, kind: str):
    """(optimized, stock) that a test may change."""
    return optimized_models.pair(name, kv_cache=kind)


def held(kind: str = "int8", rows: int = 2, tokens: int = 9, name: str = "llama"):
    """An optimized model, a cache that it has filled, and its tokens."""
    ours, stock = pair(name, kind)
    ids, cache = prompt(rows, tokens), DynamicCache()
    ours(ids, past_key_values=cache)
    return ours, stock, ids, cache


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


class Counting(RowProducts):
    """The kernels, and how often rows were rounded."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "calls", [])

    def rounded(self, x, activations, norm=None, fixed=None):
        self.calls.append((tuple(x.shape), norm is not None, fixed is not None))
        return super().rounded(x, activations, norm, fixed)


def oracle(stock: nn.Module, ours: nn.Module, rounded: Callable) -> nn.Module:
    """A copy of stock over the weights of ours, whose linears multiply rounded(input, the linear of ours)."""
    twin = copy.deepcopy(stock)
    for path, module in ours.named_modules():
        if type(module) is QuantizedLinear:
            theirs, held = twin.get_submodule(path), module.quantized
            weight = held.numbers().double() * held.scales.double()
            theirs.weight.data = (weight.t() if module.transposed else weight).contiguous()
            theirs.register_forward_pre_hook(lambda _, args, module=module: (rounded(args[0], module), *args[1:]))
    return twin


@torch.no_grad()
def planted(model: nn.Module, channels: tuple[int, ...] = (5,), factor: float = 30.0) -> nn.Module:
    """As large models are, the same function: behind norms some channels are larger by the factor; changed in place."""
    places = list(channels)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight[places] *= factor
            for reader in readers:
                reader.weight[:, places] /= factor
    return model
