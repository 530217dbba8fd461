"""Which linear layers of a model are quantized, and why not the others."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import Conv1D, PreTrainedModel

from accel.llm.parts.linear import holds_transposed, weights
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.recorder import decoder_layers
from accel.parallel.sharded_layers import local
from accel.patching.rule import set_data
from accel.patching.structure import plain
from accel.quantization.linears import Dense, already, base_modules, size_reason
from accel.quantization.scheme import Scheme

STACK = "a stack of matrices, as of experts: only those that accel.optimize(weights=...) can fuse are rounded"


def linears(
    model: PreTrainedModel, scheme: Scheme, stacks: tuple[str, ...] = ()
) -> tuple[dict[str, Dense], dict[str, str]]:
    """By path: the linear layers inside the decoder layers to be quantized, and the reason why others are not.

    Of a model without a stack of layers, all but the output head. stacks: paths of the layers, where they are known.
    """
    try:
        paths = stacks or (decoder_layers(model)[0],)
    except NotUnderstood:
        paths = ("",)
    seen = {id(model.get_output_embeddings())}
    return _chosen((one for path in paths for one in base_modules(model.get_submodule(path), path, seen)), scheme)


def heads(model: PreTrainedModel, scheme: Scheme | None) -> tuple[dict[str, Dense], dict[str, str]]:
    """The same of the output head, in an adapter or out of it; nothing where scheme is None."""
    if scheme is None:
        return {}, {}
    head, path = model.get_output_embeddings(), head_path(model)
    chosen, skipped = ({}, {}) if path is None else _chosen(base_modules(head, path, set()), scheme)
    if not chosen and not skipped:
        skipped[path or ""] = f"its output head is a {type(head).__name__}: only linear layers are quantized"
    return chosen, skipped


def head_path(model: PreTrainedModel) -> str | None:
    """Where the output head is among the modules."""
    head = model.get_output_embeddings()
    return next((path for path, module in model.named_modules() if module is head), None)


def _chosen(modules: Iterable[tuple[str, nn.Module]], scheme: Scheme) -> tuple[dict[str, Dense], dict[str, str]]:
    chosen: dict[str, Dense] = {}
    skipped: dict[str, str] = {}
    for where, module in modules:
        if not isinstance(module, nn.Linear | Conv1D):
            stacks = not isinstance(module, _ConvNd) and any(p.dim() > 2 for p in module.parameters(recurse=False))
            if (reason := already(module) or (STACK if stacks else None)) is not None:  # of others nothing need be said
                skipped[where] = reason
        elif (reason := _refuses(module, scheme)) is None:
            chosen[where] = module
        else:
            skipped[where] = reason
    return chosen, skipped


def _refuses(module: Dense, scheme: Scheme) -> str | None:
    """Why it is not quantized, None where it is."""
    if (reason := already(module)) is not None:
        return reason
    if weights(module) is None:
        return plain(module, nn.Linear, Conv1D) or "its weight is not loaded, or of a type of its own"
    shape = local(module.weight).shape
    outputs, inputs = reversed(shape) if holds_transposed(module) else shape
    return size_reason(outputs, inputs, scheme)


def weight_matrix(module: Dense) -> Tensor:
    """The weight of a linear as (out, in)."""
    return module.weight.detach().t() if holds_transposed(module) else module.weight.detach()


def put(module: Dense, matrix: Tensor) -> None:
    """A linear's weight becomes a matrix (out, in), in its own dtype and layout."""
    value = matrix.t() if holds_transposed(module) else matrix
    set_data(module.weight, lambda data: value.to(data.dtype).contiguous())


@contextmanager
def trial(parameters: Iterable[Tensor]) -> Iterator[None]:
    """After it, the parameters are what they were before: what is given new data inside is given back its own."""
    before = [(parameter, parameter.detach()) for parameter in parameters]
    try:
        yield
    finally:
        for parameter, data in before:
            set_data(parameter, lambda _, data=data: data)
