"""What follows a product before anything is written: one value that every product takes, plain or quantized."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from accel_kernels.elementwise.gated import gated
from accel_kernels.norm.norm import ACTIVATIONS

SEVERAL_PASSES = ("gelu_quick", "relu2")  # that activations take which are no operation of torch's


class EpilogueArguments(NamedTuple):
    """An epilogue as kernels take it, all but the gate's weight in one argument. With a gate two biases, or none.

    modulation: one row of it for all.
    """

    bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    residual: torch.Tensor | None
    scale: float
    addend: torch.Tensor | None = None
    share: torch.Tensor | None = None
    modulation: torch.Tensor | None = None


def by_part(y: torch.Tensor, modulation: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """residual + modulation * y, rounded once; modulation: as of `Epilogue`."""
    factor, parts = modulation[:, None], (len(modulation), -1, y.shape[-1])
    if residual is None:
        return (y.reshape(parts) * factor).view(y.shape)
    return torch.addcmul(residual.reshape(parts), y.reshape(parts), factor).view(y.shape)


class Epilogue(NamedTuple):
    """y = residual + modulation * scale * (addend + sigmoid(share) * h); h = act(product + bias), or with a gate
    act(product + bias) * (up product + up_bias).

    bias, up_bias: (N,) or None. up: a second weight, of the kind and shape of the product's own, or None.
    activation: a name of ACTIVATIONS or None; needed with `up`. residual: (..., N), of the dtype of the result, or
    None. scale: a float, the multiplier of what is added to the residual. modulation: (B, N) or None, a row of it for
    each of B equal parts of the rows of x: the gate of an adaptive norm (Peebles and Xie, "Scalable diffusion models
    with transformers", 2023). addend: (..., N) or None, what others give to the same sum. share: (..., 1) or None.
    spare: nobody reads the residual behind it, so that the result may take its place.

    A sum over ranks, where each has a part of the columns, belongs between the gate and the residual.
    """

    bias: torch.Tensor | None = None
    up: Any = None
    up_bias: torch.Tensor | None = None
    activation: str | None = None
    residual: torch.Tensor | None = None
    scale: float = 1.0
    modulation: torch.Tensor | None = None
    addend: torch.Tensor | None = None
    share: torch.Tensor | None = None
    spare: bool = False

    @property
    def plain(self) -> bool:
        """Whether a residual is all there may be."""
        others = self.bias, self.up, self.activation, self.modulation, self.addend, self.share
        nothing = all(one is None for one in others)
        return nothing and self.scale == 1.0

    def weights(self, weight: Any) -> Iterator[Any]:
        """The product's weight and its gate's, as far as there is one."""
        yield weight
        if self.up is not None:
            yield self.up

    def exact(self, weight: Any, product: Callable[..., torch.Tensor], wide: torch.dtype | None = None) -> torch.Tensor:
        """By torch, one operation after the other. product(weight, bias) multiplies; wide: the dtype of the sums."""
        y = product(weight, self.bias)
        if self.activation is not None:
            y = ACTIVATIONS[self.activation](y)
        if self.up is not None:
            y = y * product(self.up, self.up_bias)
        y = self._mixed(y)
        if self.scale != 1.0:
            y = y * self.scale
        if self.modulation is not None:
            y = by_part(y, self.modulation if wide is None else self.modulation.to(wide))
        if self.residual is None:
            return y
        return (self.residual if wide is None else self.residual.to(wide)) + y

    def in_passes(self, weight: Any, product: Callable[..., torch.Tensor]) -> torch.Tensor:
        """By torch's products, and a fused pass for a gate. product(weight, bias) multiplies."""
        y = product(weight, self.bias)
        if self.up is not None:
            y = gated(y, product(self.up, self.up_bias), self.activation)
        elif self.activation in SEVERAL_PASSES:
            y = gated(y, None, self.activation)
        elif self.activation is not None:
            y = ACTIVATIONS[self.activation](y)
        y = self._mixed(y)
        if self.residual is None or self.modulation is not None:
            y = y if self.scale == 1.0 else y * self.scale
        if self.modulation is not None:
            return by_part(y, self.modulation, self.residual)
        if self.residual is None:
            return y
        return torch.add(self.residual, y, alpha=self.scale)

    def _mixed(self, y: torch.Tensor) -> torch.Tensor:
        """With what others give to the sum."""
        share = None if self.share is None else self.share.sigmoid()
        if self.addend is None or share is None:
            y = y if share is None else y * share
            return y if self.addend is None else self.addend + y
        return torch.addcmul(self.addend, share, y)

    def refusal(self, weight: torch.Tensor, modulated: bool = False, mixed: bool = False) -> str | None:
        """Why no kernel takes it; weight: the product's own, or its numbers. modulated, mixed: whether this kernel can
        take a modulation, or an addend and a share.
        """
        if self.modulation is not None and not modulated:
            return "a modulation"
        if (self.addend is not None or self.share is not None) and not mixed:
            return "an addend or a share"
        if self.activation is not None and self.activation not in ACTIVATIONS:
            return f"activation {self.activation!r}"
        up = None if self.up is None else getattr(self.up, "data", self.up)
        if up is not None and (self.activation is None or up.shape != weight.shape or up.dtype != weight.dtype):
            return "a gate without activation, or of another shape or dtype"
        return None

    def shape_reason(self, rows: Sequence[int], n: int, dtype: torch.dtype) -> str | None:
        """Why its tensors do not belong to a result (*rows, n) of this dtype."""
        if self.residual is not None and (self.residual.dtype != dtype or self.residual.shape != (*rows, n)):
            return "residual of another shape or dtype than the result"
        shifts = [shift for shift in (self.bias, self.up_bias) if shift is not None]
        if any(shift.shape != (n,) or not shift.is_contiguous() for shift in shifts):
            return f"a bias that is not {n} numbers in a row"
        return None

    @property
    def arguments(self) -> EpilogueArguments:
        """All but the gate's weight."""
        bias, up_bias = self.bias, None if self.up is None else self.up_bias
        if up_bias is not None and bias is None:
            bias = torch.zeros_like(up_bias)
        elif self.up is not None and bias is not None and up_bias is None:
            up_bias = torch.zeros_like(bias)
        return EpilogueArguments(bias, up_bias, self.residual, float(self.scale), *self[7:9], self.modulation)

    @property
    def flags(self) -> dict[str, object]:
        """What kernels are compiled for, besides which of their arguments are None."""
        return {"GATE": self.up is not None, "ACTIVATION": self.activation}
