"""The slopes of a bias by position (ALiBi, Press et al. 2022), found among the arguments of a layer."""

from collections.abc import Iterator

import torch

from accel.comparison import agree
from accel.llm.recording.record import LayerRecord


def slopes_given(layer: LayerRecord, heads: int, scale: float) -> Iterator[torch.Tensor | None]:
    """(heads,) slopes of a bias among the layer's arguments, as they stand and times the scale; None where it has none.

    The bias must be slope * key position, (rows * heads or heads, 1, tokens).
    """
    rows, tokens = layer.cached.keys.shape[0], layer.cached.keys.shape[2]
    given = (*layer.call.args, *layer.call.kwargs.values())
    biases = [t for t in given if isinstance(t, torch.Tensor) and t.numel() in (heads * tokens, rows * heads * tokens)]
    biases = [t for t in biases if t.dim() >= 3 and t.is_floating_point() and t.shape[-2:] == (1, tokens)]
    if not biases:
        yield None
        return
    bias = biases[0].reshape(-1, heads, tokens)[0].float()
    for slopes in (closed_form(heads).to(bias.device), bias[:, 1]):
        if agree(slopes[:, None] * torch.arange(tokens, device=bias.device), bias.to(biases[0].dtype)):
            yield slopes
            yield slopes * scale


def closed_form(heads: int) -> torch.Tensor:
    """The slopes of the paper: a geometric sequence, with every other one of the next where heads are no power of 2."""
    power = 1 << (heads.bit_length() - 1)
    steps = torch.arange(1, power + 1, device="cpu") * (-8.0 / power)
    more = torch.arange(1, 2 * (heads - power) + 1, 2, device="cpu") * (-4.0 / power)
    return 2.0 ** torch.cat((steps, more))
