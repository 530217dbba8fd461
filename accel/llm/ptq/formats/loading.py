"""A folder in the layout of compressed-tensors, loaded straight into quantized linears: no weight is ever whole."""

import copy
import json
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accel_kernels.gemm.quantized_weight import Quantized
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    AutoQuantizationConfig,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from accel.errors import reason_of
from accel.llm.ptq.calibration.linears import head_path
from accel.llm.ptq.formats import compressed_tensors as compressed
from accel.llm.ptq.formats.quantization_config import NAMES, SAID, Said
from accel.llm.ptq.formats.saving import SAVE, SaveOverride, untie
from accel.quantization.activations import SCALE, is_static
from accel.quantization.module import QuantizedLinear
from accel.quantization.patch import exchange
from accel.saved import read_json, refuse_pickles, whole

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
# What `quantization_config` holds in the layouts of other libraries, and of what kind it is.
FIELDS: dict[str, type] = dict.fromkeys(("bits", "w_bit", "group_size", "q_group_size"), int)
FIELDS |= dict.fromkeys(("desc_act", "sym", "zero_point"), bool)


def load(folder: Path, dtype: str | torch.dtype, device: str | torch.device | None) -> nn.Module:
    """As `accel.load`."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json")
    refuse_pickles(folder)
    config, told = _config(folder)
    _files(folder)
    given = {"dtype": dtype} | ({} if device is None else {"device_map": device})
    if told is None or told.get("quant_method") != compressed.METHOD:
        return _loaded(folder, config=config, **given)
    with _of(folder / "config.json"):
        said = Said(told)
    linears = _linears(folder)
    for path, parts in linears.items():
        with _of(folder, path):
            _compare(said, path, parts)
    with _entered(linears, said) as method:
        config.quantization_config = {"quant_method": method}
        return _loaded(folder, config=config, **given)


def _config(folder: Path) -> tuple[PretrainedConfig, dict | None]:
    """The configuration and its `quantization_config`. Raises ValueError for what no library could read."""
    file = folder / "config.json"
    _check_said(file, read_json(file).get(SAID))
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # whatever classes of configurations raise for values of other kinds
        reason_of(error)
        raise ValueError(f"{file}: {_line(error)}") from error
    said = getattr(config, SAID, None)
    if said is None:
        return config, None
    _check_said(file, said)
    if said.get("quant_method") != compressed.METHOD:
        try:
            AutoQuantizationConfig.from_dict(copy.deepcopy(said))
        except (TypeError, ValueError, KeyError, AttributeError, NotImplementedError) as error:
            raise ValueError(f"{file}: {SAID} of {said.get('quant_method')}: {_line(error)}") from error
    return config, said


def _check_said(file: Path, said: Any) -> None:
    if said is None:
        return
    # bitsandbytes once wrote no method.
    named = isinstance(said, dict) and (
        said.get("load_in_8bit") or said.get("load_in_4bit") or said.get("quant_method")
    )
    if not named or not isinstance(said.get("quant_method", ""), str):
        raise ValueError(f"{file}: {SAID} is {said!r}, not an object with a text as quant_method")
    for name, kind in FIELDS.items():
        value = said.get(name)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise ValueError(f"{file}: {SAID}.{name} is {value!r}, not {NAMES[kind]}")


def _loaded(folder: Path, **given: Any) -> nn.Module:
    try:
        return whole(AutoModelForCausalLM, folder, **given).eval()
    except (RuntimeError, SafetensorError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder}: {_line(error)}") from error


def _line(error: Exception) -> str:
    """The first line of what it says, with its kind where that says nothing by itself."""
    line = (str(error).strip().splitlines() or [""])[0]
    return line if isinstance(error, ValueError | RuntimeError) and line else f"{type(error).__name__}: {line}"


@contextmanager
def _of(*places: object) -> Iterator[None]:
    """Inside, a ValueError says where."""
    try:
        yield
    except ValueError as error:
        raise ValueError(": ".join(map(str, (*places, error)))) from None


def _compare(said: Said, path: str, parts: dict[str, torch.Tensor]) -> None:
    """Raises ValueError for parts that do not fit one another, or what the configuration says of them."""
    weight = compressed.read(parts)
    if said.leaves(path):
        raise ValueError(f"{SAID}.ignore names it, and the file holds it quantized")
    group = said.group(path)
    if group is None:
        raise ValueError(f"no group of {SAID}.config_groups names it, and the file holds it quantized")
    ordered = compressed.ORDER in parts
    if reason := group.contradicts(weight, parts["weight_scale"], ordered):
        raise ValueError(reason)
    if ordered and group.activations:
        raise ValueError("its columns are in an order of their own, and its inputs rounded: not read together")


def _linears(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """By path, the parts of every quantized linear, as the files' headers tell: tensors without memory, but shapes."""
    linears: dict[str, dict[str, torch.Tensor]] = {}
    for file, expected in _files(folder).items():
        try:
            with safe_open(file, framework="pt") as opened:
                names = set(opened.keys())
                for name in sorted(names):
                    path, _, part = name.rpartition(".")
                    if part in (*compressed.NAMES, SCALE):
                        linears.setdefault(path, {})[part] = _described(opened, name, part)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is damaged: {str(error).splitlines()[0]}") from None
        if lacking := expected - names:
            raise ValueError(f"{file} lacks {min(lacking)}, which the index says it holds")
    return {path: parts for path, parts in linears.items() if parts.keys() - {"weight", SCALE}}


