"""The upward half of a UNet: each resnet reads the stream joined with a skip connection, in one fused pass.

The pass that joins them also takes the channel stats of what it writes, so that the resnet's first norm need not.
"""

import inspect
from typing import Any

import torch
from torch import nn

from accel.fusion.channels_last import keep_channel_stats, nhwc
from accel.patching.fast_forward import FastForward
from accel.patching.guard import Parts
from accel.patching.probe import example
from accel.patching.rule import Context, Match, Site, Skip
from accel.patching.structure import all_plain, holds

SKIPS = "res_hidden_states_tuple"


class UpBlockForward(FastForward):
    """(N, C, H, W) and skip connections, last first -> (N, C', 2 H, 2 W), or the size asked for."""

    def unfit(
        self, hidden_states: Any = None, res_hidden_states_tuple: Any = (), *args: Any, **kwargs: Any
    ) -> str | None:
        m = self.module
        if args or any(type(x) is not torch.Tensor for x in (hidden_states, *res_hidden_states_tuple)):
            return "arguments given by position, or input that is no tensor"
        if len(res_hidden_states_tuple) < len(m.resnets):
            return f"{len(res_hidden_states_tuple)} skip connections for {len(m.resnets)} resnets"
        return None

    def parts(self) -> Parts:
        return Parts((self.module,))

    def fast(
        self,
        hidden_states: torch.Tensor,
        res_hidden_states_tuple: tuple[torch.Tensor, ...],
        temb: torch.Tensor | None = None,
        upsample_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        m, x = self.module, hidden_states
        attentions = getattr(m, "attentions", None) or [None] * len(m.resnets)
        for resnet, attention, skip in zip(m.resnets, attentions, reversed(res_hidden_states_tuple), strict=False):
            x = resnet(keep_channel_stats(self.kernels.image_concat(nhwc(x), nhwc(skip))), temb)
            if attention is not None:
                x = attention(x, **kwargs, return_dict=False)[0]
        for upsampler in m.upsamplers or ():
            x = upsampler(x, upsample_size)
        return x


def match_up_block(site: Site, context: Context) -> Match | Skip | None:
    """Resnets, perhaps attentions and an upsampler, called with skip connections; confirmed by running it."""
    m: Any = site.module
    if not holds(m, "resnets") or SKIPS not in inspect.signature(type(m).forward).parameters:
        return None
    if not set(dict(m.named_children())) <= {"resnets", "attentions", "upsamplers"} or not hasattr(m, "upsamplers"):
        return Skip("an upward block with parts of another make")
    if not all(holds(resnet, "conv1", "conv2") for resnet in m.resnets):
        return Skip("resnets of another make")
    if not all(holds(attention, "transformer_blocks") for attention in getattr(m, "attentions", None) or ()):
        return Skip("attentions of another make")
    reason = all_plain(*((conv, nn.Conv2d) for resnet in m.resnets for conv in (resnet.conv1, resnet.conv2)))
    if reason is not None:
        return Skip(reason)
    forward = UpBlockForward(m, site.path, context.kernels, context.log)
    reason = context.probe.unlike(forward, (), up_block_example(m))
    return Match(forward, covers=()) if reason is None else Skip(reason)


def up_block_example(m: Any) -> dict:
    """Small inputs. How the first resnet divides its channels between stream and skip connection does not matter."""
    first = m.resnets[0]
    stream = first.conv1.in_channels - first.conv1.in_channels // 2
    skips: list[torch.Tensor] = []
    width = stream
    for resnet in m.resnets:
        skips.append(example(m, 2, resnet.conv1.in_channels - width, 4, 4, seed=len(skips)))
        width = resnet.conv2.out_channels
    given = {"hidden_states": example(m, 2, stream, 4, 4, seed=9), SKIPS: tuple(reversed(skips))}
    if getattr(first, "time_emb_proj", None) is not None:
        given["temb"] = example(m, 2, first.time_emb_proj.in_features, seed=10)
    for part in m.modules():
        added = getattr(part, "add_k_proj", None)
        if added is not None or (getattr(part, "is_cross_attention", False) and holds(part, "to_k")):
            given["encoder_hidden_states"] = example(m, 2, 5, (added or part.to_k).in_features, seed=11)
            break
    return given
