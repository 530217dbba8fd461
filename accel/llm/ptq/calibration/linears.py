"""Which linear layers of a model are quantized, and why not the others."""

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from accel.llm.recording.errors import NotUnderstood
from accel.llm.recording.recorder import decoder_layers
from accel.llm.runtime.linear import weights
from accel.patching.structure import plain
from accel.quantization.linears import inside, unfit
from accel.quantization.module import QuantizedLinear
from accel.quantization.scheme import Scheme


def linears(model: nn.Module, scheme: Scheme) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """By path: the linear layers inside the decoder layers to be quantized, and the reason why others are not.

    Of a model without a stack of layers, all but the output head.
    """
    try:
        path, root = decoder_layers(model)
    except NotUnderstood:
        path, root = "", model
    return _chosen(inside(root, path, {id(model.get_output_embeddings())}), scheme)


def heads(model: nn.Module, scheme: Scheme | None) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The same of the output head, in an adapter or out of it; nothing where scheme is None."""
    if scheme is None:
        return {}, {}
    head, path = model.get_output_embeddings(), head_path(model)
    chosen, skipped = ({}, {}) if path is None else _chosen(inside(head, path, set()), scheme)
    if not chosen and not skipped:
        skipped[path or ""] = f"its output head is a {type(head).__name__}: only linear layers are quantized"
    return chosen, skipped


def head_path(model: nn.Module) -> str | None:
    """Where the output head is among the modules."""
    head = model.get_output_embeddings()
    return next((path for path, module in model.named_modules() if module is head), None)


def _chosen(modules: Iterable[tuple[str, nn.Module]], scheme: Scheme) -> tuple[dict[str, nn.Module], dict[str, str]]:
    chosen, skipped = {}, {}
    for where, module in modules:
        reason = _refuses(module, scheme)
        if reason is None:
            chosen[where] = module
        elif reason:
            skipped[where] = reason
    return chosen, skipped


def _refuses(module: nn.Module, scheme: Scheme) -> str | None:
    """Why it is not quantized, None where it is; "" for a module of another kind, of which nothing need be said."""
    if isinstance(module, _ConvNd):
        return ""
    if not isinstance(module, nn.Linear | Conv1D):
        stacks = any(p is not None and p.dim() > 2 for p in module._parameters.values())
        return "a stack of matrices, as of experts: only linear layers are quantized" if stacks else ""
    if type(module) is QuantizedLinear:
        return f"is {module.scheme} already"
    held = weights(module)
    if held is None:
        return plain(module, nn.Linear, Conv1D) or "its weight is not loaded, or of a type of its own"
    outputs, inputs = reversed(held.weight.shape) if held.transposed else held.weight.shape
    return unfit(outputs, inputs, scheme)
