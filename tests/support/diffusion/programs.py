"""A forward recorded, planned and run as passes, beside what it gives by itself."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from accel_kernels import rowwise
from accel_kernels.gemm.linear import torch_linear
from torch import nn

from accel.diffusion.dit.assignments import without_assignments
from accel.diffusion.dit.executable import Executable
from accel.diffusion.dit.lowering import Pass
from accel.diffusion.dit.recorder import recorded, tensors_in
from accel.diffusion.dit.schedule import Schedule


class Formula(nn.Module):
    """A function of tensors as the forward of a module, with weights of its own."""

    def __init__(self, function, **weights):
        super().__init__()
        self.function = function
        for name, tensor in weights.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs, **dict(self.named_parameters()))


def plain_kernels(kernel=rowwise.reference):
    def attention(q, k, v, scale=None):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    return SimpleNamespace(rowwise=kernel, linear=torch_linear, attention=attention)


class Planned:
    """wanted: what the forward gives; program: of it, or why there is none; got: what its plan gives."""

    @torch.no_grad()
    def __init__(self, module: nn.Module, *args, kernel=rowwise.reference, **kwargs):
        weights = dict(module.named_parameters()) | dict(module.named_buffers())
        self.wanted, self.program = recorded(module.forward, weights, {}, args, kwargs)
        if isinstance(self.program, str):
            return
        self.schedule = Schedule(without_assignments(self.program))
        executable = Executable(self.schedule, plain_kernels(kernel))
        self.got = executable(list(tensors_in((args, kwargs))), weights.__getitem__)

    @property
    def passes(self) -> list[Pass]:
        return [unit for unit in self.schedule.units if isinstance(unit, Pass)]

    @property
    def calls(self) -> list[str]:
        """Of functions of torch that are left, but views."""
        made = {one.step.name: one for one in self.schedule.units if not isinstance(one, Pass) and hasattr(one, "step")}
        values = self.schedule.program.values
        views = {"as_strided"}
        kept = (name for name, one in made.items() if any(values[n].base == n for n in one.step.made))
        return sorted(name for name in kept if name not in views)

    def equal(self) -> bool:
        pairs = zip(tensors_in(self.wanted), tensors_in(self.got), strict=True)
        return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


# Rotations of queries and keys (B, S, H, D) by tables of cosines and sines, as diffusers writes them.
def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pairs(x, cos, sin):
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def halves(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


def assigned(x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty_like(x)
    out[..., 0::2] = a * cos[..., 0::2] - b * sin[..., 1::2]
    out[..., 1::2] = a * sin[..., 1::2] + b * cos[..., 0::2]
    return out.type_as(x)


def as_complex(x, cos, sin):
    turns = torch.complex(cos[..., 0::2], sin[..., 0::2])
    return (
        torch.view_as_real(torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * turns).flatten(3).type_as(x)
    )
