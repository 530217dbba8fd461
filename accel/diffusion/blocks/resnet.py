"""The resnet block of UNets and VAEs: norm, SiLU, convolution, time embedding, norm, SiLU, convolution, shortcut.

Two fused norms, each with what lies between it and the convolution before, and one pass that ends the block. Reference:
He et al., "Identity Mappings in Deep Residual Networks", 2016, with the time embedding of Ho et al., 2020.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accel.fusion.channels_last import convolve, keep_channel_stats, nhwc, normalize, project_image
from accel.fusion.half_operands import HalfOperands, convolve_half, end_in_float32
from accel.fusion.loop import ForwardCounter
from accel.fusion.stacked_linears import StackedLinears, TimeProjections
from accel.libraries.adapters import base
from accel.patching.fast_forward import FastForward
from accel.patching.guard import Parts
from accel.patching.probe import example
from accel.patching.rule import Context, Match, Site, Skip
from accel.patching.structure import all_plain, holds, no_tensor, pointwise, untouched
from accel.quantization.product import keeps_forward, layer_reason


class ResnetForward(FastForward):
    """(N, C, H, W), time embedding (N, T) or None -> (N, C', H, W), channels-last in and out."""

    def __init__(self, *place: Any, times: StackedLinears) -> None:
        super().__init__(*place)
        self.times, self.half = times, HalfOperands()  # times: the time projections of all resnets of the model

    def unfit(self, input_tensor: Any, temb: Any = None) -> str | None:
        lacks = self.module.time_emb_proj is not None and temb is None
        return no_tensor(input_tensor) or ("no time embedding given" if lacks else None)

    def parts(self) -> Parts:
        m = self.module
        layers = (m.conv1, m.conv2, m.conv_shortcut, m.time_emb_proj)
        return Parts((m, m.nonlinearity, getattr(m, "dropout", None)), (m.norm1, m.norm2), layers)

    def joint(self) -> Iterable[nn.Module]:
        return chain(*self.times.groups)

    def fast(self, input_tensor: torch.Tensor, temb: Any = None) -> torch.Tensor:
        m, k = self.module, self.kernels
        x = nhwc(input_tensor)
        if self.half.takes(x) and not any(keeps_forward(conv) for conv in (m.conv1, m.conv2)):
            return self._in_half(x)
        h = normalize(k, x, m.norm1, silu=True)
        h, shift = convolve(h, m.conv1)
        add = None
        if m.time_emb_proj is not None:
            add = self.times.of(m.time_emb_proj, temb, F.silu)
        h = normalize(k, h, m.norm2, add=add, shift=shift, silu=True)
        h, bias = convolve(h, m.conv2)
        shortcut = x if m.conv_shortcut is None else project_image(x, m.conv_shortcut, k.linear)
        return keep_channel_stats(k.image_sum(h, shortcut, bias, m.output_scale_factor))

    def _in_half(self, x: torch.Tensor) -> torch.Tensor:
        m, k = self.module, self.kernels
        h = convolve_half(k, x, m.norm1, m.conv1)
        h = convolve_half(k, h, m.norm2, m.conv2, shift=m.conv1.bias)
        shortcut = x if m.conv_shortcut is None else nhwc(project_image(x, m.conv_shortcut, k.linear))
        return end_in_float32(k, h, shortcut, m.conv2.bias, m.output_scale_factor)


def _leaves(m: Any) -> str | None:
    layers = filter(None, (m.conv1, m.conv2, m.conv_shortcut, m.time_emb_proj))
    reason = all_plain((m.norm1, nn.GroupNorm), (m.norm2, nn.GroupNorm)) or layer_reason(*layers)
    return reason or untouched(m.nonlinearity, getattr(m, "dropout", None))


def match_resnet(site: Site, context: Context) -> Match | Skip | None:
    """Two norms, two convolutions, an optional time projection and shortcut; confirmed by running it."""
    m: Any = site.module
    if not holds(m, "norm1", "conv1", "norm2", "conv2"):
        return None
    if not all(hasattr(m, name) for name in ("time_emb_proj", "conv_shortcut", "output_scale_factor", "nonlinearity")):
        return Skip("a resnet block of another make")
    if getattr(m, "upsample", None) is not None or getattr(m, "downsample", None) is not None:
        return Skip("resamples inside the block")
    reason = _leaves(m)
    if reason is None and m.time_emb_proj is not None and m.time_emb_proj.out_features != base(m.conv1).out_channels:
        reason = "the time embedding scales as well as shifts"
    if reason is not None:
        return Skip(reason)
    own = StackedLinears(ForwardCounter())  # a probe moves no weights beside others
    forward = ResnetForward(m, site.path, context.kernels, context.log, times=own)
    x = example(m, 2, base(m.conv1).in_channels, 6, 5)
    temb = None if m.time_emb_proj is None else example(m, 2, m.time_emb_proj.in_features, seed=1)
    if (reason := context.probe.unlike(forward, (x, temb))) is not None:
        return Skip(reason)
    if m.conv_shortcut is not None and not pointwise(base(m.conv_shortcut)):
        return Skip("a shortcut that is not a 1x1 convolution")
    if m.time_emb_proj is not None:
        forward.times = TimeProjections.shared(context)
        return Match(forward, () if keeps_forward(m.time_emb_proj) else forward.times.add(m.time_emb_proj))
    forward.half = HalfOperands.beneath(site, context)
    return Match(forward)
