"""The attention module of diffusers' UNets and VAEs: projections in one GEMM, the backend measured per shape.

The module's forward is replaced, not its processor: a processor the user sets, an IP-Adapter's for one, is noticed at
the next call and runs as it would without us.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accel.fusion.channels_last import as_image, as_image_like, as_rows, keep_channel_stats, nhwc, normalize
from accel.fusion.loop import ForwardCounter
from accel.fusion.stacked_linears import PromptProjections, Stacked, StackedLinears, project_together
from accel.libraries.adapters import base
from accel.patching.fast_forward import FastForward
from accel.patching.guard import Parts
from accel.patching.probe import example
from accel.patching.rule import Context, Match, Site, Skip
from accel.patching.structure import all_plain, foreign_processor, holds, meta_weights, no_tensor, untouched
from accel.quantization.product import Rows, deferred, keeps_forward, layer_reason, product

PARTS = ("spatial_norm", "norm_q", "norm_k", "norm_cross", "add_k_proj", "add_v_proj")
# What makes it the attention of UNets and VAEs; those of other models have some of it.
ASKED = ("group_norm", "heads", "is_cross_attention", "residual_connection", "rescale_output_factor")


class AttentionForward(FastForward):
    """(B, S, C) with optional context (B, T, C'), or an image (N, C, H, W) -> the same shape."""

    stack = False  # whether weights may be moved into one storage; a probe touches none

    prompt: StackedLinears  # the projections of the prompt in all of the model

    def unfit(
        self, hidden_states: Any, encoder_hidden_states: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> str | None:
        given = [name for name, value in kwargs.items() if value is not None and name != "temb"]
        return no_tensor(hidden_states) or (f"arguments for the processor: {', '.join(given)}" if given else None)

    def parts(self) -> Parts:
        m = self.module
        out, *after = m.to_out
        return Parts((m, m.processor, *after), (m.group_norm,), (m.to_q, m.to_k, m.to_v, out))

    def fast(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        m = self.module
        fused = hidden_states.dim() == 4 and m.residual_connection
        out, bias = self.unbiased(hidden_states, encoder_hidden_states, attention_mask, defer=fused)
        if m.residual_connection:
            if out.dim() == 4:
                total = self.kernels.image_sum(out, nhwc(hidden_states), bias, m.rescale_output_factor)
                return keep_channel_stats(total)
            out = out + hidden_states
        return out if m.rescale_output_factor == 1.0 else out / m.rescale_output_factor

    def unbiased(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        defer: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output projection before residual and scale, and the bias that the caller still has to add to it.

        The bias is None with defer=False, or where the product adds it at no cost.
        """
        m = self.module
        image = hidden_states.dim() == 4
        x = nhwc(hidden_states) if image else hidden_states
        if m.group_norm is not None:
            x = normalize(self.kernels, x if image else as_image(x, x.shape[1], 1), m.group_norm)
        rows = Rows(as_rows(x) if x.dim() == 4 else x)
        out = self.attended(rows, encoder_hidden_states, attention_mask)
        last = m.to_out[0]
        defer = defer and deferred(last, out)
        out = product(last, out, not defer, self.kernels.linear)
        return (as_image_like(out, x) if image else out), last.bias if defer else None

    def attended(self, rows: Rows, context: torch.Tensor | None, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """All steps before the output projection; rows: (B, S, C) -> (B, S, heads * D)."""
        q, k, v = self._projections(rows, context)
        if attention_mask is None:
            out = self.kernels.attention(q, k, v)
        else:
            batch, heads = q.shape[:2]
            mask = self.module.prepare_attention_mask(attention_mask, k.shape[2], batch)
            mask = mask.view(batch, heads, -1, mask.shape[-1])
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).reshape(q.shape[0], -1, q.shape[1] * q.shape[3])

    def joint(self) -> Iterable[nn.Module]:
        return chain(*self.prompt.groups)

    def adds_nothing(self) -> bool:
        """Whether the output projection is all there is: no residual of its own, no scale."""
        return not self.module.residual_connection and self.module.rescale_output_factor == 1.0

    def _projections(self, x: Rows, context: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values as (B, H, S, D), views of as few products as the weights allow."""
        m = self.module
        if context is None:
            q, k, v = project_together((m.to_q, m.to_k, m.to_v), x, self.stack, self.kernels.linear)
        else:
            q = product(m.to_q, x, multiply=self.kernels.linear)
            k, v = (self.prompt.of(layer, context) for layer in (m.to_k, m.to_v))
        return tuple(t.unflatten(-1, (m.heads, -1)).transpose(1, 2) for t in (q, k, v))


def _leaves(m: Any) -> str | None:
    reason = layer_reason(m.to_q, m.to_k, m.to_v, m.to_out[0]) or all_plain((m.group_norm, nn.GroupNorm))
    return reason or untouched(*m.to_out)


def match_attention(site: Site, context: Context) -> Match | Skip | None:
    """to_q, to_k, to_v, to_out and a processor that computes plain softmax attention, which the probe confirms."""
    m: Any = site.module
    if not holds(m, "to_q", "to_k", "to_v", "to_out") or not hasattr(m, "processor"):
        return None
    if isinstance(m.processor, nn.Module):
        return Skip(f"the processor {type(m.processor).__name__} has weights of its own")
    if (reason := foreign_processor(m)) is not None:
        return Skip(reason)
    for part in PARTS:
        if getattr(m, part, None) is not None:
            return Skip(f"{part}: not handled by the fused attention")
    missing = [name for name in ASKED if not hasattr(m, name)]
    if missing or not isinstance(m.to_out, nn.ModuleList):
        return Skip(f"an attention of another make, without {missing[0] if missing else 'a list to_out'}")
    if meta_weights(m):
        return Skip("weights are not loaded (meta device)")
    reason = None if len(m.to_out) else "no output projection"
    reason = reason or _leaves(m)
    if reason is not None:
        return Skip(reason)
    own = StackedLinears(ForwardCounter())  # a probe moves no weights beside others
    forward = AttentionForward(m, site.path, context.kernels, context.log, prompt=own)
    width, kwargs = m.to_q.in_features, {}
    x = example(m, 2, 6, width) if m.group_norm is None else example(m, 2, width, 3, 2)
    if m.group_norm is None and m.is_cross_attention:
        kwargs["encoder_hidden_states"] = example(m, 2, 5, m.to_k.in_features, seed=1)
    if (reason := context.probe.unlike(forward, (x,), kwargs)) is not None:
        return Skip(reason)
    forward.stack, forward.prompt = True, PromptProjections.shared(context)
    # Self-attention projects one input three times; every cross-attention projects the one prompt twice.
    bases = [base(one) for one in (m.to_q, m.to_k, m.to_v)]
    if any(map(keeps_forward, bases)):
        return Match(forward)
    if not m.is_cross_attention:
        return Match(forward, (Stacked(bases),))
    return Match(forward, forward.prompt.add(m.to_k, m.to_v))
