"""Weights quantised layer by layer, in the order of the model."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from accel_kernels import Quantised
from torch import nn

from accel.llm.linear import weights
from accel.llm.quant.linears import linears
from accel.llm.quant.rounding import quantise
from accel.llm.quant.scheme import Scheme
from accel.llm.recorder import decoder_layers
from accel.llm.understanding import NotUnderstood

NONE_KNOWN: Mapping = MappingProxyType({})


class LayerResult(NamedTuple):
    """path: of a decoder layer. weights: by the full path of a linear in it. changed: other parameters that are to have
    other values, by their full path.
    """

    path: str
    weights: dict[str, Quantised]
    changed: dict[str, torch.Tensor]


def quantise_layers(
    model: nn.Module,
    scheme: Scheme,
    method: str,
    batches: Sequence[dict[str, torch.Tensor]],
    known: Mapping[str, LayerResult] = NONE_KNOWN,
) -> Iterator[LayerResult]:
    """The layers that are not known yet, one by one; the model stays as it is.

    method: "rtn", round to nearest, which looks at no batches. Raises ValueError for another, or for NaN or Inf in a
    weight, naming the linear.
    """
    if method != "rtn":
        raise ValueError(f"method={method!r} is not one of 'rtn'")
    chosen, _ = linears(model, scheme)
    try:
        stack, layers = decoder_layers(model)
        paths = [f"{stack}.{number}" for number in range(len(layers))]
    except NotUnderstood:
        paths = [""]
    for path in paths:
        if path not in known:
            inside = {name: module for name, module in chosen.items() if not path or name.startswith(path + ".")}
            yield LayerResult(path, {name: _rounded(name, module, scheme) for name, module in inside.items()}, {})


def _rounded(path: str, module: nn.Module, scheme: Scheme) -> Quantised:
    weight = module.weight.t() if weights(module).turned else module.weight
    try:
        return quantise(weight, scheme)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
