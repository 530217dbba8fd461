"""The experts of a mixture: one pass over what the router chose instead of a loop, for any number of tokens.

How a module of stacked experts computes is found by trying the formulas that fit what it holds, simplest first.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
from accel_kernels import SharedExpert
from accel_kernels.moe.weights import PLACE_BYTES, ExpertWeights, Gating
from torch import Tensor, nn

from accel.llm.parts.activation import activation_name
from accel.llm.recording.implementation import foreign_experts
from accel.parallel.sharded_layers import Sharding, expert_sharding, local
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.guard import Parts, changed_since
from accel.patching.probe import example
from accel.patching.rule import Context, Match, Site, Skip
from accel.patching.structure import meta_weights, placement, twin
from accel.quantization.experts import QuantizedExperts, stock_parameters

PROBED = 3  # tokens
ORDINARY = 1.0  # root mean square of gates and ups: smaller, or larger, every activation is as good as straight
SEEN = 8.0  # how large gates and ups are made at least where a bend far from zero is looked for
BEYOND = 4.0  # in times of the largest number that the module holds, which may be where they are clamped


@dataclass(frozen=True)
class ExpertFormula:
    """Which parameters hold what, by name. stacks: gates and ups, then downs; biases: of both, or none.

    transposed: stored as (experts, inputs, outputs). interleaved: see `ExpertWeights`. idle: of experts, which stand
    behind the others and give what they are given, as in LongCat.
    """

    stacks: tuple[str, str]
    biases: tuple[str, ...]
    transposed: bool
    interleaved: bool
    gating: Gating
    idle: int = 0

    def weights(self, module: nn.Module) -> ExpertWeights:
        """As the module holds them now."""
        own: dict[str, Any] = module._parameters
        gate_up: Any
        down: Any
        if isinstance(module, QuantizedExperts):
            gate_up, down = map(module.stack, self.stacks)
        else:
            parts = (local(own[name]) for name in self.stacks)
            gate_up, down = (part.transpose(1, 2) if self.transposed else part for part in parts)
            gate_up = gate_up[: len(down)]
        return ExpertWeights(gate_up, down, self.gating, self.interleaved, *(local(own[name]) for name in self.biases))


def holds_experts(module: nn.Module) -> bool:
    """Whether a module has two stacks of matrices, and takes tokens, choices and shares."""
    stacks = [shape for shape in _shapes(module).values() if len(shape) == 3]
    return len(stacks) == 2 and len(stock_parameters(module)) == 3


def _packed(module: nn.Module) -> bool:
    """Whether a module has stacks of matrices that are no tensors, or in numbers of 8 bits or fewer."""
    held = {**vars(module), **module._parameters}.values()
    stacks = [one for one in held if not isinstance(one, type) and len(getattr(one, "shape", ())) == 3]
    return len(stacks) > 1 and any(getattr(one, "itemsize", 1) == 1 for one in stacks)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of all that it holds, as of stacks that are quantized now, by name; of what ranks divide, of this rank's part."""
    if isinstance(module, QuantizedExperts):
        return module.shapes
    return {name: tuple(local(value).shape) for name, value in module._parameters.items() if value is not None}


def expert_formulas(module: nn.Module) -> Iterator[ExpertFormula]:
    """All that fit the shapes, the activation and the numbers that the module holds."""
    own = _shapes(module)
    stacks, others = ([name for name, shape in own.items() if (len(shape) == 3) is three] for three in (True, False))
    gatings = list(_gatings(module))
    plain = [(False, Gating(name, gated=False)) for name in dict.fromkeys(one.activation for one in gatings)]
    for (first, second), biases in product(permutations(stacks), permutations(others)):
        experts, *sizes = own[second]
        for transposed in (False, True):
            inner, hidden = sizes if transposed else reversed(sizes)
            for gated, many in ((True, 2 * inner), (False, inner)):
                idle, *wide = own[first][0] - experts, *((hidden, many) if transposed else (many, hidden))
                shapes = [own[name] for name in biases]
                if [*own[first][1:]] != wide or shapes not in ([], [(experts, many), (experts, hidden)]):
                    continue
                if idle < 0 or (idle and biases):
                    continue
                for interleaved, gating in product((False, True), gatings) if gated else plain:
                    yield ExpertFormula((first, second), biases, transposed, interleaved, gating, idle)


