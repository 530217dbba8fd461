"""Layers that send each token to experts of a router's choice, compared by themselves.

Where two experts are nearly equal to the router, rounding decides, in stock as in ours: what such a token becomes has
little in common, and tokens after it attend to it. How many there are on either side is chance. A model with routers is
therefore judged by its median token, and what the median may miss here: each routed layer on equal inputs, where both
choose alike, and each expert on its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from accel_kernels.moe.experts import MOST_TOKENS
from torch import nn

from accel.llm.generation.decoder import DecoderForward
from accel.llm.runtime.experts import ExpertsForward
from accel.patching.patch import ForwardPatch
from accel.planning.plan import Plan
from accel.quantization.experts import QuantizedExperts
from accel.tolerances import FAR, FLOOR, SUM_UNITS
from accel.verification.metrics import Quality
from accel.verification.model_record import ModelRecord, ModelRecorder


def median_rms(wanted: list[torch.Tensor], got: list[torch.Tensor]) -> float:
    """Error of the median row by the size of the median row, of the worst of pairs (rows, columns)."""
    pairs = [(a.double().cpu(), b.double().cpu()) for a, b in zip(wanted, got, strict=True)]
    found = [(b - a).norm(dim=-1).median() / a.norm(dim=-1).median().clamp_min(1e-30) for a, b in pairs]
    return torch.stack(found).max().item()


def far(wanted: list[torch.Tensor], got: list[torch.Tensor]) -> int:
    """How many rows are much further off than the median one."""
    errors = [(b.double() - a.double()).norm(dim=-1) for a, b in zip(wanted, got, strict=True)]
    return sum(int((error > FAR * error.median()).sum()) for error in errors)


def routed(plan: Plan) -> dict[str, nn.Module]:
    """By path, the modules that are called as a whole since they choose: of layers without one first projection; of
    layers that are not understood what holds a stack of experts.
    """
    patches = [patch for patch in plan.patches if isinstance(patch, ForwardPatch)]
    layers = [layer for patch in patches if isinstance(patch.value, DecoderForward) for layer in patch.value.layers]
    wholes = {layer.module.get_submodule(layer.spec.mlp.whole) for layer in layers if not layer.spec.mlp.first}
    paths = {path: module for path, module in plan.root.named_modules() if module in wholes}
    inside = {child for module in wholes for child in module.modules()}
    stacks = [module for module in plan.root.modules() if module not in inside and _stacked(module)]
    return paths | {path: module for path, module in plan.root.named_modules() if module in stacks}


def _stacked(module: nn.Module) -> bool:
    """Whether it holds a matrix for every expert, of at least two kinds."""
    if type(module) is QuantizedExperts:
        return True
    stacks = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
    return len(stacks) > 1 and len({p.shape[0] for p in stacks}) == 1


class Layer(ModelRecord):
    """A routed layer on what it was given, a prompt and a step: against stock, which chooses by the same numbers."""

    @property
    def allowance(self) -> float:
        return max(FLOOR, SUM_UNITS * self.unit)

    def measure(self) -> None:
        """In full precision the router may choose otherwise."""


class Experts(ModelRecord):
    """Each expert on a token, by itself; every token is compared by itself."""

    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        return [row for out in super().run(module, args, kwargs) for row in out]


@dataclass
class Layers:
    """Records of the routed layers of a plan, and of the experts in them that are fused."""

    plan: Plan
    layers: dict[str, Layer] = field(default_factory=dict)
    experts: dict[str, Experts] = field(default_factory=dict)
    note: str = ""

    def recorder(self) -> ModelRecorder:
        return ModelRecorder(routed(self.plan))

    def keep(self, recorder: ModelRecorder) -> None:
        """While the model computes as stock does: what its layers were given, and what it makes of that."""
        fused = [
            one for one in self.plan.patches if isinstance(one, ForwardPatch) and isinstance(one.value, ExpertsForward)
        ]
        paths = {module: path for path, module in self.plan.root.named_modules()}
        records, self.note = recorder.records(), recorder.note()
        for path, record in records.items():
            self.layers[path] = Layer(record.module, record.inputs, record.outputs)
            x = next(leaf for leaf in _tensors(record.inputs[0]) if leaf.is_floating_point()).flatten(0, -2)
            for patch in fused:
                place = paths.get(patch.owner)  # none of quantized ones, while the originals are there
                if place is not None and f"{place}.".startswith(f"{path}."):
                    self.experts[place] = _each(patch.owner, patch.value.formula.weights(patch.owner).experts, x)

    def judge(self, seed: int) -> dict[str, Quality]:
        """The worst of each kind, once the model is optimized again."""
        named: dict[str, Mapping[str, ModelRecord]] = {"routed layers": self.layers, "each expert": self.experts}
        judged = {name: {path: one.judge(seed) for path, one in found.items()} for name, found in named.items()}
        return {name: _worst(found) for name, found in judged.items() if found}


def _each(module: nn.Module, experts: int, x: torch.Tensor) -> Experts:
    index = torch.arange(experts, device=x.device)[:, None]
    x = x[torch.arange(experts, device=x.device) % len(x)].contiguous()
    ones = torch.ones(experts, 1, device=x.device, dtype=x.dtype)
    # Few tokens are multiplied one by one, more are grouped: both ways are looked at.
    pieces = [*zip(*(tensor.split(MOST_TOKENS) for tensor in (x, index, ones)), strict=True), _often(x, index, ones)]
    record = Experts(module, [(piece, {}) for piece in pieces])
    record.repeat(0)
    record.measure()
    return record


def _often(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same tokens so many times that they are grouped."""
    return tuple(tensor.repeat(MOST_TOKENS // len(tensor) + 1, 1) for tensor in tensors)


def _worst(found: dict[str, Quality]) -> Quality:
    def measure(item: tuple[str, Quality]) -> tuple[bool, float]:
        quality = item[1]
        error, allowed = quality.error, quality.allowed
        share = math.inf if error is None or allowed is None else error / allowed
        return not quality.finite or share != share, share

    path, quality = max(found.items(), key=measure)
    note = f"the worst of {len(found)}, {path}"
    return replace(quality, note="; ".join(filter(None, (note, quality.note))))


def _tensors(given: tuple[tuple, dict]) -> list[torch.Tensor]:
    args, kwargs = given
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
