"""One token through the experts that its router chose and those that all tokens share, added to what goes past them.

Shared experts: DeepSeek-AI, "DeepSeekMoE", 2024; with a share of their own: Qwen team, "Qwen1.5-MoE", 2024.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from accel_kernels.moe.experts import experts
from accel_kernels.moe.experts import supports as experts_reason
from accel_kernels.moe.weights import ExpertWeights, Gating
from accel_kernels.op import Op, contiguous_reason, dtype_reason, random_cases


class SharedExpert(NamedTuple):
    """down (gating(gate x, up x)), times sigmoid(share x) where there is one: of the gating of the experts beside it.

    gate, up: (S, H), down: (H, S), S a multiple of the channels of an expert; share: (1, H) or None.
    """

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    share: torch.Tensor | None = None


def reference(x, index, shares, weights, shared, residual, scale=1.0):
    """residual + scale * (experts(x) + shared(x)). x, residual: (1, H), the latter also in float32, which then is the
    dtype of the result; index, shares, weights: as of `experts`; shared: a SharedExpert.
    """
    return _added(x, experts.reference(x, index, shares, weights), weights, shared, residual, scale)


def _added(x, y, weights, shared, residual, scale):
    own = F.linear(weights.gating(F.linear(x, shared.gate), F.linear(x, shared.up)), shared.down)
    own = own if shared.share is None else own * F.linear(x, shared.share).sigmoid()
    return torch.add(residual, y + own, alpha=scale)


def in_passes(x, index, shares, weights, shared, residual, scale=1.0):
    """The same by separate products."""
    return _added(x, experts(x, index, shares, weights), weights, shared, residual, scale)


def supports(x, index, shares, weights, shared, residual, scale=1.0) -> str | None:
    if (reason := experts_reason(x, index, shares, weights)) is not None:
        return reason
    if len(x) != 1:
        return f"{len(x)} tokens"
    given = [one for one in shared if one is not None]
    stacks = (weights.gate_up, weights.down, *given)
    if not all(type(one) in (torch.Tensor, torch.nn.Parameter) and one.dtype == x.dtype for one in stacks):
        return "experts that are quantized, or of another dtype"
    if weights.places is not None:
        return "experts outside of their stacks"
    if not weights.gating.gated or weights.by_rows != (True, True) or weights.down_bias is not None:
        return "experts without gates, with biases, or stored transposed"
    wide, hidden = shared.down.shape[1], weights.hidden
    shapes = [(wide, hidden), (wide, hidden), (hidden, wide), (1, hidden)]
    if wide % weights.inner or [tuple(one.shape) for one in given] != shapes[: len(given)]:
        return f"a shared expert of {wide} channels beside experts of {weights.inner}"
    if residual.shape != x.shape or residual.dtype not in (x.dtype, torch.float32):
        return "a residual of another shape or dtype"
    parts = {"gate": shared.gate, "up": shared.up, "down": shared.down, "share": shared.share, "residual": residual}
    return contiguous_reason(**parts) or dtype_reason(x, *given, residual)


@random_cases
def _case(rand, experts, chosen, hidden, inner, many=1, share=False, gating=None, wide=False):
    """many: times the channels of an expert in the shared one; share, wide: whether it has one, residual in float32."""

    def linear(outputs, inputs, *stack):
        return rand(*stack, outputs, inputs, spread=inputs**-0.5)

    index = rand.uniform(1, experts).topk(chosen).indices
    weights = ExpertWeights(linear(2 * inner, hidden, experts), linear(hidden, inner, experts), gating or Gating())
    shared = SharedExpert(linear(many * inner, hidden), linear(many * inner, hidden), linear(hidden, many * inner),
                          linear(1, hidden) if share else None)  # fmt: skip
    residual = rand(1, hidden, dtype=torch.float32 if wide else None)
    return (rand(1, hidden), index, rand.uniform(1, chosen).to(rand.dtype), weights, shared, residual, 0.5), {}


CASES = (
    _case("tiny", 4, 2, 64, 48, small=True),
    _case("odd", 5, 3, 72, 40, many=2, share=True, gating=Gating("gelu_tanh"), small=True),
    _case("wide", 3, 1, 72, 40, share=True, wide=True, gating=Gating(limit=0.5), small=True),
    _case("deepseek-v2-lite", 64, 6, 2048, 1408, many=2),
    _case("qwen3.6-35b-a3b", 256, 8, 2048, 512, share=True),
    _case("glm-4.7-flash", 64, 4, 2048, 1536),
    _case("kimi-linear", 256, 8, 2304, 1024),
)

mixture = Op("mixture", reference, "accel_kernels.moe.experts_triton:mixture", supports, CASES, instead=in_passes)
