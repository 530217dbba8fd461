"""Short prompts through CUDA graphs: filled up on the right to one of a few lengths, one graph a length.

Causal attention hides what stands behind a token, so the filling changes nothing for the prompt itself. It repeats the
last token at the last position, both valid wherever the prompt is, and no greater than what the prompt has. What it
writes into the store lies beyond the stored length, where any later token overwrites it before it is read.
"""

from collections.abc import Callable
from typing import Any

import torch
from accel_kernels.gemm.fused_linear import MOST_ROWS
from transformers import PreTrainedModel

from accel.cuda_graphs.fingerprint import Fingerprint
from accel.cuda_graphs.runner import GraphRunner

# Tokens of all rows. Launching a forward takes Python some 15 to 45 ms, in which a GPU reads 500 tokens of a model of 8
# billion weights, 2000 where both factors have 8 bits, or several thousand of one of half a billion; a graph that gains
# nothing over that is not kept, and longer ones are not tried.
MOST = 4096
# Tokens of all rows from one length to the next: what is computed in vain stays below 64 rows of each product, which
# costs little more than the walk over its weights; of more than FINE tokens, below 128. All lengths together are 50
# graphs a number of rows.
STEP, FINE = 64, 2048


def bucket_for(rows: int, new: int) -> int | None:
    """The length that prompts of `new` tokens a row are filled up to; None where they are too many for a graph."""
    if rows * new > MOST:
        return None
    most = MOST_ROWS // rows if rows * new <= MOST_ROWS else MOST  # of few rows products are others than of many
    step = max(1, (STEP if rows * new <= FINE else 2 * STEP) >> (rows - 1).bit_length())
    for short in (step // 4, step // 2):
        if new <= short:
            return min(short, most)
    return min(-(-new // step) * step, most)


def pad_to_bucket(
    tokens: torch.Tensor, positions: torch.Tensor, bucket: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens: (rows, new) numbers or (rows, new, C) embeddings; positions: (1 or rows, new), or parts of that shape.

    Gives both with `bucket` tokens, and the place of the last real one, (1,) int64, without waiting for the GPU.
    """
    new = tokens.shape[1]
    last = torch.full((1,), new - 1, dtype=torch.int64, device=tokens.device)
    if new == bucket:
        return tokens.contiguous(), positions.contiguous(), last
    return _longer(tokens, 1, bucket), _longer(positions, positions.dim() - 1, bucket), last


def _longer(t: torch.Tensor, dim: int, bucket: int) -> torch.Tensor:
    """t with its last slice along dim repeated until there are `bucket`."""
    end = t.narrow(dim, t.shape[dim] - 1, 1)
    return torch.cat((t, end.expand(*t.shape[:dim], bucket - t.shape[dim], *t.shape[dim + 1 :])), dim=dim)


class Prompts:
    """Reads short prompts of one model. runner: of graphs of its own, so that lengths never drive decode steps out."""

    def __init__(self, runner: GraphRunner):
        self.runner = runner
        self.missed: tuple[Fingerprint, int] | None = (
            None  # the model as it was, and how many tokens were too many for a graph to gain
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"runner": self.runner, "missed": None}

    def forget(self) -> None:
        self.missed = None

    def bucket(
        self, module: PreTrainedModel, tokens: torch.Tensor, positions: torch.Tensor | None, keep: int
    ) -> int | None:
        """The length to fill up to, or None for a prompt that is read as it is.

        Only where the last token's logits alone are wanted: all of them would be kept for every graph, and copied.
        """
        if positions is None or keep != 1 or not self.captures(tokens):
            return None
        rows, new = tokens.shape[:2]
        bucket = bucket_for(rows, new)
        if bucket is not None and self.missed is not None:
            fingerprint, least = self.missed
            if fingerprint is self.runner.fingerprint and rows * bucket >= least and fingerprint.holds():
                return None
        most = getattr(module.config.get_text_config(), "max_position_embeddings", None)
        if bucket is None or not isinstance(most, int) or bucket <= most:
            return bucket
        return most if new <= most else None  # no more tokens than the model may have tables for

    @staticmethod
    def captures(tokens: torch.Tensor) -> bool:
        return tokens.is_cuda and not torch.cuda.is_current_stream_capturing()

    def __call__(
        self,
        eager: Callable,
        plain: Callable,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        metadata: torch.Tensor,
        bucket: int,
        masked: bool,
    ) -> torch.Tensor:
        """Logits of the last real token, (rows, 1, vocabulary).

        eager(tokens, positions, where, last): the prompt filled up; plain(): as it is, for where no graph is to be.
        """
        without = []

        def instead() -> torch.Tensor:
            without.append(plain())
            return without[-1]

        tokens, positions, last = pad_to_bucket(tokens, positions, bucket)
        variant = ("prompt", "mask") if masked else ("prompt",)
        logits = self.runner(eager, (tokens, positions, metadata, last), {}, variant, instead=instead)
        # Not only timed, to be compared with a graph; and not because of a hook, or whatever else will pass.
        if without and logits is without[-1] and self.runner.reason is None:
            if (model := self.runner.fingerprint) is not None:
                self.missed = model, tokens.shape[0] * bucket
        return logits
