"""A model with quantized linears, saved: `save_pretrained` writes the layout of compressed-tensors."""

import copy
import warnings
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from accel_kernels.gemm.quantized_weight import PARTS as WEIGHT_PARTS
from torch import nn
from transformers import Conv1D, PretrainedConfig, PreTrainedModel

from accel.libraries.adapters import ADAPTED, BASE
from accel.llm.ptq.formats.quantization_config import PATTERN
from accel.parallel.sharded_layers import ranks_of
from accel.patching.owner import InstanceMethod
from accel.patching.rule import Patch
from accel.quantization.activations import COLUMNS, FIXED, ORDER, SCALE
from accel.quantization.experts import QuantizedExperts
from accel.quantization.formats import compressed_tensors as compressed
from accel.quantization.formats.repacked import held_tensors
from accel.quantization.module import QuantizedLinear
from accel.quantization.scheme import Scheme

SAVE = "save_pretrained"
TIED = "tie_word_embeddings"
OTHER = "compressed-tensors has no layout for their format"
TURNED = "their class holds weights (in, out), which compressed-tensors cannot express"
PARTS = (*WEIGHT_PARTS, SCALE, COLUMNS, ORDER)
STACKED = "compressed-tensors has no stacks of matrices; accel.optimize(weights=...) rounds them again"
APART = "where others have zero points, transformers reads all by the scheme of those"


class SaveOverride(InstanceMethod):
    """Stands in `vars(model)["save_pretrained"]` while linears are quantized; takes what the model's own takes.

    Writes safetensors and a config.json that stock transformers and other engines load (see `compressed`). A linear
    whose own class holds its weight (in, out), as GPT-2's, has no place in that layout, nor have stacks of experts:
    these weights are written as the numbers stand for, in the model's dtype, which a warning says.
    """

    name, shared = SAVE, True

    def __init__(self, model: PreTrainedModel):
        self.model = model

    @property
    def owner(self) -> PreTrainedModel:
        return self.model

    def call(self, save_directory: Any, *args: Any, state_dict: dict | None = None, **kwargs: Any) -> None:
        model = self.model
        own = getattr(type(model), SAVE)
        names = state_dict if state_dict is not None else model.state_dict()
        held, mixtures = _quantized(model, names)
        as_it_is = not mixtures and all(module.arrived is not None for module in held.values())
        if getattr(model, ADAPTED, False) or as_it_is:  # an adapter alone, given weights, those of another library
            own(model, save_directory, *args, state_dict=state_dict, **kwargs)
            return
        if (ranks := ranks_of(model)) is not None:
            raise ValueError(
                f"this process holds its part of the quantized weights alone, of {ranks.size}: save the model where "
                "it is whole, and divide the folder by accel shard"
            )
        if inside := [path for path in (*held, *mixtures) if BASE in path.split(".")]:
            raise ValueError(
                f"{inside[0]} is inside an adapter; save the adapter by itself, or unload it before the model is saved"
            )
        # A copy that shares all but its configuration, which stays as the user has it. A quantizer would take the
        # state dict of the model itself.
        twin = copy.copy(model)
        for name in (SAVE, "hf_quantizer"):
            vars(twin).pop(name, None)
        if reason := mixed(model, names):
            raise ValueError(f"{reason}; after accel.restore(model) all is saved as it came")
        heads = {path for path, module in held.items() if module is model.get_output_embeddings()}
        written, schemes = _written(_in_parts(names, held), held, heads)
        written |= _stacks(written, mixtures)
        twin.config = copy.deepcopy(model.config)
        vars(twin.config).pop("quantization_config", None)
        if heads:
            untie(twin.config)
        if schemes:
            others = ignored(model, schemes)
            twin.config.quantization_config = compressed.config(schemes, others, heads & schemes.keys())
            if any(name.startswith(PATTERN) for name in others):
                # Taken apart, transformers would read experts as quantized ones, and find none.
                kwargs.setdefault("save_original_format", False)
        own(twin, save_directory, *args, state_dict=written, **kwargs)


def untie(config: PretrainedConfig) -> None:
    """Says in a configuration that the output head has a weight of its own, not that of the embeddings."""
    for one in (config, config.get_text_config()):
        if getattr(one, TIED, False):
            setattr(one, TIED, False)


def guard(model: PreTrainedModel) -> Patch | None:
    """The patch that installs `SaveOverride`; None where it is installed already."""
    return Patch(model, SAVE, SaveOverride(model)) if SAVE not in vars(model) else None


def _in_parts(names: dict, held: dict[str, QuantizedLinear]) -> dict[str, torch.Tensor]:
    """The state dict with parts of ours for linears that came quantized, and have others beside them that did not."""
    came = {path: module for path, module in held.items() if module.arrived is not None}
    others = tuple(f"{path}." for path in came)
    found = {name: tensor for name, tensor in names.items() if not name.startswith(others)}
    for path, module in came.items():
        found |= {f"{path}.{name}": tensor.detach() for name, tensor in held_tensors(module).items()}
    return found


