"""A folder in the layout of compressed-tensors, loaded straight into quantized linears: no weight is ever whole."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from accel_kernels.gemm.quantized_weight import Quantized
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from accel.libraries.loading import entered, own_name, retied
from accel.llm.ptq.calibration.linears import head_path
from accel.llm.ptq.formats.files import located, quantized_linears, read_config, weight_files
from accel.llm.ptq.formats.quantization_config import FIELD, QuantizationConfig
from accel.llm.ptq.formats.saving import SAVE, SaveOverride, untie
from accel.quantization.activations import is_static
from accel.quantization.formats import compressed_tensors as compressed
from accel.quantization.module import QuantizedLinear
from accel.quantization.patch import exchange
from accel.saved import refuse_pickles, whole

BLOCKS = ("block", "tensor_group")  # strategies
Parts = Mapping[str, torch.Tensor]  # of a quantized linear, by the last part of their names in a file


def load(folder: Path, dtype: str | torch.dtype, device: str | torch.device | None) -> nn.Module:
    """As `accel.load`."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json")
    refuse_pickles(folder)
    config, fields = read_config(folder)
    weight_files(folder)
    given = {"dtype": dtype} | ({} if device is None else {"device_map": device})
    if fields is None or not is_compressed_tensors(fields) or _of_library(fields, folder):
        return whole(AutoModelForCausalLM, folder, config=config, **given).eval()
    linears = quantized_linears(folder)
    quantization = read_quantization(folder, fields, linears)
    replace = partial(replace_linears, linears=linears, make=PlaceholderLinear, quantization=quantization)
    with entered(replace, partial(_finish, quantization=quantization)) as method:
        config.quantization_config = {"quant_method": method}
        return whole(AutoModelForCausalLM, folder, config=config, **given).eval()


def is_compressed_tensors(fields: Mapping) -> bool:
    """Whether a `quantization_config` is of the layout that is read here."""
    return fields.get("quant_method") == compressed.METHOD


def _of_library(fields: Mapping, folder: Path) -> bool:
    """Whether the package alone reads it: scales by block, floats of 4 bits, zero points of inputs. So it is with
    numbers that are of other than 4 or 8 bits in the files too, or of fewer than lie there.
    """
    found = fields.get("config_groups")
    groups = [one for one in found.values() if isinstance(one, Mapping)] if isinstance(found, Mapping) else []
    weights, inputs = (
        [one[part] for one in groups if isinstance(one.get(part), Mapping)] for part in ("weights", "input_activations")
    )
    said = [(one.get("strategy"), one.get("num_bits"), one.get("type")) for one in weights]
    if any(way in BLOCKS or (bits, kind) == (4, "float") for way, bits, kind in said):
        return True
    fewer = [bits for _, bits, _ in said if isinstance(bits, int) and 1 < bits < 8]
    linears = quantized_linears(folder).values() if fewer else ()
    spread = any("weight" in parts for parts in linears) and len(fewer) == len(said)
    spread |= any(one.get("symmetric") is False and not one.get("dynamic") for one in inputs)
    return spread or any(_bits(parts) in fewer and _bits(parts) != 4 for parts in linears)


def _bits(parts: Parts) -> int:
    packed = {"weight_packed", "weight_shape"} <= parts.keys()
    return compressed.bits(parts["weight_packed"], parts["weight_shape"]) if packed else 8


def read_quantization(folder: Path, fields: Mapping, linears: Mapping[str, Parts]) -> QuantizationConfig:
    """What a `quantization_config` says. Raises ValueError where the parts do not fit it, or one another."""
    with located(folder / "config.json"):
        quantization = QuantizationConfig(fields)
    for path, parts in linears.items():
        with located(folder, path):
            _check_parts(quantization, path, parts)
    return quantization


def _check_parts(quantization: QuantizationConfig, path: str, parts: Parts) -> None:
    """Raises ValueError for parts that do not fit one another, or what the configuration says of them."""
    weight = compressed.read(parts)
    if quantization.leaves(path):
        raise ValueError(f"{FIELD}.ignore names it, and the file holds it quantized")
    group = quantization.group(path)
    if group is None:  # a configuration may name it as the model does, see `replace_linears`
        return
    ordered = compressed.GROUP_OF in parts
    if reason := group.contradicts(weight, parts["weight_scale"], ordered):
        raise ValueError(reason)
    if ordered and group.activations:
        raise ValueError("its columns are in an order of their own, and its inputs rounded: not read together")


