"""A router tried: a copy of it with weights made to tell formulas apart, what it is given, and what it gives.

The copy lies on the CPU. Its logits are read straight from its weights, by inputs that are 1 in one place, so that they
reach far: scores are so small that a limit of a sum shows.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accel.quantization.experts import stock_parameters

GIVEN = "given by the caller"
Kind = tuple[torch.dtype, ...]  # of the input, and of all that the router holds, in order
# (spread, middle, lead of the largest) of the logits of each token: usual ones, some that stand out, and some far from
# zero, which 16 bits could not tell apart.
USUAL = ((1.0, 0.0, 0.0),) * 6 + ((6.0, 0.0, 0.0),) * 3 + ((1.0, 0.0, 12.0),)
ROWS = (*USUAL, (1.0, -12.0, 0.0), (1.0, -30.0, 0.0), (1.0, -80.0, 0.0), (1.0, -50.0, 20.0))
DENSE, SUMMED = 6, 64  # tokens beside them, whose logits are sums of so many products at most


class RouterNumbers:
    """All float32, for the trials of one router. tensors: in the place of what it holds, by path; given: by callers;
    x: tokens. far: some logits lie so far from zero that 16 bits could not tell them apart.
    """

    def __init__(self, module: nn.Module, far: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        own = held(module)
        matrix = matrix_of(own) or ""
        self.experts, self.hidden = own[matrix].shape
        if self.hidden < len(ROWS) + 8:
            raise ValueError(f"{self.hidden} inputs")
        self.tensors = {
            path: _logits(self.experts, self.hidden, far, generator) if path == matrix else
                  _small_and_large(tensor.numel(), generator).view(tensor.shape)
            for path, tensor in own.items()
        }  # fmt: skip
        self.given = _small_and_large(self.experts, generator)
        self.x = torch.eye(len(ROWS) + DENSE, self.hidden)
        self.x[len(ROWS) :, len(ROWS) :] = torch.randn(DENSE, self.hidden - len(ROWS), generator=generator)


class RouterTrial:
    """A copy of a router, and what it is given. dtype: of the tokens; stored: of all that it holds, None as it is.

    numbers: by whether they are far, see `RouterNumbers`.
    """

    def __init__(
        self,
        module: nn.Module,
        numbers: Callable[[bool], RouterNumbers],
        dtype: torch.dtype,
        stored: torch.dtype | None = torch.float32,
    ) -> None:
        self.module, self.many = module, len(stock_parameters(module))
        made = numbers(dtype == stored == torch.float32)
        self.experts, self.hidden = made.experts, made.hidden
        # Copied: a router may count in a buffer.
        self.tensors = {
            path: made.tensors[path].to(stored or tensor.dtype, copy=True) for path, tensor in held(module).items()
        }
        self.given, self.x = made.given.clone(), made.x.to(dtype)  # given: float32, as callers keep it
        self.copy = _copied(module, self.tensors)
        self.kind = dtypes_of(self.x, self.tensors)

    def run(self, dims: int) -> dict[int, torch.Tensor]:
        """What the copy returns, by place. Raises ValueError where these are not tensors."""
        x = self.x if dims == 2 else self.x.view(2, -1, self.hidden)
        output = type(self.copy).forward(self.copy, x.clone(), *(self.given,) * (self.many - 1))
        if type(output) is not tuple or not all(type(one) is torch.Tensor for one in output):
            raise ValueError("it returns something else than tensors")
        return dict(enumerate(output))

    def logits(self, weight: str, bias: str | None, wide: bool) -> torch.Tensor:
        shift = None if bias is None else self.tensors[bias]
        if wide:
            return F.linear(self.x.float(), self.tensors[weight].float(), None if shift is None else shift.float())
        return F.linear(self.x, self.tensors[weight], shift)

    def correction(self, path: str | None) -> torch.Tensor | None:
        return None if path is None else self.given if path == GIVEN else self.tensors[path].reshape(-1)


def held(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by path, of the module and its children."""
    inside = ((f"{name}.", child) for name, child in module._modules.items() if child is not None)
    return {
        prefix + name: value
        for prefix, one in (("", module), *inside)
        for name, value in (*one._parameters.items(), *one._buffers.items())
        if value is not None
    }


def dtypes_of(x: torch.Tensor, tensors: dict[str, torch.Tensor]) -> Kind:
    """Of the input and of the parameters."""
    return (x.dtype, *(tensor.dtype for tensor in tensors.values()))


def matrix_of(tensors: dict[str, torch.Tensor]) -> str | None:
    """The path of the one matrix; a row of numbers is none."""
    found = [path for path, tensor in tensors.items() if tensor.dim() == 2 and min(tensor.shape) > 1]
    return found[0] if len(found) == 1 else None


def _logits(experts: int, hidden: int, far: bool, generator: torch.Generator) -> torch.Tensor:
    """A matrix whose columns are the logits of tokens, no two equal, numbers of every dtype unless far from zero."""
    made = torch.zeros(experts, hidden)
    dense = made[:, len(ROWS) : len(ROWS) + SUMMED]
    dense.copy_(torch.randn(dense.shape, generator=generator) * SUMMED**-0.5)
    for column, (spread, middle, lead) in enumerate(ROWS):
        drawn = (torch.randn(16 * experts, generator=generator) * spread).bfloat16().float().unique()
        if len(drawn) < experts:
            raise ValueError(f"{experts} experts")
        drawn = drawn[torch.randperm(len(drawn), generator=generator)[:experts]]
        drawn[drawn.argmax()] += lead
        made[:, column] = drawn + middle if far else drawn.bfloat16().float()
    return made


def _small_and_large(many: int, generator: torch.Generator) -> torch.Tensor:
    """Biases that matter beside scores of every size. Below zero, so that other groups, if they count as 0, show."""
    return -(10 ** (-4 * torch.rand(many, generator=generator))).bfloat16().float()


def _copied(module: nn.Module, tensors: dict[str, torch.Tensor], prefix: str = "") -> nn.Module:
    """The module with these in the place of what it holds; not in training, and without a forward of its own."""
    copied: Any = copy.copy(module)
    own = vars(copied)
    own.pop("forward", None)
    own["training"] = False
    for kind in ("_parameters", "_buffers"):
        own[kind] = {name: tensors.get(prefix + name) for name in own[kind]}
    children = vars(module)["_modules"].items()
    own["_modules"] = {
        name: None if child is None else _copied(child, tensors, f"{prefix}{name}.") for name, child in children
    }
    return copied
