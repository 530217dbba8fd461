"""The experts of a mixture as they are stored: two stacks of matrices, biases, and the gate between them."""

from typing import NamedTuple

import torch

from accel_kernels.norm.norm import ACTIVATIONS


class Gating(NamedTuple):
    """(up + shift) * act(gate), where gate is at most `limit`, and up between -limit and limit, if there is one.

    activation: a name of ACTIVATIONS. alpha: other than 1 only with "silu", which is then gate * sigmoid(alpha * gate),
    as GPT-OSS has it (OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025: alpha 1.702, limit 7, shift 1).
    """

    activation: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """In plain torch."""
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

    gate_up: (E, 2 I, H), gates before ups, or in turn (gate, up, gate, ...) where `interleaved`. down: (E, H, I). Both
    contiguous, or transposed views of what is: of stacks that are stored as (E, inputs, outputs). gate_up_bias:
    (E, 2 I) in the same order; down_bias: (E, H); both or none.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gating: Gating = Gating()
    interleaved: bool = False
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @property
    def experts(self) -> int:
        return self.down.shape[0]

    @property
    def hidden(self) -> int:
        return self.down.shape[1]

    @property
    def inner(self) -> int:
        return self.down.shape[2]

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates and ups of what `gate_up` gives, (..., 2 I)."""
        gate, up = (y[..., ::2], y[..., 1::2]) if self.interleaved else y.chunk(2, dim=-1)
        return gate, up

    def reason(self) -> str | None:
        """Why kernels cannot read them."""
        experts, wide, hidden = self.gate_up.shape
        if self.down.shape != (experts, hidden, wide // 2) or wide % 2:
            return f"stacks that do not fit: {tuple(self.gate_up.shape)} and {tuple(self.down.shape)}"
        if hidden % 8 or self.inner % 8:
            return f"{hidden} or {self.inner} inputs, not a multiple of 8"
        if self.gate_up.dtype != self.down.dtype:
            return "stacks of different dtypes"
        for name, stack in {"gate_up": self.gate_up, "down": self.down}.items():
            if not (stack.is_contiguous() or stack.transpose(1, 2).is_contiguous()):
                return f"{name} not contiguous, as it is or transposed"
        if (self.gate_up_bias is None) != (self.down_bias is None):
            return "one bias of two"
        for name, bias, outputs in (("gate_up", self.gate_up_bias, wide), ("down", self.down_bias, hidden)):
            if bias is not None and (bias.shape != (experts, outputs) or not bias.is_contiguous()):
                return f"a bias of {name} of another shape, or not contiguous"
        return self.gating.reason()
