"""Transformer blocks over images: the block itself, and the norm and projections around a stack of blocks.

Each sublayer's output is added to the residual stream and normalized in one pass. The projections around the stack are
matrix products: on a GPU a channels-last image is a row matrix already.
"""

from collections.abc import Iterable
from typing import Any

import torch
from accel_kernels import Norm
from accel_kernels.warmup import warming_up
from torch import nn

from accel.casting import cast_up
from accel.diffusion.blocks.attention import AttentionForward
from accel.fusion.channels_last import as_image, as_image_like, as_rows, keep_channel_stats, nhwc, normalize, project
from accel.libraries.diffusion import image_output
from accel.patching.fast_forward import NOTHING, FastForward, Kernels
from accel.patching.guard import Guard, Parts
from accel.patching.probe import example
from accel.patching.rule import Context, Match, Site, Skip
from accel.patching.structure import all_plain, holds, no_tensor, plain, pointwise
from accel.patching.user_ops import UserOp
from accel.quantization.module import row_tensors
from accel.quantization.product import (
    Rows,
    base,
    deferred,
    joint_term,
    keeps_forward,
    layer_reason,
    matrix,
    product,
    rounded_geglu,
    rounded_product,
    rounds,
)

NOT_POINTWISE = "a projection that is not 1x1"


