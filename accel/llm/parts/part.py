"""Norms and linears as they are at the moment: fused where they are plain, called where something hangs on them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from accel_kernels import LowRank, Norm, Quantized, fused_linear
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.norm.norm import ACTIVATIONS
from torch import nn

from accel.fusion.stacked_linears import stacked_tensors
from accel.libraries.adapters import base
from accel.llm.parts.linear import MOST_MEASURED_ROWS, Weights, product_for, weights
from accel.llm.parts.norm import FLAT, HeadNorm, NormSpec, given, given_back
from accel.llm.recording.record import NotUnderstood
from accel.patching.fast_forward import Kernels
from accel.patching.guard import as_understood
from accel.patching.user_ops import UserOp
from accel.quantization.activations import many_rows
from accel.quantization.adapters import low_rank, low_rank_term, with_adapters
from accel.quantization.formats.stored import stored_product
from accel.quantization.product import Rows, rounded_product


class BoundNorm:
    """One norm: `norm` for a fused operation to do, or None; calling it gives the normed tensor."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: NormSpec):
        module = layer.get_submodule(spec.name)
        kind = spec.kind if as_understood(module, spec.settings) else None
        self.norm: Norm | None = None if kind is None else kind.of(module)
        plain = spec.gain and (not spec.name or as_understood(module, spec.settings))
        # By which the operation before it multiplies.
        self.gain = getattr(module, spec.gain) if plain else None
        self.call: Callable = module
        if not spec.name:
            if self.gain is None:
                raise NotUnderstood(f"{spec.gain} is gone")
            self.call = partial(torch.mul, self.gain)
        if self.norm is not None and (mine := users_norm(kernels, self.norm)) is not None:
            self.norm, self.call = None, mine

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x) if self.norm is None else apply_norm(x.contiguous(), self.norm)

    def of_sum(
        self, kernels: Kernels, y: torch.Tensor, residual: torch.Tensor, keep: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of y + residual, where it `takes_sum`, and that sum, which may be missing unless `keep`."""
        norm, y, residual = self.norm, y.contiguous(), residual.contiguous()
        assert norm is not None
        if norm.centered:
            return kernels.layer_norm(y, norm.weight, norm.bias, norm.eps, residual=residual, keep=keep)
        return kernels.rms_norm(y, norm.weight, norm.eps, offset=norm.offset, residual=residual)

    @property
    def takes_sum(self) -> bool:
        """Whether it can be of a sum that is made in the same pass."""
        norm = self.norm
        return norm is not None and (norm.offset == 0.0 if norm.centered else norm.bias is None)


class Branch(NamedTuple):
    """Adds scale * post(part(h)) to a residual, post or none. spare: nobody reads the residual behind it."""

    part: Callable[..., torch.Tensor]
    h: "NormedInput"
    residual: torch.Tensor
    scale: float
    post: BoundNorm | None
    spare: bool = False

    def added(self, kernels: Kernels, factor: torch.Tensor | None = None) -> torch.Tensor:
        """(residual + it) * factor."""
        part, h, residual, scale, post, spare = self
        last, dtype = getattr(part, "down", part), h.x.dtype
        mixes = isinstance(last, BoundLinear) and last.takes_wide(kernels)
        if post is not None and post.gain is not None and mixes and post.gain.dtype == residual.dtype == dtype:
            y = part(kernels, h, residual=residual, scale=scale, modulation=post.gain[None])
            return y if factor is None else y * factor
        wide = residual.dtype != dtype and not (last is part and mixes)
        if post is None and not wide:
            more = {"spare": True} if spare and mixes else {}
            y = part(kernels, h, residual=residual, scale=scale, **more)
        elif wide or post is None or post.norm is None or post.norm.centered or post.norm.bias is not None:
            y = part(kernels, h)
            y = torch.add(residual, y if post is None else post(y), alpha=scale)
        else:
            y = part(kernels, h).view(residual.shape)
            return kernels.norm_add(y.contiguous(), post.norm, residual.contiguous(), scale=scale, factor=factor)
        return y if factor is None else y * factor

    def summed(self, kernels: Kernels, norm: BoundNorm | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sum, and its norm where both are made in one pass."""
        if norm is None or not self._in_one_pass(norm):
            return self.added(kernels), None
        normed, total = norm.of_sum(kernels, self._alone(kernels), self.residual)
        return total, normed

    def normed(self, kernels: Kernels, norm: BoundNorm) -> torch.Tensor:
        """The norm of the sum."""
        if not self._in_one_pass(norm):
            return norm(self.added(kernels))
        return norm.of_sum(kernels, self._alone(kernels), self.residual, keep=False)[0]

    def _alone(self, kernels: Kernels) -> torch.Tensor:
        return self.part(kernels, self.h).view(self.residual.shape)

    def _in_one_pass(self, norm: BoundNorm) -> bool:
        """Whether rows are so many that a sum inside of the norm costs less than one inside of the product."""
        x, plain = self.residual, self.post is None and self.scale == 1.0
        many = x.is_cuda and x.numel() > MOST_MEASURED_ROWS * x.shape[-1]
        return plain and many and norm.takes_sum and x.dtype == self.h.x.dtype


def users_norm(kernels: Kernels, norm: Norm) -> Callable | None:
    """The user's function that computes this norm by itself; None where the user registered none."""
    centered = norm.centered and norm.offset == 0.0
    op = kernels.layer_norm if centered else kernels.rms_norm
    if not isinstance(op, UserOp) or (not centered and (norm.centered or norm.bias is not None)):
        return None
    if centered:
        return lambda x: op(x.contiguous(), norm.weight, norm.bias, norm.eps)
    return lambda x: op(x.contiguous(), norm.weight, norm.eps, offset=norm.offset)


class BoundHeadNorm:
    """One norm of queries or keys: `fused` for the attention to do, or None; then calling it gives the normed heads."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: HeadNorm, dim: int, device: torch.device):
        self.bound, self.layout = BoundNorm(kernels, layer, spec.norm), spec.layout
        norm = self.bound.norm
        inside = norm is not None and not norm.centered and norm.bias is None and spec.layout != FLAT
        if norm is not None and norm.weight is None:
            norm = norm._replace(weight=torch.ones(dim, device=device))
        self.fused = norm if inside else None

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        """t: (rows, new, heads, D)."""
        return given_back(self.bound(given(t, self.layout)), self.layout, t.shape[-1])


class NormedInput(Rows):
    """The input of `times` projections: the norm before them is done inside each, or once where that costs less."""

    __slots__ = ("times",)

    def __init__(self, x: torch.Tensor, norm: BoundNorm | None = None, times: int = 1):
        if norm is None:
            super().__init__(x)
        elif norm.norm is None:
            super().__init__(norm(x))
        else:
            super().__init__(x, norm.norm)
        self.times = times

    def given(self, free: bool = False) -> tuple[torch.Tensor, Norm | None]:
        """What an operation is given that takes a norm before its product. free: it costs nothing there."""
        once = self.norm is not None and self.times > 1 and not free and many_rows(self.x)
        return (self.normed(), None) if once else (self.x, self.norm)


def part_product(
    kernels: Kernels,
    weights: Weights,
    before: NormedInput,
    *,
    up: Weights | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    **mixed: Any,
) -> torch.Tensor:
    """residual + scale * activation(linear(norm(x))), or with weights `up` the gated product of both.

    mixed: addend, share and modulation of `Epilogue`, of a linear that `takes_wide`; low_rank: as `adapted` gives it.
    Where the inputs are divided among ranks, the sum over all of them stands for the product.
    """
    weight, bias = weights.operands()
    if weights.ranks is not None:
        part = _product(kernels, weights, before, weight, None)
        act = None if activation is None else ACTIVATIONS[activation]
        return weights.ranks.reduce(part, bias, act, residual, scale)
    given: dict[str, Any] = {"activation": activation, "residual": residual, "scale": scale, **mixed}
    if up is not None:
        given["up"], given["up_bias"] = up.operands()
    return _product(kernels, weights, before, weight, bias, **given)


def _product(
    kernels: Kernels, weights: Weights, before: NormedInput, weight: Any, bias: torch.Tensor | None, **given: Any
) -> torch.Tensor:
    """The one place that says which rows go where: in 8 bits, to a weight as it lies, or to a plain one."""
    if weights.in_blocks:
        one_row = before.x.numel() == weight.shape[1]  # of more rows the op would norm them in a pass of its own
        x, norm = (before.x, before.norm) if one_row else (before.normed(), None)
        more = {"bias": bias, "norm": norm, **given}
        return stored_product(kernels.quantized_linear, x, weight, weights.stored.dtype, before.normed, **more)
    if not isinstance(weight, Quantized):
        x, norm = before.given()
        multiply = product_for(kernels, x, weight.shape[0], given.get("activation"), given.get("up") is not None)
        return multiply(x, weight, bias, norm=norm, **given)
    if (activations := weights.module.rounds(before.x)) is not None:
        return rounded_product(weights.module, activations, before, weight, bias, **given)
    if weight.order is not None:
        inside = before.x.is_cuda and before.x.numel() <= weight.most_rows * before.x.shape[-1]
        order = weight.order if inside else None  # else columns of x are gathered once for all of one order
        if isinstance(up := given.get("up"), Quantized):
            given["up"] = up._replace(order=order)
        if not inside:
            x = before.ordered(weights.module, weight)
            return kernels.quantized_linear(x, weight._replace(order=None), bias, **given)
    # The kernel of a weight that is read as it lies takes the columns of x in another order, and norms in one pass.
    x, norm = before.given(free=before.x.numel() <= weight.most_rows * before.x.shape[-1])
    return kernels.quantized_linear(x, weight, bias, norm=norm, **given)


def adapted(
    kernels: Kernels, linears: "Sequence[BoundLinear]", weights: Weights | None, x: torch.Tensor, gate: bool = False
) -> dict[str, Any]:
    """What adapters add to the one product of these linears by `weights`, as an argument of `part_product`; nothing
    where that cannot take it. gate: as of `low_rank_term`.
    """
    own = kernels.fused_linear in (fused_linear, fused_linear.reference)  # and not a user's
    if not own or weights is None or weights.quantized or weights.ranks is not None:
        return {}
    plain = weights.tensors()[0]
    alike = plain is not None and plain.dtype == x.dtype
    term = low_rank_term([one.module for one in linears], x, gate) if alike else None
    return {} if term is None else {"low_rank": term}


class BoundLinear:
    """One linear: `weights` to multiply with, None where the module must be called. base: those under its adapters."""

    def __init__(self, module: nn.Module):
        self.module, self.weights = module, weights(module)
        inner = base(module)
        self.base = None if inner is module else weights(inner)

    def takes_wide(self, kernels: Kernels) -> bool:
        """Whether its product takes all of `Epilogue`, and float32 beside weights in 16 bits."""
        own = kernels.fused_linear in (fused_linear, fused_linear.reference)  # and not a user's
        return own and self.weights is not None and not self.weights.quantized and self.weights.ranks is None

    def __call__(
        self,
        kernels: Kernels,
        before: NormedInput,
        activation: str | None = None,
        residual: torch.Tensor | None = None,
        scale: float = 1.0,
        **mixed: Any,
    ) -> torch.Tensor:
        """residual + scale * activation(linear(norm(x))). mixed: as of `part_product`."""
        if self.weights is not None:
            given: dict[str, Any] = {"activation": activation, "residual": residual, "scale": scale, **mixed}
            return part_product(kernels, self.weights, before, **given)
        if self.base is not None and (low := adapted(kernels, [self], self.base, before.x)):
            return part_product(
                kernels, self.base, before, activation=activation, residual=residual, scale=scale, **low, **mixed
            )
        y = self._adapted(kernels, before)
        if activation is not None:
            y = ACTIVATIONS[activation](y)
        return y if residual is None else torch.add(residual, y, alpha=scale)

    def adapters(self, before: NormedInput) -> tuple[LowRank, ...] | None:
        """Those of low rank; None where the module does more. Read now, as they may have been switched meanwhile."""
        if self.weights is not None:
            return ()
        known = self.base is not None and self.base.ranks is None
        return low_rank(self.module, before.normed()) if known else None

    def _adapted(self, kernels: Kernels, before: NormedInput) -> torch.Tensor:
        """What the module gives."""
        adapters = self.adapters(before)
        if adapters is None or self.base is None:
            return self.module(before.normed())
        y = part_product(kernels, self.base, before)
        return with_adapters(before.normed(), [y], [adapters])[0] if adapters else y


class BoundProjections(list[BoundLinear]):
    """Linears of one input: one product where their weights lie in one storage, to whose parts adapters add."""

    def __init__(self, layer: nn.Module, names: Sequence[str], stack: bool):
        """stack: the weights may be put into one storage."""
        super().__init__(BoundLinear(layer.get_submodule(name)) for name in names)
        found = [one.base if one.weights is None else one.weights for one in self]
        parts = [part for part in found if part is not None]
        self.joint = stacked(parts, stack) if len(parts) == len(found) > 1 else None
        self.sizes = [part.outputs for part in parts]
        self.plain = all(one.weights is not None for one in self)

    def __call__(self, kernels: Kernels, h: NormedInput) -> Sequence[torch.Tensor]:
        """What each gives, (rows, new, N)."""
        if (products := self._adapted(kernels, h)) is not None:
            return products.split(self.sizes, dim=-1)
        adapters = [] if self.joint is None or self.plain else [one.adapters(h) for one in self]
        known = [own for own in adapters if own is not None]
        if self.joint is None or len(known) < len(adapters):
            return [linear(kernels, h) for linear in self]
        products = part_product(kernels, self.joint, h).split(self.sizes, dim=-1)
        return with_adapters(h.normed(), products, known) if any(known) else products

    def side_by_side(self, kernels: Kernels, h: NormedInput) -> torch.Tensor:
        """(rows, new, N) of all."""
        if self.joint is not None and self.plain:
            return part_product(kernels, self.joint, h)
        if (products := self._adapted(kernels, h)) is not None:
            return products
        outputs = self(kernels, h)
        return torch.cat(list(outputs), -1) if len(outputs) > 1 else outputs[0].contiguous()

    def _adapted(self, kernels: Kernels, h: NormedInput) -> torch.Tensor | None:
        """The one product with what adapters add; None where it cannot take them with it."""
        if self.joint is None or self.plain:
            return None
        low = adapted(kernels, self, self.joint, h.x)
        return part_product(kernels, self.joint, h, **low) if low else None


def stacked(parts: list[Weights], stack: bool) -> Weights | None:
    """All as one; None where they do not lie in one storage, and cannot or may not be put there."""
    if any(part.transposed or part.in_blocks for part in parts) or not all(parts[0].fits(part) for part in parts):
        return None
    if stacked_tensors([part.module for part in parts], stack, fill=True) is None:
        return None
    return parts[0]._replace(rows=(0, sum(part.outputs for part in parts)))
