"""Layers that send each token to experts of a router's choice, compared by themselves.

Where two experts are nearly equal to the router, rounding decides, in stock as in ours: what such a token becomes has
little in common, and tokens after it attend to it. The whole model is therefore compared with the routing fixed, see
`logits`. Here is what that does not show, and which layer it is: each routed layer on equal inputs, where both choose
alike, each expert on its own, and each router by its median token.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from accel_kernels.moe.experts import MOST_TOKENS
from torch import nn

from accel.in_flight import listening
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.routing import routed_modules
from accel.llm.moe.experts import ExpertsForward
from accel.llm.moe.router import RouterForward
from accel.llm.moe.router_formula import INDEX, LOGITS, SHARE
from accel.patching.rule import ForwardPatch
from accel.planning.plan import Plan
from accel.quantization.experts import QuantizedExperts
from accel.tolerances import FAR, FLOOR, MEDIAN, SUM_UNITS
from accel.verification.metrics import Quality
from accel.verification.model_record import ModelRecord, ModelRecorder


def row_rms(wanted: list[torch.Tensor], got: list[torch.Tensor], share: float) -> float:
    """Error of one row by the size of the median row, of the worst of pairs (rows, columns).

    share: of rows that are nearer, which is which row that is.
    """
    pairs = [(a.double().cpu(), b.double().cpu()) for a, b in zip(wanted, got, strict=True)]
    found = []
    for a, b in pairs:
        errors = (b - a).norm(dim=-1)
        one = errors.sort().values[int(share * (len(errors) - 1))] if errors.isfinite().all() else errors.max()
        found.append(one / a.norm(dim=-1).median().clamp_min(1e-30))
    return torch.stack(found).max().item()


def far(wanted: list[torch.Tensor], got: list[torch.Tensor]) -> int:
    """How many rows are much further off than the median one."""
    errors = [(b.double() - a.double()).norm(dim=-1) for a, b in zip(wanted, got, strict=True)]
    return sum(int((error > FAR * error.median()).sum()) for error in errors)


def routed(plan: Plan) -> dict[str, nn.Module]:
    """By path, modules called as a whole: without one first projection, or with stacks of experts not understood."""
    forward = decoder_forward(plan)
    wholes = set() if forward is None else set(routed_modules(forward))
    paths = {path: module for path, module in plan.root.named_modules() if module in wholes}
    inside = {child for module in wholes for child in module.modules()}
    stacks = [module for module in plan.root.modules() if module not in inside and _stacked(module)]
    return paths | {path: module for path, module in plan.root.named_modules() if module in stacks}


def decoder_forward(plan: Plan) -> DecoderForward | None:
    """The fused forward of the whole model, if it has one."""
    forwards = (patch.value for patch in plan.patches if isinstance(patch, ForwardPatch))
    return next((forward for forward in forwards if isinstance(forward, DecoderForward)), None)


def _stacked(module: nn.Module) -> bool:
    """Whether it holds a matrix for every expert, of at least two kinds."""
    if type(module) is QuantizedExperts:
        return True
    stacks = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
    return len(stacks) > 1 and len({p.shape[0] for p in stacks}) == 1


@dataclass
class RoutedLayer(ModelRecord):
    """A routed layer on what it was given, a prompt and a step: against stock, with one routing for both.

    choices: what stock's routers chose, for each input in turn; none where ours are stock's, and choose by the same
    numbers.
    """

    choices: list[dict[nn.Module, list[tuple]]] = field(default_factory=list)
    calls: int = 0

    def note_choices(self, routers: list[nn.Module]) -> None:
        for args, kwargs in self.inputs:
            found: dict[nn.Module, list[tuple]] = {router: [] for router in routers}
            hooks = (
                (router, lambda router, given, output, found=found: found[router].append(output)) for router in routers
            )
            with listening(hooks):
                self.module(*args, **kwargs)
            self.choices.append(found)

    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        if not self.choices:
            return super().run(module, args, kwargs)
        self.calls += 1
        noted = self.choices[(self.calls - 1) % len(self.choices)]
        waiting = {router: iter(outputs) for router, outputs in noted.items()}

        def repeat(router: nn.Module, given: tuple, output: object) -> tuple:
            return tuple(one.clone() for one in next(waiting[router]))

        with listening((router, repeat) for router in waiting):
            return super().run(module, args, kwargs)

    @property
    def allowance(self) -> float:
        return max(FLOOR, SUM_UNITS * self.unit)

    def measure(self) -> None:
        """In full precision the router may choose otherwise."""


class ExpertsRecord(ModelRecord):
    """Each expert on a token, by itself; every token is compared by itself."""

    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        return [row for out in super().run(module, args, kwargs) for row in out]


@dataclass
class RouterRecord(ModelRecord):
    """A router on tokens: its logits, the shares, and the logits of what it chose. names: of what it returns.

    By the median token, and in order of size: of neighbors rounding may take one or the other.
    """

    names: tuple[str, ...] = ()

    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        found = dict(zip(self.names, super().run(module, args, kwargs), strict=True))
        compared = [found[SHARE].sort(descending=True).values]
        if LOGITS in found:
            compared += [found[LOGITS], found[LOGITS].gather(1, found[INDEX]).sort(descending=True).values]
        return compared

    def apart(self, wanted: list[torch.Tensor], got: list[torch.Tensor]) -> float:
        return row_rms(wanted, got, MEDIAN)


@dataclass
class RoutedLayers:
    """Records of the routed layers of a plan, and of the experts and routers in them that are fused."""

    plan: Plan
    layers: dict[str, RoutedLayer] = field(default_factory=dict)
    experts: dict[str, ExpertsRecord] = field(default_factory=dict)
    routers: dict[str, RouterRecord] = field(default_factory=dict)
    note: str = ""

    def recorder(self) -> ModelRecorder:
        return ModelRecorder(routed(self.plan))

    def keep(self, recorder: ModelRecorder) -> None:
        """While the model computes as stock does: what its layers were given, and what it makes of that."""
        paths = {module: path for path, module in self.plan.root.named_modules()}
        fused = {paths[p.owner]: p.value for p in self.plan.patches if isinstance(p, ForwardPatch) and p.owner in paths}
        records, self.note = recorder.records(), recorder.note()
        for path, record in records.items():
            self.layers[path] = RoutedLayer(record.module, record.inputs, record.outputs)
            args, kwargs = record.inputs[0]
            tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
            x = next(one for one in tensors if one.is_floating_point()).flatten(0, -2)
            inside = {place: one for place, one in fused.items() if f"{place}.".startswith(f"{path}.")}
            for place, one in inside.items():
                if isinstance(one, ExpertsForward):
                    self.experts[place] = _each(one.module, one.formula.weights(one.module).experts, x)
                elif isinstance(one, RouterForward) and (router := _router(one, x)) is not None:
                    self.routers[place] = router
            routers = [one.module for one in inside.values() if isinstance(one, RouterForward)]
            if routers:
                self.layers[path].note_choices(routers)

    def judge(self, seed: int) -> dict[str, Quality]:
        """The worst of each kind, once the model is optimized again."""
        named: dict[str, Mapping[str, ModelRecord]] = {
            "routed layers": self.layers,
            "each expert": self.experts,
            "each router": self.routers,
        }
        judged = {name: {path: one.judge(seed) for path, one in found.items()} for name, found in named.items()}
        return {name: _worst(found) for name, found in judged.items() if found}


def _each(module: nn.Module, experts: int, x: torch.Tensor) -> ExpertsRecord:
    index = torch.arange(experts, device=x.device)[:, None]
    x = x[torch.arange(experts, device=x.device) % len(x)].contiguous()
    ones = torch.ones(experts, 1, device=x.device, dtype=x.dtype)
    # Few tokens are multiplied one by one, more are grouped: both ways are looked at.
    pieces = list(zip(*(tensor.split(MOST_TOKENS) for tensor in (x, index, ones)), strict=True))
    pieces.append(tuple(tensor.repeat(MOST_TOKENS // experts + 1, 1) for tensor in (x, index, ones)))
    record = ExpertsRecord(module, [(piece, {}) for piece in pieces])
    record.repeat(0)
    record.measure()
    return record


def _router(forward: RouterForward, x: torch.Tensor) -> RouterRecord | None:
    given, formula = forward.call_of(x), forward.formula(x)
    if given is None or formula is None:
        return None
    record = RouterRecord(forward.module, [(given, {})], names=formula.outputs)
    record.repeat(0)
    record.measure()
    return record


def _worst(found: dict[str, Quality]) -> Quality:
    def measure(item: tuple[str, Quality]) -> tuple[bool, float]:
        quality = item[1]
        error, allowed = quality.error, quality.allowed
        share = math.inf if error is None or allowed is None else error / allowed
        return not quality.finite or share != share, share

    path, quality = max(found.items(), key=measure)
    note = f"the worst of {len(found)}, {path}"
    return replace(quality, note="; ".join(filter(None, (note, quality.note))))