def _described(opened: Any, name: str, part: str) -> torch.Tensor:
    if part == "weight_shape":
        return opened.get_tensor(name)
    header = opened.get_slice(name)
    if header.get_dtype() not in DTYPES:
        raise ValueError(f"{name} is of dtype {header.get_dtype()}, which is not read")
    return torch.empty(header.get_shape(), dtype=DTYPES[header.get_dtype()], device="meta")


def _files(folder: Path) -> dict[Path, set[str]]:
    """The files of weights, with the names that the index says they hold."""
    if (folder / INDEX).is_file():
        try:
            places = json.loads((folder / INDEX).read_text())["weight_map"]
            files: dict[Path, set[str]] = {}
            for name, file in places.items():
                files.setdefault(folder / file, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{folder / INDEX} is damaged") from None
    else:
        files = {folder / WEIGHTS: set()}
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing")
    return files


class Held(nn.Module):
    """Takes the parts of a linear as they are in the file."""

    bias: nn.Parameter | None

    def __init__(self, parts: dict[str, torch.Tensor], bias: nn.Parameter | None):
        super().__init__()
        for name, tensor in parts.items():
            self.register_parameter(name, nn.Parameter(tensor.to("meta"), requires_grad=False))
        self.register_parameter("bias", bias)


@contextmanager
def _entered(linears: dict[str, dict[str, torch.Tensor]], said: Said) -> Iterator[str]:
    """Inside, transformers knows a way of loading under the name it gives, and calls it for these linears."""
    name = f"accel-{uuid.uuid4().hex}"

    class Method(QuantizationConfigMixin):
        def __init__(self, quant_method: str = name, **kwargs: Any) -> None:
            self.quant_method = quant_method

    class Loader(HfQuantizer):
        is_trainable = False

        def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
            return True

        def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
            head = head_path(model)
            for path, parts in linears.items():
                _replace(model, path, parts)
            if head in linears:
                untie(model.config)
                model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)

        def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> nn.Module:
            self.remove_quantization_config(model)
            _finish(model, said)
            return model

    AUTO_QUANTIZATION_CONFIG_MAPPING[name], AUTO_QUANTIZER_MAPPING[name] = Method, Loader
    try:
        yield name
    finally:
        del AUTO_QUANTIZATION_CONFIG_MAPPING[name], AUTO_QUANTIZER_MAPPING[name]


def _replace(model: PreTrainedModel, path: str, parts: dict[str, torch.Tensor]) -> None:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    if not isinstance(module, nn.Linear):
        raise ValueError(f"the file quantizes {path}, which is no linear layer of a {type(model).__name__}")
    shape = compressed.read(parts).shape
    if shape != tuple(module.weight.shape):
        raise ValueError(f"{path} is {shape} in the file and {tuple(module.weight.shape)} in the model")
    model.set_submodule(path, Held(parts, module.bias))


def _finish(model: PreTrainedModel, said: Said) -> None:
    pairs: list[tuple[nn.Module, nn.Linear]] = []
    head, ordered = model.get_output_embeddings(), []
    for path, module in model.named_modules():
        if type(module) is Held:
            held = {name: p.detach() for name, p in module._parameters.items() if p is not None}
            quantized, bias = compressed.read(held, taken=True), module.bias
            module._parameters.clear()  # what became another tensor is gone before the next does
            if not bool(quantized.scales.isfinite().all()):
                raise ValueError(f"{path}: NaN or Inf among its scales")
            with _of(path):
                if compressed.ORDER in held:
                    ordered.append(path)
                    made = _plain(compressed.by_order(quantized, held[compressed.ORDER], model.dtype), bias)
                else:
                    group = None if module is head else said.group(path)
                    said_of = None if group is None else group.activations
                    made = _quantized(quantized, bias, model.dtype, held, compressed.rounding_of(said_of or {}))
            pairs.append((module, made))
    exchange(model, pairs)
    if len(pairs) > len(ordered):
        vars(model)[SAVE] = SaveOverride(model)
    if ordered:
        warnings.warn(
            f"{len(ordered)} linear layers, {ordered[0]} the first, have columns in an order of their own "
            f"(actorder 'group'): they are loaded in {model.dtype}, not in fewer bits",
            stacklevel=2,
        )


def _plain(weight: torch.Tensor, bias: nn.Parameter | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.register_parameter("bias", bias)
    return linear


def _quantized(
    quantized: Quantized, bias: nn.Parameter | None, dtype: torch.dtype, held: dict, activations: str | None
) -> QuantizedLinear:
    """held: the parts of the file. activations: as it says; they stay as they are where the numbers are no match."""
    scheme = compressed.scheme_of(quantized)
    scale = compressed.input_scale(held) if is_static(activations) else None
    rounding = scheme if activations is None else scheme.rounding(activations, scale is not None)
    scheme = scheme if isinstance(rounding, str) else rounding
    return QuantizedLinear(quantized, bias, dtype, scheme, input_scale=scale)
