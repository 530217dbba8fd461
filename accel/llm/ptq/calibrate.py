"""Weights quantized layer by layer, by methods that look at what the layers are given."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from accel_kernels import Quantized
from torch import Tensor, nn

from accel.llm.ptq.algorithms import awq, gptq
from accel.llm.ptq.algorithms import smoothquant as smooth
from accel.llm.ptq.calibration.folding import FoldGroup, layer_groups
from accel.llm.ptq.calibration.layer_inputs import LayerInputs, lent, moved
from accel.llm.ptq.calibration.layer_work import LayerWork, outputs
from accel.llm.ptq.calibration.linears import linears, put
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.recorder import decoder_layers
from accel.llm.recording.resting import model_side_effects
from accel.patching.rule import set_data
from accel.patching.structure import placement, stock_method
from accel.quantization.activations import COLUMNS, FIXED, SCALE, THRESHOLD, is_static
from accel.quantization.linears import Dense
from accel.quantization.scheme import Scheme

FOLDING = ("awq", "smoothquant")
ALGORITHMS: dict[str, Callable[[LayerWork, nn.Module, Sequence[FoldGroup]], None]] = {
    "rtn": lambda work, *_: work.round(),
    "gptq": lambda work, *_: gptq.quantize_layer(work),
    "awq": awq.quantize_layer,
    "smoothquant": smooth.quantize_layer,
}


class LayerResult(NamedTuple):
    """path: of the decoder layer. weights: by the full path of each linear. changed: other parameters that changed, by
    full path: norms, biases, the weight of a linear that a scale was folded into. inputs: by the full path of each
    linear what calibration fixed of its inputs, see `FIXED`.
    """

    path: str
    weights: dict[str, Quantized]
    changed: dict[str, Tensor]
    inputs: Mapping[str, Tensor] = {}


class CalibratedLayer(LayerResult):
    """A result with its quality. notes: what was not done as asked for, and why. sqnr_db: signal to noise of what the
    layer adds to its hidden states, on the calibration data; the int8 activations of smoothquant included. None where
    nothing was run.
    """

    notes: tuple[str, ...] = ()
    sqnr_db: float | None = None


def quantize_layers(
    model: nn.Module,
    scheme: Scheme,
    method: str,
    batches: Sequence[dict[str, Tensor]],
    known: Mapping[str, LayerResult] = {},
    device: torch.device | None = None,
) -> Iterator[LayerResult]:
    """Quantizes the linears inside the decoder layers (see `linears`), one layer after the other; yields each result.

    model: a causal language model in its own code, not optimized; its weights become the dequantized ones as layers are
    done, so that later layers see the rounding of earlier ones. batches: arguments of its forward, such as input_ids
    and attention_mask (rows, tokens), what the mask leaves out being left out; may be empty for "rtn" only. method:
    "rtn" (to nearest), "gptq", "awq" or "smoothquant", see there. scheme: with activations where the batches are to fix
    something for them. known: results to be applied and not computed again. device: where layers are worked on, one at
    a time, while the model stays where it is, and as it is unless later layers can be reached through it alone;
    results lie where it does. None: there. The same arguments give the same results.

    Raises ValueError for a model or a scheme that the method is not for, and for NaN or Inf on the way, naming the
    layer. All else is as `accel.quantize` has checked it.
    """
    _check(model, scheme, method, batches)
    chosen = _chosen(model, scheme)
    layers: nn.ModuleList | None
    try:
        path, layers = decoder_layers(model)
    except NotUnderstood as reason:
        if batches:
            raise ValueError(f"method={method!r}: {reason}") from None
        path, layers = "", None
    names = [""] if layers is None else [f"{path}.{number}" for number in range(len(layers))]
    device = None if layers is None else device  # what has no layers cannot be lent one by one
    inputs = LayerInputs(model, path, layers, batches, device) if batches and layers is not None else None
    return _layers(model, scheme, method, known, chosen, names, inputs, device)


def apply(model: nn.Module, result: LayerResult) -> None:
    """Gives a model the values of a result of it, its weights dequantized, wherever the result's tensors are."""
    for path, tensor in result.changed.items():
        set_data(model.get_parameter(path), lambda data, tensor=tensor: tensor.to(data.device, data.dtype, copy=True))
    for path, quantized in result.weights.items():
        weight = model.get_parameter(f"{path}.weight")
        put(model.get_submodule(path), moved(quantized, weight.device).dequantized(weight.dtype))


