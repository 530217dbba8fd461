"""Noise that stands for rounding: as large as asked for, of each number, and of each module its own."""

import pytest
import torch
from torch import nn

from accel.verification.noise import with_rounding


class Tuple(nn.Module):
    def forward(self, x):
        return x, None, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_number_is_moved_by_so_many_eps_of_itself(dtype):
    x = torch.randn(5, 999, dtype=dtype).exp()
    x[:, 7] *= 1e4
    with with_rounding([module := nn.Identity()], 8):
        got = module(x)
    moved = (got.double() - x.double()) / x.double() / torch.finfo(dtype).eps
    assert got.dtype == dtype and 7.5 < moved.std() < 8.5 and moved[:, 7].abs().max() > 2
    assert torch.equal(module(x), x)


def test_modules_are_moved_apart_and_each_alike_in_every_run():
    x, modules = torch.ones(2, 64), [nn.Identity(), Tuple(), nn.Identity()]

    def run():
        with with_rounding(modules, 4):
            first, (second, *rest), third = (module(x) for module in modules)
        assert rest == [None, 3]
        return first, second, third

    first, second, third = run()
    assert all(map(torch.equal, run(), (first, second, third)))
    assert abs(torch.corrcoef(torch.stack([first - 1, second - 1, third - 1]).flatten(1)).triu(1)).max() < 0.4
