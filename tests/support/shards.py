"""What ranks are told to do with a folder of divided weights. Run by `support.ranks.RankPool`."""

import torch
import torch.distributed as dist
from torch import nn

import accel
from accel.errors import logged
from accel.parallel.sharded_layers import divided, local
from accel.quantization.module import QuantizedLinear
from support.llm.parallel.ranks import load, written

PLACE = {"_name_or_path": None}  # the folder it was loaded from


def differing(whole: str, parts: str, size: int) -> list[str]:
    """What is not the same in a model loaded from parts as in one that transformers divided: weights and their places,
    buffers, closures, settings. parts: a folder, or one for each rank, whose number stands in it as {}.
    """
    stock, ours = load(whole, {"tp_size": size}), accel.load(parts.format(dist.get_rank()))
    found = [name for name, one in stock.named_parameters() if not _same(one, ours.get_parameter(name))]
    found += [name for name, one in stock.named_buffers() if not torch.equal(one, ours.get_buffer(name))]
    found += [path for path, module in stock.named_modules() if _closed(module) != _closed(ours.get_submodule(path))]
    kinds = [{path: type(module) for path, module in model.named_modules()} for model in (stock, ours)]
    tied = [len(list(model.parameters())) for model in (stock, ours)]
    settings = [_settings(model) for model in (stock, ours)]
    return found + [str(pair) for pair in (kinds, tied, settings) if pair[0] != pair[1]]


def _settings(model: nn.Module) -> tuple:
    return (
        model.generation_config.to_dict(),
        model.config.to_dict() | PLACE,
        model.dtype,
        model.training,
        model._tp_size,
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if divided(one) != divided(other):
        return False
    if divided(one) and (one.placements != other.placements or one.shape != other.shape):
        return False
    return torch.equal(local(one), local(other)) and one.requires_grad == other.requires_grad


def _closed(module: nn.Module) -> str | None:
    forward = vars(module).get("forward")
    return None if forward is None else forward.__qualname__


def write(parts: str, calls: list[dict]) -> dict:
    """As `ranks.written`, of a model loaded from parts; and how many linears are quantized, and bytes on this rank."""
    model = accel.load(parts)
    quantized = sum(type(module) is QuantizedLinear for module in model.modules())
    held = sum(local(one).nbytes for one in (*model.parameters(), *model.buffers()))
    return written(model, calls, {}) | {"quantized": quantized, "bytes": held}


def refused(parts: str, call: str = "", device: str | None = None) -> str:
    """What accel.load, or a method of the model that it loaded, says as it raises ValueError."""
    try:
        model = accel.load(parts, device=device)
        if call:
            getattr(model, call)(f"{parts}-again")
    except ValueError as error:
        return logged(error)
    return "nothing"