def _layers(
    model: nn.Module,
    scheme: Scheme,
    method: str,
    known: Mapping[str, LayerResult],
    chosen: dict[str, Dense],
    names: list[str],
    inputs: LayerInputs | None,
    device: torch.device | None,
) -> Iterator[LayerResult]:
    home, _ = placement(model)
    changed = device is None or (inputs is not None and not all(inputs.chained))
    groups, reason = _groups(model) if method in FOLDING and known.keys() < set(names) else ({}, "")
    for name in names:
        layer, calls = model.get_submodule(name), [] if inputs is None else inputs.now()
        own = {path: module for path, module in chosen.items() if not name or path.startswith(f"{name}.")}
        with lent(layer, device, changed):
            if name in known:
                result = known[name]
                apply(model, result)
                scales = result.inputs if FIXED.get(scheme.activations) == SCALE else None
                scales = moved(scales, device)
                after = list(outputs(layer, calls, own if method == "smoothquant" else {}, scales))
            else:
                work = LayerWork(layer, scheme, own, calls)
                if reason:
                    work.notes.append(f"no scale is folded: {reason}")
                ALGORITHMS[method](work, model, groups.get(name, ()))
                if is_static(scheme.activations):
                    _fix_inputs(work)
                after = work.outputs()
                result = _result(name, work, after, None if device is None else home)
        if inputs is not None:
            inputs.next(after)
        yield result


def _fix_inputs(work: LayerWork) -> None:
    """One scale for all inputs of a linear: the largest in size becomes the largest number. Or its outlier columns."""
    sizes = {path: smooth.LargestSize() for path in work.linears}
    work.observe(sizes)
    for path, size in sizes.items():
        if size.largest is not None and FIXED[work.scheme.activations] == COLUMNS:
            work.fixed[path] = (size.largest > THRESHOLD).nonzero().view(-1)
        elif size.largest is not None:
            # As a file holds it, and whoever else reads that.
            scale = (size.largest.max() / work.scheme.range[1]).to(work.linears[path].weight.dtype).float()
            if bool(scale > 0):
                work.fixed[path] = scale.view(1)
        if path not in work.fixed:
            work.notes.append(f"{path}: inputs keep their dtype, no token of the calibration has any but 0 there")


def _result(name: str, work: LayerWork, after: list[Tensor], home: torch.device | None) -> CalibratedLayer:
    """Its tensors at home, or where they are for None."""
    own = {f"{path}.weight" for path in work.quantized}
    changed = {path: tensor.detach().clone() for path, tensor in work.changed.items() if path not in own}
    quantized = {path: work.quantized[path] for path in work.linears}
    result = CalibratedLayer(name, *moved((quantized, changed, work.fixed), home))
    result.notes = tuple(work.notes)
    if after:
        noise, signal = work.error(after), work.signal()
        result.sqnr_db = math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf
    return result


def _groups(model: nn.Module) -> tuple[dict[str, list[FoldGroup]], str]:
    """The groups of every layer, and why there are none."""
    try:
        return layer_groups(model), ""
    except NotUnderstood as reason:
        return {}, str(reason)


def _check(model: nn.Module, scheme: Scheme, method: str, batches: Sequence[dict[str, Tensor]]) -> None:
    if method == "smoothquant" and (scheme.weight_dtype, scheme.symmetric) != ("int8", True):
        raise ValueError(f"method='smoothquant' is for weights='int8', not for {scheme}")
    reason = model_side_effects(model) or next(filter(None, map(_replaced, model.modules())), None)
    if batches and reason is not None:
        raise ValueError(f"{reason}: calibrate the model as it was loaded")


def _replaced(module: nn.Module) -> str | None:
    forward = vars(module).get("forward")
    if forward is None or stock_method(module, forward):
        return None
    return f"the forward of a {type(module).__name__} was replaced ({type(forward).__name__})"


def _chosen(model: nn.Module, scheme: Scheme) -> dict[str, Dense]:
    """The linears to be quantized: without those whose weight is another module's too, which would change with it."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {path: module for path, module in linears(model, scheme)[0].items() if owners[id(module.weight)] == 1}