def numbers(module: nn.Module) -> list[float]:
    """What it holds that may be a limit or a factor."""
    return [value for value in vars(module).values() if type(value) is float and value > 0]


def _gatings(module: nn.Module) -> Iterator[Gating]:
    acts = [one for one in module.children() if type(one) is not nn.Identity]
    if len(acts) > 1 or any(True for act in acts for _ in act.parameters()):
        return
    name = activation_name(acts[0]) if acts else "silu"
    if name is None:
        return
    held = numbers(module)
    alphas = (1.0, *held) if name == "silu" else (1.0,)
    for shift, alpha, limit in product((0.0, 1.0), dict.fromkeys(alphas), (None, *held)):
        yield Gating(name, alpha, limit, shift)


class ExpertsForward(FastForward):
    """Experts stacked in two parameters, called with tokens (T, H), choices (T, k) and shares (T, k).

    sharding: how they are divided among ranks; each computes what it has of them, and the sum has all.
    """

    def __init__(
        self, module: nn.Module, *place: Any, formula: ExpertFormula, sharding: Sharding | None = None
    ) -> None:
        super().__init__(module, *place)
        self.formula, self.names, self.sharding = formula, stock_parameters(module), sharding
        self.parameters = tuple(module._parameters)
        if sharding is not None:
            self.around = vars(module)["forward"]

    def renew(self) -> None:
        self.held: Any = None  # a `LayerExperts` where they lie within a budget of memory

    def readable(self) -> ExpertWeights | None:
        """The weights, if kernels read each expert by itself, wherever it lies."""
        weights = self._weights()
        aligned = all(step % PLACE_BYTES == 0 for step in weights.steps())
        return weights if aligned and self.sharding is None and not self.formula.idle else None

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        given = self._given(args, kwargs)
        if not all(type(one) is Tensor for one in given):
            return "other arguments than tokens, choices and shares"
        config = vars(self.module).get("config")
        if config is not None and foreign_experts([config]):
            return "an implementation of the user's"
        if tuple(self.module._parameters) != self.parameters:
            return changed_since("which weights it has")
        x, index, shares = given
        return self.kernels.experts.supports(x.contiguous(), index.contiguous(), shares.contiguous(), self._weights())

    def changed(self) -> str | None:
        if "parametrizations" in self.module._modules:  # as torch names what makes a weight anew
            return "adapters on its weights, which peft adds to those of all experts in each call"
        return super().changed()

    def parts(self) -> Parts:
        own = (self.module.original_class(),) if isinstance(self.module, QuantizedExperts) else ()
        return Parts((self.module, *self.module.children()), own)

    def remember(self) -> None:
        """Any class will do, as each token is computed by itself."""
        super().remember()

    def example(self, rows: int, like: Tensor) -> tuple | None:
        if self.sharding is not None:
            return None  # a call is a sum over ranks, which is not timed
        weights = self._weights()
        x = example(self.module, rows, weights.hidden)
        index = torch.arange(2 * rows, device=x.device).view(rows, 2) % weights.experts
        return x, index, torch.full_like(x[:, :2], 0.5)

    def fast(self, *args: Any, **kwargs: Any) -> Tensor:
        x, index, shares = self._given(args, kwargs)
        sharding = self.sharding
        if sharding is not None and sharding.first:
            index = index - sharding.first
        with nullcontext() if self.held is None else self.held.reading(index) as places:
            weights = self._weights()._replace(places=places)
            y = self.kernels.experts(x.contiguous(), index.contiguous(), shares.contiguous(), weights)
        if self.formula.idle:
            y = torch.addcmul(y, x, (shares * (index >= weights.experts)).sum(-1, keepdim=True).to(x.dtype))
        return y if sharding is None else sharding.ranks.reduce(y)

    def with_shared(
        self, given: tuple[Tensor, ...], shared: SharedExpert, activation: str, residual: Tensor, scale: float
    ) -> Tensor | None:
        """The op `mixture`: what a shared expert gives too, and the sum with what goes past both; None where no kernel
        does it. given: tokens, choices and shares of a call that this forward takes.
        """
        weights = self._weights()
        if self.held is not None:
            return None
        arguments = (*(one.contiguous() for one in given), weights, shared, residual, scale)
        if self.sharding is not None or self.formula.idle or weights.gating != Gating(activation):
            return None
        if self.kernels.mixture.supports(*arguments) is not None:
            return None
        return self.kernels.mixture(*arguments)

    def _given(self, args: tuple, kwargs: dict) -> tuple:
        """Tokens, choices and shares, however they are given; None for what is not."""
        return args if len(args) == 3 else (*args, *(kwargs.get(name) for name in self.names[len(args) :]))

    def _weights(self) -> Any:
        return self.formula.weights(self.module)