class ResidualStream:
    """The rows that blocks add to: x + last + bias. The next operation that reads x adds the other two."""

    last: torch.Tensor | None

    def __init__(self, x: torch.Tensor, bias: torch.Tensor | None = None):
        self.x, self.last, self.bias = x, None, bias

    def add(self, last: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        # Not the parameter itself, which may be stored in fewer bits again by the time that it is added.
        self.last, self.bias = last.contiguous(), None if bias is None else bias.detach()

    def settle(self, x: torch.Tensor) -> None:
        """Sets the sum of all three, computed by the caller."""
        self.x, self.last, self.bias = x, None, None

    def total(self, kernels: Kernels) -> torch.Tensor:
        """The sum, computed now where something is still to be added."""
        if self.last is not None:
            rows, residual = (as_image(t, t.shape[1], 1) for t in (self.last, self.x))
            self.settle(as_rows(kernels.image_sum(rows, residual, self.bias, channel_stats=False)[0]))
        elif self.bias is not None:
            self.settle(self.x + self.bias)
        return self.x


class TransformerBlockForward(FastForward):
    """(B, S, C) -> (B, S, C): self-attention, cross-attention and GEGLU feed-forward, each after a LayerNorm.

    A sublayer's output and bias are added by the norm after it, or by the product itself where rows are rounded.
    """

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.feed_forward = Guard(self.feed_forward_parts())

    def unfit(self, hidden_states: Any, *args: Any, cross_attention_kwargs: Any = None, **kwargs: Any) -> str | None:
        if type(hidden_states) is not torch.Tensor or hidden_states.dim() != 3:
            return "input that is not a (batch, length, channels) tensor"
        if args:
            return "arguments given by position"
        if cross_attention_kwargs and "gligen" in cross_attention_kwargs:
            return "GLIGEN conditions"
        return None

    def parts(self) -> Parts:
        m = self.module
        return Parts((m, m.norm1, m.norm2, m.norm3))

    def answered_layers(self) -> tuple:
        return self.feed_forward_parts().answered

    def feed_forward_parts(self) -> Parts:
        """Of the feed-forward, which is called as the module it is where something in it has changed."""
        ff = self.module.ff
        up, between, down, *after = ff.net
        return Parts((ff, up, between, *after), answered=(getattr(up, "proj", None), down))

    def fast(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        timestep: Any = None,
        cross_attention_kwargs: dict | None = None,
        class_labels: Any = None,
        added_cond_kwargs: Any = None,
    ) -> Any:
        stream = ResidualStream(hidden_states.contiguous())
        self.advance(stream, attention_mask, encoder_hidden_states, encoder_attention_mask, cross_attention_kwargs)
        return stream.total(self.kernels)

    def advance(
        self,
        stream: ResidualStream,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cross_attention_kwargs: dict | None = None,
    ) -> None:
        """Runs the block on a stream. What the last sublayer adds is left to the next reader of the stream."""
        m = self.module
        extra = cross_attention_kwargs or {}
        rows = self._norm(m.norm1, stream, getattr(m.attn1, "to_q", None))
        context = encoder_hidden_states if m.only_cross_attention else None
        self._attend(m.attn1, stream, rows, context, attention_mask, extra)
        if m.attn2 is not None:
            rows = self._norm(m.norm2, stream, getattr(m.attn2, "to_q", None))
            self._attend(m.attn2, stream, rows, encoder_hidden_states, encoder_attention_mask, extra)
        self._feed_forward(stream, self._norm(m.norm3, stream, getattr(m.ff.net[0], "proj", None)))

    def _norm(self, norm: nn.LayerNorm, stream: ResidualStream, first: nn.Module | None) -> Rows:
        """The norm of the settled stream; where `first` rounds its rows, the norm is done with the rounding."""
        mine = isinstance(self.kernels.layer_norm, UserOp)  # it cannot be done with the rounding
        if not mine and rounds(first, stream.x) is not None:
            return Rows(stream.total(self.kernels), Norm(norm.weight, norm.bias, norm.eps, centered=True))
        if stream.last is None and stream.bias is None:
            return Rows(self.kernels.layer_norm(stream.x, norm.weight, norm.bias, norm.eps))
        x, residual = (stream.x, None) if stream.last is None else (stream.last, stream.x)
        addends = {"residual": residual, "shift": stream.bias}
        normed, total = self.kernels.layer_norm(x, norm.weight, norm.bias, norm.eps, **addends)
        stream.settle(total)
        return Rows(normed)

    def _attend(
        self,
        attention: Any,
        stream: ResidualStream,
        rows: Rows,
        context: torch.Tensor | None,
        mask: torch.Tensor | None,
        extra: dict,
    ) -> None:
        """Adds an attention's output to the stream; one that is not fused is called as a module."""
        call = {"encoder_hidden_states": context, "attention_mask": mask}
        fused = AttentionForward.taken(attention, rows.x, **call, **extra)
        if fused is not None and fused.adds_nothing():
            with fused.weights():
                self._project(stream, attention.to_out[0], fused.attended(rows, context, mask))
        else:
            stream.add(attention(rows.normed(), **call, **extra))

    def _project(self, stream: ResidualStream, linear: Any, x: torch.Tensor) -> None:
        """Adds x W^T + b to a settled stream: in the product where rows are rounded, else in the next pass."""
        if (activations := rounds(linear, x)) is not None:
            residual = stream.x.contiguous()
            weight, bias = linear.quantized, linear.bias
            stream.settle(rounded_product(linear, activations, Rows(x), weight, bias, residual=residual))
        else:
            defer = deferred(linear, x)
            stream.add(product(linear, x, not defer, self.kernels.linear), linear.bias if defer else None)

    def _feed_forward(self, stream: ResidualStream, rows: Rows) -> None:
        reason = self.feed_forward.changed(None, self.feed_forward_parts)
        if reason is not None:  # only that part runs through its modules
            self.log.fell_back(f"{self.path}.ff", reason)
            stream.add(self.module.ff(rows.normed()))
            return
        with cast_up(self.feed_forward.casts) if self.feed_forward.casts else NOTHING:
            self._multiply(stream, rows)

    def _multiply(self, stream: ResidualStream, rows: Rows) -> None:
        net = self.module.ff.net
        up, down = net[0].proj, net[2]
        own = not isinstance(self.kernels.linear_geglu, UserOp)
        if (activations := rounds(up, rows.x)) is not None:
            h = rounded_geglu(up, activations, rows)
        elif keeps_forward(up) and own and (term := joint_term((up,), rows.x)) is not None:
            h = self.kernels.linear_geglu(rows.normed().contiguous(), *row_tensors(base(up)), low_rank=term)
        elif keeps_forward(up):
            value, gate = product(up, rows, multiply=self.kernels.linear).chunk(2, dim=-1)
            h = self.kernels.gated(gate, value, "gelu")
        else:
            x = rows.normed()
            h = self.kernels.linear_geglu(x, matrix(up, x.dtype), up.bias)
        self._project(stream, down, h)


class TransformerStackForward(FastForward):
    """(N, C, H, W) image through norm, projection, blocks, projection and residual, channels-last throughout."""

    def unfit(self, hidden_states: Any, *args: Any, **kwargs: Any) -> str | None:
        if args and len(args) > 1:
            return "arguments given by position"
        layers = (self.module.proj_in, self.module.proj_out)
        fit = all(type(layer) is not nn.Conv2d or pointwise(layer) for layer in layers)
        return no_tensor(hidden_states) or (None if fit else NOT_POINTWISE)

    def parts(self) -> Parts:
        m = self.module
        return Parts((m,), (m.norm,), (m.proj_in, m.proj_out))

    def fast(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        timestep: Any = None,
        added_cond_kwargs: Any = None,
        class_labels: Any = None,
        cross_attention_kwargs: dict | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        m = self.module
        x = nhwc(hidden_states)
        h = normalize(self.kernels, x, m.norm)
        fold = deferred(m.proj_in, rows := as_rows(h))
        stream = ResidualStream(
            project(rows, x, m.proj_in, not fold, self.kernels.linear), m.proj_in.bias if fold else None
        )
        call: dict[str, Any] = {
            "attention_mask": _as_bias(attention_mask, x.dtype),
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": _as_bias(encoder_attention_mask, x.dtype),
            "cross_attention_kwargs": cross_attention_kwargs,
        }
        for block in _kinds(m.transformer_blocks) if warming_up() else m.transformer_blocks:
            fused = TransformerBlockForward.taken(block, stream.x, **call)
            if fused is not None:
                with fused.weights():
                    fused.advance(stream, **call)
            else:
                rows = block(stream.total(self.kernels), timestep=timestep, class_labels=class_labels, **call)
                stream.settle(rows)
        fold = deferred(m.proj_out, rows := stream.total(self.kernels))
        h = as_image_like(project(rows, x, m.proj_out, not fold, self.kernels.linear), x)
        out = keep_channel_stats(self.kernels.image_sum(h, x, m.proj_out.bias if fold else None))
        return image_output(out) if return_dict else (out,)


def _kinds(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The first two blocks of each kind launch all its kernels; the very first has nothing to add to its stream."""
    found: dict[str, list[nn.Module]] = {}
    for block in blocks:
        tensors = [(name, one.shape, one.dtype) for name, one in block.named_parameters()]
        found.setdefault(repr(tensors), []).append(block)
    return [block for alike in found.values() for block in alike[:2]]


def _as_bias(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A (B, S) keep-mask as the (B, 1, S) bias the blocks expect; a bias stays as it is."""
    if mask is None or mask.dim() != 2:
        return mask
    return ((1 - mask.to(dtype)) * -10000.0).unsqueeze(1)


def _projections(m: Any) -> str | None:
    for layer in (m.proj_in, m.proj_out):
        if (reason := layer_reason(layer)) is not None:
            return reason
        if type(layer) is nn.Conv2d and not pointwise(layer):
            return NOT_POINTWISE
    return plain(m.norm, nn.GroupNorm)


def match_transformer_block(site: Site, context: Context) -> Match | Skip | None:
    """norm1, attn1, (norm2, attn2,) norm3 and a gated feed-forward; confirmed by running it."""
    m: Any = site.module
    if not holds(m, "norm1", "attn1", "norm3", "ff") or not hasattr(m, "attn2"):
        return None
    if not hasattr(m, "only_cross_attention") or getattr(m, "pos_embed", None) is not None:
        return Skip("a transformer block of another make")
    net: Any = getattr(m.ff, "net", ())
    if len(net) < 3 or layer_reason(getattr(net[0], "proj", None), net[2]):
        return Skip("a feed-forward of another make")
    if not holds(m.attn1, "to_q") or (m.attn2 is not None and not holds(m.attn2, "to_k")):
        return Skip("attentions of another make")
    reason = all_plain(*((norm, nn.LayerNorm) for norm in (m.norm1, m.norm2, m.norm3)))
    if reason is not None:
        return Skip(reason)
    forward = TransformerBlockForward(m, site.path, context.kernels, context.log)
    x, given = example(m, 2, 6, m.attn1.to_q.in_features), {}
    if m.attn2 is not None and m.attn2.is_cross_attention:
        given["encoder_hidden_states"] = example(m, 2, 5, m.attn2.to_k.in_features, seed=1)
    reason = context.probe.unlike(forward, (x,), given)
    return Match(forward, covers=("norm1", "norm2", "norm3", "ff")) if reason is None else Skip(reason)


def match_transformer_stack(site: Site, context: Context) -> Match | Skip | None:
    """GroupNorm, projection, blocks, projection over a continuous image."""
    m: Any = site.module
    if not holds(m, "norm", "proj_in", "transformer_blocks", "proj_out") or not hasattr(m, "is_input_continuous"):
        return None
    if not m.is_input_continuous:
        return Skip("input that is not a continuous image")
    if (reason := _projections(m)) is not None:
        return Skip(reason)
    forward = TransformerStackForward(m, site.path, context.kernels, context.log)
    cross = getattr(m.transformer_blocks[0], "attn2", None)
    given: dict[str, Any] = {"return_dict": False}
    if cross is not None and cross.is_cross_attention:
        given["encoder_hidden_states"] = example(m, 2, 5, cross.to_k.in_features, seed=1)
    reason = context.probe.unlike(forward, (example(m, 2, m.norm.num_channels, 3, 2),), given)
    return Match(forward, covers=("norm", "proj_in", "proj_out")) if reason is None else Skip(reason)