class PlaceholderLinear(nn.Module):
    """Stands for a quantized linear while transformers loads its parts as they are in the file."""

    bias: nn.Parameter | None

    def __init__(self, parts: Parts, bias: nn.Parameter | None):
        super().__init__()
        for name, tensor in parts.items():
            self.register_parameter(name, nn.Parameter(tensor.to("meta"), requires_grad=False))
        self.register_parameter("bias", bias)


def replace_linears(
    model: PreTrainedModel,
    linears: Mapping[str, Parts],
    make: Callable[[Parts, nn.Parameter | None], nn.Module],
    quantization: QuantizationConfig,
) -> None:
    """Puts what make(parts, bias) gives in the place of the linears that a file holds quantized. Raises ValueError for
    one that the configuration names neither as the file does nor as the model.
    """
    head = head_path(model)
    paths = paths_in(model, linears)
    for path, parts in linears.items():
        if quantization.group(path) is None:
            with located(path):
                if quantization.group(paths[path]) is None:
                    raise ValueError(f"no group of {FIELD}.config_groups names it, and the file holds it quantized")
                _check_parts(quantization, paths[path], parts)
        model.set_submodule(paths[path], make(parts, _replaceable(model, paths[path], parts).bias))
    if head in paths.values():
        untie(model.config)
        retied(model)


def paths_in(model: PreTrainedModel, paths: Iterable[str]) -> dict[str, str]:
    """By paths of a file, those of the model: transformers renames some, as GPT-NeoX's head."""
    renamed = own_name(model)
    return {path: renamed(f"{path}.weight").removesuffix(".weight") for path in paths}


def _replaceable(model: PreTrainedModel, path: str, parts: Parts) -> nn.Linear:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    if not isinstance(module, nn.Linear):
        raise ValueError(f"the file quantizes {path}, which is no linear layer of a {type(model).__name__}")
    shape = compressed.read(parts).shape
    if shape != tuple(module.weight.shape):
        raise ValueError(f"{path} is {shape} in the file and {tuple(module.weight.shape)} in the model")
    return module


def _finish(model: PreTrainedModel, quantization: QuantizationConfig) -> None:
    pairs: list[tuple[nn.Module, nn.Linear]] = []
    for path, module in model.named_modules():
        if type(module) is PlaceholderLinear:
            held = {name: p.detach() for name, p in module._parameters.items() if p is not None}
            bias = module.bias
            module._parameters.clear()  # so that each part of the file is freed before the next one is repacked
            with located(path):
                made = quantized_linear_of(model, path, module, quantization, checked_weight(held), bias, held)
            pairs.append((module, made))
    exchange(model, pairs)
    vars(model)[SAVE] = SaveOverride(model)


def checked_weight(held: Parts) -> Quantized:
    """The weight of the parts of a file, in their memory. Raises ValueError for one without a value."""
    quantized = compressed.read(held, taken=True)
    if not bool(quantized.scales.isfinite().all()):
        raise ValueError("NaN or Inf among its scales")
    return quantized


def quantized_linear_of(
    model: PreTrainedModel,
    path: str,
    module: nn.Module,
    quantization: QuantizationConfig,
    quantized: Quantized,
    bias: nn.Parameter | None,
    held: Parts,
    whole: Quantized | None = None,
) -> QuantizedLinear:
    """A quantized linear in the place of a module. held: the parts of the file. whole: of which quantized is a part.

    Its inputs are rounded as configured, and stay as they are where the weight does not allow that.
    """
    group = None if module is model.get_output_embeddings() else quantization.group(path)
    activations = compressed.rounding_of(group.activations or {}) if group is not None else None
    scheme = compressed.scheme_of(quantized if whole is None else whole)
    scale = compressed.input_scale(held) if is_static(activations) else None
    rounding = scheme if activations is None else scheme.rounding(activations, scale is not None)
    scheme = scheme if isinstance(rounding, str) else rounding
    return QuantizedLinear(quantized, bias, model.dtype, scheme, input_scale=scale)