def match_experts(site: Site, context: Context) -> Match | Skip | None:
    """A module with two stacks of matrices that fit each other, called with tokens, choices and shares."""
    module = site.module
    if not holds_experts(module):
        return Skip("their stacks are in a format of their library") if _packed(module) else None
    sharding = expert_sharding(module)
    whole = module if sharding is None else twin(module, local)
    found = find_formula(whole, context, (context.kernels.plain(), context.kernels))
    if isinstance(found, str):
        return Skip(found)
    if sharding is not None and found.idle:
        return Skip("experts that give what they are given, divided among ranks")
    return Match(ExpertsForward(module, site.path, context.kernels, context.log, formula=found, sharding=sharding))


def find_formula(module: nn.Module, context: Context, kernels: tuple[Kernels, ...]) -> ExpertFormula | str:
    """By what experts compute, or why that is not known. kernels: operations by which the formula is to agree with the
    module: plain ones first, by which it is found, then those that are to run, if any.
    """
    if meta_weights(module):
        return "weights not loaded"
    formulas = tuple(expert_formulas(module))

    def find() -> ExpertFormula | str:
        reason = None
        for formula in formulas:
            found = _disagreement(module, formula, context, kernels)
            if found is None:
                return formula
            reason = reason or found
        return reason or "experts stored or activated in a way of their own"

    return context.probe.once(module, (formulas, *numbers(module), len(kernels), *_stored(module)), find)


def _stored(module: nn.Module) -> tuple:
    """How its stacks are quantized, where they are."""
    return (module.kind, module.scheme, module.dtype) if isinstance(module, QuantizedExperts) else ()


def _disagreement(
    module: nn.Module, formula: ExpertFormula, context: Context, tried: tuple[Kernels, ...]
) -> str | None:
    """Why experts compute something else than this formula: where activations bend, or where a clamp would show."""
    weights, dtype = formula.weights(module), placement(module)[1]
    large = BEYOND * max([SEEN, *numbers(module)])
    if large**2 > torch.finfo(dtype).max / BEYOND:  # gate and up are multiplied
        return "a number among its settings is too large for its dtype to be tried as a limit"

    def inputs(size: float) -> tuple[Tensor, ...]:
        """size: root mean square of gates and ups of the first expert, without biases."""
        x = example(module, PROBED, weights.hidden)
        index = torch.arange(2 * PROBED, device=x.device).view(PROBED, 2) % weights.experts
        if formula.idle:
            index[1:, 1] = torch.tensor([0, formula.idle - 1], device=x.device) + weights.experts
        shares = torch.rand(PROBED, 2, generator=torch.Generator().manual_seed(0), device="cpu").to(x)
        gate_up, _ = weights.matrices(0, x.dtype)
        first = (x.float() @ gate_up.detach().float().t()).square().mean().sqrt()
        return x * float(size / first.clamp_min(1e-6)), index, shares

    for place, kernels in enumerate(tried):
        candidate = ExpertsForward(module, "", kernels, context.log, formula=formula).fast
        for size in (ORDINARY, large):
            given, variant = partial(inputs, size), (formula, size, place, *_stored(module))
            reason = context.probe.disagreement(module, candidate, given, variant=variant, ahead=True)
            if reason is not None:
                return reason
    return None
