"""A model quantized for good, layer by layer: the work behind `accel.quantize`."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from accel.errors import Refused
from accel.libraries.adapters import ADAPTED, BASE
from accel.libraries.hooks import hook_of
from accel.llm.parts.linear import holds_transposed, weights
from accel.llm.ptq.calibrate import LayerResult, quantize_layers
from accel.llm.ptq.calibration.batches import batches
from accel.llm.ptq.calibration.layer_inputs import moved
from accel.llm.ptq.calibration.linears import heads, linears, weight_matrix
from accel.llm.ptq.checkpoint import Checkpoint, data_digest, model_digest
from accel.llm.ptq.formats.saving import SAVE, SaveOverride, mixed
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.recorder import decoder_layers
from accel.options import ACTIVATIONS, METHODS, STATIC, WEIGHTS, check_activations
from accel.parallel.sharded_layers import ranks_of
from accel.patching.rule import set_data
from accel.patching.structure import meta_weights
from accel.planning.plan import PLAN
from accel.quantization.activations import FIXED, is_static
from accel.quantization.linears import Dense, nothing_to_quantize
from accel.quantization.model import quantization_record
from accel.quantization.module import QuantizedLinear
from accel.quantization.patch import exchange, held_elsewhere
from accel.quantization.rounding import round_to_nearest, sqnr_db
from accel.quantization.scheme import Scheme

BY_ITSELF = "rtn"  # the method that looks at no data
SMOOTHED = "int8"  # activations of a model that was smoothed for them
WITH_DATA = "gptq"  # what is chosen where there is some


@dataclass
class Run:
    """What was done.

    rows: as of `Report.weights`. skipped: by the path of a linear that was left alone, why. seconds, notes, sqnr_db: by
    the path of a layer, the last two as of a `CalibratedLayer`. taken: layers that an earlier run had done, which have
    none of these.
    """

    rows: list[dict] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sqnr_db: dict[str, float] = field(default_factory=dict)
    taken: int = 0

    def reasons(self) -> Counter:
        """Linears left alone, by why."""
        return Counter(self.skipped.values())


UNSAVED = "_accel_unsaved"  # of a model, while it is


@dataclass
class Unsaved:
    """Of a quantized model whose save failed: the call, and what was done, so that the same call only saves again."""

    run: dict[str, str | None]
    activations: str | None
    done: Run


def quantize(
    model: PreTrainedModel,
    scheme: str,
    calibration: object,
    tokenizer: Any,
    method: str | None,
    out: Path | None,
    at: Callable[[int, int], None],
    activations: str | None = None,
    device: str | torch.device | None = None,
) -> Run:
    """As `accel.quantize`. at: called with the linears that are done and all of them."""
    parsed, method = _choices(model, scheme, calibration, method)
    device = None if device is None else _device(device)
    activations = _activations(activations, scheme, method, calibration)
    if is_static(activations):
        parsed = replace(parsed, activations=activations)
    asked = {"scheme": scheme, "method": method, "activations": parsed.activations}
    left = vars(model).get(UNSAVED)
    if left is not None and out is not None:
        data = [] if calibration is None else batches(model, calibration, tokenizer)
        run = left.run | asked | {"calibration": data_digest(data)}
        if (run, activations) == (left.run, left.activations):  # the same call: all but the saving is done
            _save(model, tokenizer, Checkpoint(out, run), left)
            return left.done
    chosen, skipped = linears(model, parsed)
    schemes = dict.fromkeys(chosen, replace(parsed, activations=activations))
    head = Scheme.of_head(scheme)
    last, left = heads(model, head)
    if head is not None:
        schemes |= dict.fromkeys(last, head)
    chosen, skipped = chosen | last, skipped | left
    if not chosen:
        raise ValueError(nothing_to_quantize(scheme, skipped))
    if out is not None and (getattr(model, ADAPTED, False) or any(BASE in p.split(".") for p in chosen)):
        raise ValueError("out: a model with adapters in it cannot be saved; merge or unload them first")
    if out is not None and (reason := mixed(model, model.state_dict(), chosen)):
        raise ValueError(f"out: {reason}")
    data = [] if calibration is None else batches(model, calibration, tokenizer)
    checkpoint, known = None, {}
    if out is not None:
        digests: dict[str, str | None] = {"model": model_digest(model), "calibration": data_digest(data)}
        checkpoint = Checkpoint(out, asked | digests)
        known = checkpoint.known()
    done = Run(skipped=skipped, taken=len(known))
    results = {path: _checked(result, model, chosen) for path, result in known.items()}
    results |= {path: _nearest(path, module, schemes[path], device) for path, module in last.items()}
    count = _linears(results)
    at(count, len(chosen))
    originals = Originals(model)
    with originals:
        start = time.perf_counter()
        for result in originals.ahead(quantize_layers(model, parsed, method, data, known, device)):
            if result.path in results:
                continue
            results[result.path] = _checked(result, model, chosen)
            if checkpoint is not None:
                checkpoint.add(result)
            now = time.perf_counter()
            done.seconds[result.path], start = now - start, now
            done.notes[result.path] = tuple(getattr(result, "notes", ()))
            if (ratio := getattr(result, "sqnr_db", None)) is not None:
                done.sqnr_db[result.path] = ratio
            count += len(result.weights)
            at(count, len(chosen))
        missing = chosen.keys() - {path for result in results.values() for path in result.weights}
        if missing:
            raise ValueError(f"method={method!r} gave no weight for {min(missing)}")
    with torch.inference_mode(False), torch.no_grad():
        done.rows = _put(model, results, chosen, schemes, originals, device)
    if checkpoint is not None:
        _save(model, tokenizer, checkpoint, Unsaved(checkpoint.run, activations, done))
    return done


def _save(model: PreTrainedModel, tokenizer: Any, checkpoint: Checkpoint, unsaved: Unsaved) -> None:
    """Saves the model; where that fails, the same call of `quantize` can do it again."""
    vars(model)[UNSAVED] = unsaved
    model.save_pretrained(checkpoint.out)
    if tokenizer is not None:
        tokenizer.save_pretrained(checkpoint.out)
    checkpoint.finish()
    del vars(model)[UNSAVED]


class Originals:
    """The weights of layers before methods replace them, on the CPU; put back where there is an error inside."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.held: dict[str, torch.Tensor] = {}
        try:
            stack, layers = decoder_layers(model)
            self.paths = [f"{stack}.{number}." for number in range(len(layers))]
        except NotUnderstood:
            self.paths = [""]

    def ahead(self, results: Iterable[LayerResult]) -> Iterator[LayerResult]:
        """The results, layer by layer; each layer's weights are kept before it is done."""
        results = iter(results)
        for path in self.paths:
            for name, parameter in self.model.named_parameters():
                if name.startswith(path):
                    # On a CPU this is no copy: methods give a parameter new memory, see `put`.
                    self.held[name] = parameter.detach().to("cpu")
            result = next(results, None)
            if result is None:
                return
            yield result

    def __enter__(self) -> "Originals":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            with torch.inference_mode(False), torch.no_grad():
                for name, tensor in self.held.items():
                    parameter = self.model.get_parameter(name)
                    if not torch.equal(parameter.detach().cpu(), tensor):
                        parameter.detach().copy_(tensor)


