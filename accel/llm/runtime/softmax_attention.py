"""Softmax attention over the store of a forward: full, of a sliding window, grouped; one kernel behind its products."""

from itertools import chain

import torch
from torch import nn

from accel.llm.analysis.norm import HeadNorm
from accel.llm.analysis.softmax_attention import SoftmaxSpec, split
from accel.llm.runtime.part import BoundHeadNorm, BoundLinear, NormedInput, part_product, stacked
from accel.llm.runtime.step import Step
from accel.patching.fast_forward import Kernels


class BoundSoftmaxAttention:
    """One attention with the tensors it reads."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: SoftmaxSpec, stack: bool):
        def head_norm(one: HeadNorm | None) -> BoundHeadNorm | None:
            return None if one is None else BoundHeadNorm(kernels, layer, one)

        self.spec, self.module = spec, layer.get_submodule(spec.name)
        self.q_norm, self.k_norm = head_norm(spec.q_norm), head_norm(spec.k_norm)
        self.projections = [BoundLinear(layer.get_submodule(name)) for name in spec.projections]
        self.joint = stacked(self.projections, stack)
        self.sizes = (
            None if self.joint is None else [linear.weights.outputs for linear in self.projections if linear.weights]
        )
        self.layout = (spec.layout, spec.heads, spec.groups, spec.kv_heads, spec.dim)
        out = layer.get_submodule(spec.out)
        device = next(chain(out.parameters(), out.buffers())).device
        self.slopes = None if spec.slopes is None else spec.slopes.to(device)
        self.sinks = None if spec.sinks is None else self.module._parameters[spec.sinks]

    def __call__(self, kernels: Kernels, step: Step, h: NormedInput, kwargs: dict) -> torch.Tensor:
        """See `BoundAttention`."""
        spec = self.spec
        if self.joint is None:
            outputs = [linear(kernels, h) for linear in self.projections]
        else:
            outputs = part_product(kernels, self.joint, h).split(self.sizes, dim=-1)
        q, k, v = split(outputs, *self.layout)
        q, q_norm = _normed(q, self.q_norm)
        k, k_norm = _normed(k, self.k_norm)
        cos = sin = None
        rotary = spec.rotary
        if rotary is not None:
            source = rotary.source(kwargs, self.module)
            cos, sin = step.angles(source, rotary, lambda: rotary.angles(kwargs, self.module))
        interleaved = rotary is not None and rotary.interleaved
        return kernels.paged_attention(
            q, k, v, step.kvs[spec.index], spec.scale, cos=cos, sin=sin, interleaved=interleaved, q_norm=q_norm,
            k_norm=k_norm, window=spec.window, softcap=spec.softcap, sinks=self.sinks, slopes=self.slopes,
            dense=kernels.prompt,
        )  # fmt: skip


def _normed(t: torch.Tensor, norm: BoundHeadNorm | None) -> tuple:
    """(t, the norm left to the attention), or t already normed and None."""
    if norm is None or norm.fused is not None:
        return t, None if norm is None else norm.fused
    return norm(t), None
