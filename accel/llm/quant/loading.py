"""A folder in the layout of compressed-tensors, loaded straight into quantised linears: no weight is ever whole."""

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from accel.llm.quant import compressed
from accel.llm.quant.linears import head_path
from accel.llm.quant.saving import SAVE, Saving, untie
from accel.quant.activations import SCALE, is_static
from accel.quant.module import QuantisedLinear
from accel.quant.swap import exchange
from accel.saved import refuse_pickles

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


def load(folder: Path, dtype: str | torch.dtype, device: str | torch.device | None) -> nn.Module:
    """As `accel.load`."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json")
    refuse_pickles(folder)
    config = AutoConfig.from_pretrained(folder)
    said = getattr(config, "quantization_config", None)
    given = {"dtype": dtype, "use_safetensors": True} | ({} if device is None else {"device_map": device})
    if said is None or said.get("quant_method") != compressed.METHOD:
        return AutoModelForCausalLM.from_pretrained(folder, **given).eval()
    linears = _linears(folder)
    for path, parts in linears.items():
        try:
            compressed.read(parts)
        except ValueError as error:
            raise ValueError(f"{folder}: {path}: {error}") from None
    with _entered(linears, said) as method:
        config.quantization_config = {"quant_method": method}
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                folder, config=config, output_loading_info=True, **given
            )
        except (RuntimeError, SafetensorError) as error:
            raise ValueError(f"{folder}: {str(error).strip().splitlines()[0]}") from error
    if found["missing_keys"]:
        raise ValueError(f"{folder} lacks {min(found['missing_keys'])}, which the model needs")
    return model.eval()


def _linears(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """By path, the parts of every quantised linear, as the files' headers tell: tensors without memory, but shapes."""
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


def _described(opened, name: str, part: str) -> torch.Tensor:
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

    def __init__(self, parts: dict[str, torch.Tensor], bias: nn.Parameter | None):
        super().__init__()
        for name, tensor in parts.items():
            self.register_parameter(name, nn.Parameter(tensor.to("meta"), requires_grad=False))
        self.register_parameter("bias", bias)


@contextmanager
def _entered(linears: dict[str, dict[str, torch.Tensor]], said: dict) -> Iterator[str]:
    """Inside, transformers knows a way of loading under the name it gives, and calls it for these linears."""
    name = f"accel-{uuid.uuid4().hex}"

    class Method(QuantizationConfigMixin):
        def __init__(self, quant_method: str = name, **kwargs):
            self.quant_method = quant_method

    class Loader(HfQuantizer):
        is_trainable = False

        def is_serializable(self, *args, **kwargs) -> bool:
            return True

        def _process_model_before_weight_loading(self, model: nn.Module, **kwargs) -> None:
            head = head_path(model)
            for path, parts in linears.items():
                _replace(model, path, parts)
            if head in linears:
                untie(model.config)
                model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)

        def _process_model_after_weight_loading(self, model: nn.Module, **kwargs) -> nn.Module:
            self.remove_quantization_config(model)
            _finish(model, said)
            return model

    AUTO_QUANTIZATION_CONFIG_MAPPING[name], AUTO_QUANTIZER_MAPPING[name] = Method, Loader
    try:
        yield name
    finally:
        del AUTO_QUANTIZATION_CONFIG_MAPPING[name], AUTO_QUANTIZER_MAPPING[name]


def _replace(model: nn.Module, path: str, parts: dict[str, torch.Tensor]) -> None:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    if not isinstance(module, nn.Linear):
        raise ValueError(f"the file quantises {path}, which is no linear layer of a {type(model).__name__}")
    shape = compressed.read(parts).shape
    if shape != tuple(module.weight.shape):
        raise ValueError(f"{path} is {shape} in the file and {tuple(module.weight.shape)} in the model")
    model.set_submodule(path, Held(parts, module.bias))


def _finish(model: nn.Module, said: dict) -> None:
    pairs, head = [], model.get_output_embeddings()
    for path, module in model.named_modules():
        if type(module) is Held:
            held = {name: p.detach() for name, p in module._parameters.items() if p is not None}
            quantised, bias = compressed.read(held, taken=True), module.bias
            module._parameters.clear()  # what became another tensor is gone before the next does
            if not bool(quantised.scales.isfinite().all()):
                raise ValueError(f"{path}: NaN or Inf among its scales")
            scheme = compressed.scheme_of(quantised)
            activations = None if module is head else compressed.activations_of(said, path)
            scale = None
            if is_static(activations):
                try:
                    scale = compressed.input_scale(held)
                except ValueError as error:
                    raise ValueError(f"{path}: {error}") from None
            rounding = scheme if activations is None else scheme.rounding(activations, scale is not None)
            scheme = scheme if isinstance(rounding, str) else rounding
            pairs.append((module, QuantisedLinear(quantised, bias, model.dtype, scheme, input_scale=scale)))
    exchange(model, pairs)
    if pairs:
        vars(model)[SAVE] = Saving(model)