def _quantized(model: PreTrainedModel, names: dict) -> tuple[dict[str, QuantizedLinear], dict[str, QuantizedExperts]]:
    """Quantized linears, and experts, by every path they have among the names."""
    linears, mixtures = {}, {}
    for path, module in model.named_modules(remove_duplicate=False):
        part = getattr(getattr(module, "arrived", None), "name", "data")
        if type(module) is QuantizedLinear and f"{path}.{part}" in names:
            linears[path] = module
        elif type(module) is QuantizedExperts and f"{path}.{next(iter(module.formats))}_scales" in names:
            mixtures[path] = module
    return linears, mixtures


def mixed(model: PreTrainedModel, names: dict, more: Iterable[str] = ()) -> str | None:
    """Why a state dict cannot be saved with what is ours in it, and at these paths too."""
    ours = tuple(f"{path}." for path in chain(*_quantized(model, names), more))
    other = next((name for name, one in names.items() if _packed(one) and not name.startswith(ours)), None)
    return other and f"{other} is in the format of another library, and {ours[0]}weight in ours: no folder holds both"


def _packed(tensor: torch.Tensor) -> bool:
    """Whether it is a weight, or a part of one, in a format that a plain model has no place for."""
    numbers = tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool
    return numbers or (tensor.dtype == torch.int32 and tensor.dim() > 1) or hasattr(tensor, "__tensor_flatten__")


def _stacks(written: dict[str, torch.Tensor], mixtures: dict[str, QuantizedExperts]) -> dict[str, torch.Tensor]:
    """The stacks of experts, on the CPU: on a GPU there may be no room for them. Their numbers are taken out."""
    found: dict[str, torch.Tensor] = {}
    for path, module in mixtures.items():
        for name in module.formats:
            parts = (written.pop(f"{path}.{name}_{part}", None) for part in WEIGHT_PARTS)
            stack = module.written(name, module.read(name, *parts), module.dtype).contiguous()
            found[f"{path}.{name}"] = stack.cpu()
    if found:
        _warn(STACKED, "stacks of experts", list(found))
    return found


def _warn(reason: str, kind: str, paths: list[str]) -> None:
    warnings.warn(
        f"{len(paths)} {kind}, {paths[0]} the first, are saved in the model's dtype, not in fewer bits: {reason}; "
        "their values are the quantized ones",
        stacklevel=5,
    )


def _written(names: dict, held: dict[str, QuantizedLinear], heads: set[str]) -> tuple[dict[str, torch.Tensor], dict]:
    """What the file is to hold, and the scheme of each linear that stays quantized in it."""
    written, unsaid = dict(names), 0
    schemes: dict[str, Scheme] = {}
    whole: dict[str, list[str]] = {}
    seen: set[int] = set()
    shifted = {module.scheme for module in held.values() if not (module.transposed or module.scheme.symmetric)}
    for path, module in held.items():
        data, scales, zeros, inputs, columns, _ = (written.pop(f"{path}.{name}", None) for name in PARTS)
        quantized, reason = module.read(data, scales, zeros), None
        if not module.format.saved:
            reason = OTHER
        elif module.transposed:
            reason = TURNED
        elif path in heads and shifted - {module.scheme}:
            reason = APART
        if reason is not None:
            whole.setdefault(reason, []).append(path)
            weight = quantized.dequantized(module.dtype)
            found = {"weight": weight.t().contiguous() if module.transposed else weight}
        else:
            schemes[path] = module.scheme
            found = compressed.parts(quantized, compressed.format_of(module.scheme))
            fixed = FIXED.get(module.scheme.activations)
            if fixed == SCALE:
                found[SCALE] = inputs.to(module.dtype)
            elif fixed == COLUMNS:
                unsaid += columns is not None
        if id(module) in seen:  # the same layer in two places, of which stock's has two
            found = {name: tensor.clone() for name, tensor in found.items()}
        seen.add(id(module))
        written.update({f"{path}.{name}": tensor for name, tensor in found.items()})
    if unsaid:
        warnings.warn(
            f"columns that calibration fixed in the inputs of {unsaid} linear layers are not saved, nor that these are "
            "rounded: no file of compressed-tensors says such a thing",
            stacklevel=4,
        )
    for reason, paths in whole.items():
        _warn(reason, "linear layers", paths)
    return written, schemes


def ignored(model: PreTrainedModel, schemes: dict) -> list[str]:
    """Entries of `ignore`: linears that are not quantized, and patterns for stacks of matrices, as of experts."""
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        if path in schemes:
            continue
        if isinstance(module, nn.Linear | Conv1D):
            found.append(path)
        elif path and (type(module) is QuantizedExperts or any(p.dim() == 3 for p in module.parameters(recurse=False))):
            found.append(rf"{PATTERN}.*\.{path.rpartition('.')[2]}(\.|$)")
    return list(dict.fromkeys(found))
