"""The experts of a mixture as they are stored: two stacks of matrices, biases, and the gate between them."""

from typing import NamedTuple

import torch

from accel_kernels.device import float8_reason
from accel_kernels.gemm.quantized_weight import Quantized
from accel_kernels.norm.norm import ACTIVATIONS

PLACE_BYTES = 16  # to which what `places` points at is aligned, and in which it counts
PLACES = 6  # numbers, scales and zeros of both stacks


class Gating(NamedTuple):
    """(up + shift) * act(gate), where gate is at most `limit`, and up between -limit and limit, if there is one.
    Where it is not `gated`, act(up), and nothing else.

    activation: a name of ACTIVATIONS. alpha: other than 1 only with "silu", which is then gate * sigmoid(alpha * gate),
    as GPT-OSS has it (OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025: alpha 1.702, limit 7, shift 1).
    """

    activation: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0
    gated: bool = True

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """In plain torch."""
        if not self.gated:
            return ACTIVATIONS[self.activation](up)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        act = ACTIVATIONS[self.activation](gate) if self.alpha == 1.0 else gate * torch.sigmoid(self.alpha * gate)
        return act * (up + self.shift if self.shift else up)

    def reason(self) -> str | None:
        """Why kernels do not know it."""
        if self.activation not in ACTIVATIONS:
            return f"activation {self.activation!r}"
        return f"alpha with {self.activation!r}" if self.alpha != 1.0 and self.activation != "silu" else None


class ExpertWeights(NamedTuple):
    """Experts e = 0 .. E-1 of H inputs and outputs and I inner channels: down_e (gating(gate_e x, up_e x)).

    gate_up: (E, 2 I, H), gates before ups, or in turn (gate, up, gate, ...) where `interleaved`; (E, I, H) without
    gates. down: (E, H, I). Both contiguous, or transposed views of what is: of stacks that are stored as (E, inputs,
    outputs). Or both `Quantized`, the rows of all experts behind each other: (E 2 I, H) and (E H, I). gate_up_bias:
    (E, 2 I) in the same order; down_bias: (E, H); both or none.

    places: (E, PLACES) int64, where of each expert numbers, scales and zeros lie, of `gate_up`, then of `down`: so many
    times PLACE_BYTES behind their place in the stack, be it in other memory that the device reads. What is there equals
    what the stack holds. None where each lies in its stack.
    """

    gate_up: torch.Tensor | Quantized
    down: torch.Tensor | Quantized
    gating: Gating = Gating()
    interleaved: bool = False
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    places: torch.Tensor | None = None

    @property
    def experts(self) -> int:
        return self.down.shape[0] // (self.hidden if isinstance(self.down, Quantized) else 1)

    @property
    def hidden(self) -> int:
        return self.gate_up.shape[-1]

    @property
    def inner(self) -> int:
        return self.down.shape[-1]

    @property
    def wide(self) -> int:
        """Rows of `gate_up` of an expert."""
        return self.inner * (1 + self.gating.gated)

    @property
    def by_rows(self) -> tuple[bool, bool]:
        """Whether each of the stacks is stored by rows; else transposed."""
        up, down = (one.data if isinstance(one, Quantized) else one for one in (self.gate_up, self.down))
        return up.is_contiguous(), down.is_contiguous()

    def parts(self) -> list[torch.Tensor | None]:
        """The tensors that `places` has a column for."""
        stacks = (one[:3] if isinstance(one, Quantized) else (one, None, None) for one in (self.gate_up, self.down))
        return [part for stack in stacks for part in stack]

    def steps(self) -> list[int]:
        """Bytes of one expert in each of `parts`, 0 where there is none."""
        return [0 if part is None else part.nbytes // self.experts for part in self.parts()]

    def matrices(self, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Both matrices of one expert, (2 I, H) and (H, I); quantized ones in this dtype."""
        pairs = ((self.gate_up, self.wide), (self.down, self.hidden))
        up, down = (
            one.rows(expert * rows, (expert + 1) * rows).dequantized(dtype)
            if isinstance(one, Quantized)
            else one[expert]
            for one, rows in pairs
        )
        return up, down

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates and ups of what `gate_up` gives, (..., 2 I); without gates the ups twice."""
        if not self.gating.gated:
            return y, y
        gate, up = (y[..., ::2], y[..., 1::2]) if self.interleaved else y.chunk(2, dim=-1)
        return gate, up

    def reason(self, dtype: torch.dtype) -> str | None:
        """Why kernels cannot read them, for tokens of this dtype."""
        experts, hidden, inner = self.experts, self.hidden, self.inner
        if hidden % 8 or inner % 8:
            return f"{hidden} or {inner} inputs, not a multiple of 8"
        reason = _quantized_reason(self) if isinstance(self.down, Quantized) else _plain_reason(self, dtype)
        if reason is not None:
            return reason
        if (self.gate_up_bias is None) != (self.down_bias is None):
            return "one bias of two"
        for name, bias, outputs in (("gate_up", self.gate_up_bias, self.wide), ("down", self.down_bias, hidden)):
            if bias is not None and (bias.shape != (experts, outputs) or not bias.is_contiguous()):
                return f"a bias of {name} of another shape, or not contiguous"
        if self.places is not None and (self.places.shape != (experts, PLACES) or not self.places.is_contiguous()):
            return "places of another shape, or not contiguous"
        return self.gating.reason()


def _plain_reason(weights: ExpertWeights, dtype: torch.dtype) -> str | None:
    up, down = weights.gate_up, weights.down
    if not isinstance(up, torch.Tensor) or not isinstance(down, torch.Tensor):
        return "one stack of two is quantized"
    if up.shape != (len(down), weights.wide, weights.hidden) or down.shape[1] != weights.hidden:
        return f"stacks that do not fit: {tuple(up.shape)} and {tuple(down.shape)}"
    if up.dtype != dtype or down.dtype != dtype:
        return "x and experts of different dtypes"
    for name, stack in {"gate_up": up, "down": down}.items():
        if not (stack.is_contiguous() or stack.transpose(1, 2).is_contiguous()):
            return f"{name} not contiguous, as it is or transposed"
    return None


def _quantized_reason(weights: ExpertWeights) -> str | None:
    up, down = weights.gate_up, weights.down
    if not isinstance(up, Quantized) or not isinstance(down, Quantized):
        return "one stack of two is quantized"
    if up.shape[0] != weights.experts * weights.wide or down.shape[0] % weights.hidden:
        return f"stacks that do not fit: {up.shape} and {down.shape}, all experts in one"
    if up.format != down.format or (up.zeros is None) != (down.zeros is None):
        return "stacks of different numbers"
    for one in (up, down):
        if one.format.bits == 8 and one.scales.shape[1] > 1:
            return "8 bits by groups"
        if (reason := one.reason() or float8_reason(one.data.device, one.data.dtype)) is not None:
            return reason
    return None