def _choices(model: PreTrainedModel, scheme: object, calibration: object, method: object) -> tuple[Scheme, str]:
    """Raises ValueError for what cannot be, before anything is read or changed."""
    if scheme not in WEIGHTS:
        raise ValueError(f"scheme={scheme!r} is not one of {', '.join(map(repr, WEIGHTS))}")
    if method is None:
        method = BY_ITSELF if calibration is None else WITH_DATA
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(map(repr, METHODS))}")
    if method != BY_ITSELF and calibration is None:
        raise ValueError(f"method={method!r} looks at calibration data: give calibration=, texts or batches")
    if PLAN in vars(model):
        raise ValueError("this model is optimized: call accel.restore(model), quantize it, then accel.optimize(model)")
    if (ranks := ranks_of(model)) is not None:
        raise Refused(
            f"accel.quantize: the model is divided among {ranks.size} ranks; quantize it in one process to a folder, "
            "and divide that by accel shard, or give weights= to accel.optimize"
        )
    if meta_weights(model) or any(hook_of(module) is not None for module in model.modules()):
        raise ValueError("weights of this model are not loaded, or are moved by accelerate; load it on one device")
    return Scheme.parse(scheme), method


def _device(given: Any) -> torch.device:
    """Raises ValueError for what is none, or is not there."""
    try:
        return torch.empty(0, device=given).device
    except (TypeError, RuntimeError, AssertionError) as error:
        raise ValueError(f"device={given!r}: {str(error).splitlines()[0]}") from None


