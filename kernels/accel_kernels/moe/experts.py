"""Mixture of experts for few tokens: every token's chosen experts, straight from the stacked weights.

y = sum over the chosen of weight * down_e (act(gate_e x) * up_e x); Shazeer et al., "Outrageously large neural
networks", 2017, as Mixtral and its kin store it. No loop over experts and no copy of their weights.
"""

import torch

from accel_kernels.norm.norm import ACTIVATIONS
from accel_kernels.op import Case, Op, dtype_reason

MOST_TOKENS = 16


def reference(x, index, weights, gate_up, down, activation):
    """x: (T, H); index, weights: (T, k), the chosen experts and their shares; gate_up: (E, 2 I, H), gates before ups;
    down: (E, H, I); activation: a name of ACTIVATIONS. Returns (T, H)."""
    tokens, chosen = index.shape
    experts = index.reshape(-1)
    rows = x.repeat_interleave(chosen, dim=0).unsqueeze(1)  # (T k, 1, H)
    gate, up = torch.bmm(rows, gate_up[experts].transpose(1, 2)).chunk(2, dim=-1)
    y = torch.bmm(ACTIVATIONS[activation](gate) * up, down[experts].transpose(1, 2)).view(tokens, chosen, -1)
    return (y * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def supports(x, index, weights, gate_up, down, activation) -> str | None:
    if x.numel() == 0 or index.numel() == 0:
        return "empty"
    if x.shape[0] > MOST_TOKENS:
        return f"{x.shape[0]} tokens, more than {MOST_TOKENS}"
    if activation not in ACTIVATIONS:
        return f"activation {activation!r}"
    if gate_up.shape[2] % 8 or down.shape[2] % 8:
        return f"{gate_up.shape[2]} or {down.shape[2]} inputs, not a multiple of 8"
    for name, tensor in {"x": x, "index": index, "weights": weights, "gate_up": gate_up, "down": down}.items():
        if not tensor.is_contiguous():
            return f"{name} not contiguous"
    if gate_up.dtype != x.dtype or down.dtype != x.dtype or index.dtype != torch.int64:
        return "x and experts of different dtypes, or an index that is not int64"
    return dtype_reason(x, weights, gate_up, down)


def _case(name, tokens, experts, chosen, hidden, inner, activation="silu", small=False):
    def make(device, dtype):
        g = torch.Generator("cpu").manual_seed(0)

        def rand(*size, spread=1.0):
            return (torch.randn(*size, generator=g) * spread).to(device, dtype)

        index = torch.rand(tokens, experts, generator=g).topk(chosen).indices.to(device)
        weights = torch.rand(tokens, chosen, generator=g).to(device, dtype)
        up, down = (
            rand(experts, 2 * inner, hidden, spread=hidden**-0.5),
            rand(experts, hidden, inner, spread=inner**-0.5),
        )
        return (rand(tokens, hidden), index, weights, up, down, activation), {}

    return Case(name, make, small)


CASES = (
    _case("tiny", 1, 4, 2, 64, 48, small=True),
    _case("several", 3, 5, 2, 72, 40, "gelu_tanh", small=True),
    _case("all", 2, 3, 3, 40, 56, small=True),
    _case("mixtral", 1, 8, 2, 4096, 14336),
    _case("qwen3-moe", 4, 128, 8, 2048, 768),
)

experts = Op("experts", reference, "accel_kernels.moe.experts_triton:experts", supports, CASES)
