"""Tensors of another device than the rows: what stock moves, or reads as a number, no pass does.

"meta" stands for a GPU here. As there, torch takes tensors of it and of the CPU in one operation only where one is a
number, or where one is copied into the other.
"""

import pytest
import torch

from accel.diffusion.dit.recorder import tensors_in
from support.diffusion.programs import Formula, Planned

B, S, T, H, D = 2, 6, 2, 2, 8


def turned(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.device), sin.to(x.device)
    return (x.float() * cos + torch.cat([-b, a], dim=-1).float() * sin).to(x.dtype)


def some_rows(x, cos, sin):
    x = x * 2 + 1
    x[:, :, T:] = turned(x[:, :, T:], cos[T:], sin[T:])
    return x


def moved_with_the_dtype(x, cos, sin):
    return x * cos.to(x) + 1 + sin.type_as(x)


def a_number_on_the_cpu(x, cos, sin):
    return ((x * 2 + 1) * cos[0, 0] + x.float()) * 3 + sin.amax()


def worked_on_before(x, cos, sin):
    return (x + (cos.exp() * 2 + sin.sin()).to(x.device)) * 3


def lanes_from_the_cpu(x, cos, sin):
    out = torch.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * 2 - x[..., 1::2]
    out[..., 1::2] = (cos * 2 + sin)[..., 1::2].to(x.dtype).expand(B, H, S, D // 2)
    return out * 2 + 1


def rows_from_the_cpu(x, cos, sin):
    out = x * 2
    out[:, :, T:] = (cos + sin)[T:].to(x.dtype).expand(B, H, S - T, D)
    return out * 2, x * 2 + 1


FORMULAS = [turned, some_rows, moved_with_the_dtype, a_number_on_the_cpu, worked_on_before]
COPIES = [lanes_from_the_cpu, rows_from_the_cpu]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("forward", FORMULAS + COPIES, ids=lambda one: one.__name__)
def test_passes_take_tensors_of_one_device(forward, dtype):
    x, tables = torch.randn(B, H, S, D, dtype=dtype), [torch.randn(S, D), torch.randn(S, D)]
    planned = Planned(Formula(forward), x.to("meta"), *tables)
    assert planned.passes
    values = planned.schedule.program.values
    for one in planned.passes:
        assert len({values[number].device for number in one.takes | one.makes}) == 1
    for wanted, got in zip(tensors_in(planned.wanted), tensors_in(planned.got), strict=True):
        assert (wanted.shape, wanted.dtype, wanted.device) == (got.shape, got.dtype, got.device)
    assert Planned(Formula(forward), x, *tables).equal()
