"""How a module of stacked experts may compute: the formulas that fit what it holds, simplest first, for a probe."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import torch
from accel_kernels.moe.weights import ExpertWeights, Gating
from torch import nn

from accel.llm.analysis.mlp import activation_name
from accel.parallel.sharded_layers import local
from accel.quantization.experts import ExpertStacks, QuantizedExperts, stock_parameters

SEEN = 8.0  # how large gates and ups are made at least where a bend far from zero is looked for
BEYOND = 4.0  # in times of the largest number that the module holds, which may be where they are clamped


@dataclass(frozen=True)
class ExpertFormula:
    """Which parameters hold what, by name. stacks: gates and ups, then downs; biases: of both, or none.

    transposed: stored as (experts, inputs, outputs). interleaved: see `ExpertWeights`.
    """

    stacks: tuple[str, str]
    biases: tuple[str, ...]
    transposed: bool
    interleaved: bool
    gating: Gating

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
        return ExpertWeights(gate_up, down, self.gating, self.interleaved, *(local(own[name]) for name in self.biases))


def holds_experts(module: nn.Module) -> bool:
    """Whether a module has two stacks of matrices, and takes tokens, choices and shares."""
    stacks = [shape[0] for shape in _shapes(module).values() if len(shape) == 3]
    return len(stacks) == 2 and len(set(stacks)) == 1 and len(stock_parameters(module)) == 3


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
    for (first, second), biases in product(permutations(stacks), permutations(others)):
        experts, *sizes = own[second]
        for transposed in (False, True):
            inner, hidden = sizes if transposed else reversed(sizes)
            wide = (experts, hidden, 2 * inner) if transposed else (experts, 2 * inner, hidden)
            shapes = [own[name] for name in biases]
            if own[first] != wide or shapes not in ([], [(experts, 2 * inner), (experts, hidden)]):
                continue
            for interleaved, gating in product((False, True), gatings):
                yield ExpertFormula((first, second), biases, transposed, interleaved, gating)


def expert_stacks(module: nn.Module, formula: ExpertFormula) -> ExpertStacks:
    """What of a module that computes by this formula may be quantized."""
    return ExpertStacks(module, formula.stacks, formula.transposed)


def numbers(module: nn.Module) -> list[float]:
    """What it holds that may be a limit or a factor."""
    return [value for value in vars(module).values() if type(value) is float and value > 0]


def _gatings(module: nn.Module) -> Iterator[Gating]:
    acts = list(module.children())
    if len(acts) > 1 or any(True for act in acts for _ in act.parameters()):
        return
    name = activation_name(acts[0]) if acts else "silu"
    if name is None:
        return
    held = numbers(module)
    alphas = (1.0, *held) if name == "silu" else (1.0,)
    for shift, alpha, limit in product((0.0, 1.0), dict.fromkeys(alphas), (None, *held)):
        yield Gating(name, alpha, limit, shift)


ORDINARY = 1.0  # root mean square of gates and ups: smaller, or larger, every activation is as good as straight


def beyond_limits(module: nn.Module, dtype: torch.dtype) -> float | None:
    """A root mean square of gates and ups that passes every number that may be their limit; None where the dtype ends
    before.
    """
    target = BEYOND * max([SEEN, *numbers(module)])
    return None if target**2 > torch.finfo(dtype).max / BEYOND else target  # gate and up are multiplied


def sized(x: torch.Tensor, formula: ExpertFormula, module: nn.Module, target: float) -> torch.Tensor:
    """x, (tokens, channels), of such a size that gates and ups of the first expert, without biases, have this root mean
    square.
    """
    gate_up, _ = formula.weights(module).matrices(0, x.dtype)
    first = (x.float() @ gate_up.detach().float().t()).square().mean().sqrt()
    return x * float(target / first.clamp_min(1e-6))