def _activations(activations: object, scheme: str, method: str, calibration: object) -> str | None:
    """How activations are to be rounded. Raises ValueError for what cannot be."""
    if activations is None:
        return SMOOTHED if method == "smoothquant" else None
    if activations not in (valid := (*ACTIVATIONS, *STATIC)):
        raise ValueError(f"activations={activations!r} is not one of None, {', '.join(map(repr, valid))}")
    check_activations(activations, scheme)
    if is_static(activations) and calibration is None:
        raise ValueError(
            f"activations={activations!r} is fixed by calibration data: give calibration=, texts or batches"
        )
    return activations


def _linears(results: dict[str, LayerResult]) -> int:
    return sum(len(result.weights) for result in results.values())


def _checked(result: LayerResult, model: PreTrainedModel, chosen: dict[str, Dense]) -> LayerResult:
    """Raises ValueError where a result is not of this model."""
    for path, quantized in result.weights.items():
        module = chosen.get(path)
        shape = None
        if module is not None and weights(module) is not None:
            shape = tuple(reversed(module.weight.shape) if holds_transposed(module) else module.weight.shape)
        if shape != quantized.shape:
            raise ValueError(f"layer {result.path}: {path} is {shape} in the model and {quantized.shape} in the result")
    for path, tensor in result.changed.items():
        owner, _, name = path.rpartition(".")
        parameter = model.get_submodule(owner)._parameters.get(name)
        if parameter is None or parameter.shape != tensor.shape:
            raise ValueError(f"layer {result.path}: {path} of shape {tuple(tensor.shape)} is no parameter of the model")
    return result


def _nearest(path: str, module: Dense, scheme: Scheme, device: torch.device | None) -> LayerResult:
    """The output head: no method looks at what it is given."""
    try:
        found = round_to_nearest(moved(weight_matrix(module), device), scheme)
        return LayerResult(path, {path: moved(found, module.weight.device)}, {})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _put(
    model: PreTrainedModel,
    results: dict[str, LayerResult],
    chosen: dict[str, Dense],
    schemes: dict[str, Scheme],
    originals: Originals,
    device: torch.device | None,
) -> list[dict]:
    """Consumes results and chosen: an original is freed once replaced. device: of decibels; None: the model's."""
    if SAVE not in vars(model):
        vars(model)[SAVE] = SaveOverride(model)
    tied = held_elsewhere(model, chosen.values())

    def put(result: LayerResult) -> Iterator[dict]:
        """Holds the last references to what it replaces."""
        pairs = []
        for where, quantized in result.weights.items():
            module, scheme = chosen.pop(where), schemes[where]
            transposed = holds_transposed(module)
            weight = module.weight.t() if transposed else module.weight
            exact = originals.held.pop(f"{where}.weight", module.weight)
            exact = exact.t() if transposed else exact
            # Where a scale was folded into the weight, the ratio to the original would mean nothing.
            place = weight.device if device is None else device
            ratio = None if result.changed else sqnr_db(exact.to(place), moved(quantized, place))
            fixed = {}
            if is_static(scheme.activations):
                if where in result.inputs:
                    fixed[FIXED[scheme.activations]] = result.inputs[where].to(weight.device)
                else:
                    scheme = replace(scheme, activations=None)
            row = quantization_record(where, scheme, weight, quantized, tied.get(id(module.weight)), ratio, False)
            yield row | {name: tensor.tolist() for name, tensor in fixed.items()}
            held = moved(quantized, weight.device)
            pairs.append((module, QuantizedLinear(held, module.bias, weight.dtype, scheme, transposed, **fixed)))
        for where, tensor in result.changed.items():
            set_data(model.get_parameter(where), lambda data, tensor=tensor: tensor.to(data.device, data.dtype))
        exchange(model, pairs)

    return [row for path in list(results) for row in put(results.pop(path))]
