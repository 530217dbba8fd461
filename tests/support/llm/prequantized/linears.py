"""Linears as GPTQ, AWQ and bitsandbytes lay them out in memory, written from their formats' descriptions, not ours."""

from types import SimpleNamespace

import torch
from torch import nn


def words(rows: torch.Tensor) -> torch.Tensor:
    """(n, m) of 0..15 as int32 (n / 8, m), the first row of eight in the lowest bits."""
    packed = torch.zeros(rows.shape[0] // 8, rows.shape[1], dtype=torch.int64)
    for place in range(8):
        packed |= rows[place::8].long() << 4 * place
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """`words` taken back."""
    found = torch.stack([(packed.long() >> 4 * place) & 15 for place in range(8)], dim=1)
    return found.flatten(0, 1)


class GptqLinear(nn.Module):
    """offset: what is taken off a zero point before it is stored, 1 in the first version of the format."""

    def __init__(self, q, z, scales, bias, offset=1, order=None):
        super().__init__()
        self.offset, columns = offset, q.shape[1]
        group = columns // scales.shape[1]
        g_idx = torch.arange(columns) // group
        g_idx = g_idx if order is None else g_idx[order]
        self.register_buffer("g_idx", g_idx.int())
        self.register_buffer("qweight", words(q.t()))
        self.register_buffer("qzeros", words((z - offset) & 15).t().contiguous())
        self.register_buffer("scales", scales.t().contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x):
        numbers, zeros = nibbles(self.qweight), nibbles(self.qzeros.t()).t() + self.offset
        index = self.g_idx.long()
        weight = (numbers - zeros[index]).float() * self.scales[index].float()
        out = x @ weight.to(x.dtype)
        return out if self.bias is None else out + self.bias


class AwqLinear(nn.Module):
    ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

    def __init__(self, q, z, scales, bias):
        super().__init__()
        self.register_buffer("qweight", words(self._shuffled(q)).t().contiguous())
        self.register_buffer("qzeros", words(self._shuffled(z)).t().contiguous())
        self.register_buffer("scales", scales.t().contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def _shuffled(self, rows):
        return rows.reshape(-1, 8, rows.shape[1])[:, list(self.ORDER)].flatten(0, 1)

    def _ordered(self, packed):
        found = nibbles(packed.t()).reshape(-1, 8, packed.shape[0])
        ordered = torch.empty_like(found)
        ordered[:, list(self.ORDER)] = found
        return ordered.flatten(0, 1)

    def forward(self, x):
        numbers, zeros = self._ordered(self.qweight), self._ordered(self.qzeros)
        group = numbers.shape[1] // zeros.shape[1]
        weight = (numbers - zeros.repeat_interleave(group, 1)).float()
        weight = weight * self.scales.t().repeat_interleave(group, 1).float()
        out = x @ weight.t().to(x.dtype)
        return out if self.bias is None else out + self.bias


class Int8Parameter(nn.Parameter):
    """A Parameter that carries CB and SCB, as bitsandbytes' Int8Params."""

    CB = SCB = None


class BitsandbytesLinear(nn.Linear):
    """LLM.int8() of one layer: rows of activations are rounded to 8 bits too."""

    def __init__(self, numbers, tops, bias):
        nn.Module.__init__(self)
        self.out_features, self.in_features = numbers.shape
        weight = torch.Tensor._make_subclass(Int8Parameter, numbers, False)
        weight.CB, weight.SCB = weight.data, tops
        self.weight, self.bias = weight, bias
        self.state = SimpleNamespace(CB=None, SCB=None, threshold=6.0)

    def forward(self, x):
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        top = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-6)
        rounded = (x.float() * 127 / top).round()
        out = (rounded @ self.state.CB.float().t() * top * self.state.SCB / 127**2).to(x.dtype)
        return out if self.bias is None else out + self.bias
