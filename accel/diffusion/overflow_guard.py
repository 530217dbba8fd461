"""Decoders that overflow in float16: noticed after each decode, and that decode done again in float32.

Float16 ends at 65504. The activations of some VAE decoders go beyond, SDXL's original one for certain, and what stock
then gives is a black image. Convolutions of a decoder in float32 may be in float16 here: see
`accel.fusion.half_operands`.
"""

from typing import Any

import torch

from accel.cuda_graphs.rule import GraphForward, match_graph
from accel.fusion.half_operands import HalfOperands
from accel.patching.fast_forward import FastForward, as_written
from accel.patching.rule import Context, Match, Site
from accel.verification.precision import in_dtype, upcast

PLAIN = (torch.Tensor, type(None), bool, int, float, str)


class OverflowGuard(FastForward):
    """Around a decoder's forward, its CUDA graph included: (N, C, H, W) -> a finite image of the same dtype.

    One reduction over the output is all it costs where nothing overflows; where nothing is in float16, nothing. What it
    redoes runs the stock forwards, of float16 those of an upcast twin, so neither weights nor graphs notice.
    """

    inner: FastForward | None  # None: the stock forward
    half: HalfOperands

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        output = (self.inner or self.stock)(*args, **kwargs)
        if not self._watches(output, args, kwargs) or finite(output):
            return output
        if output.dtype is torch.float32:
            return self._as_stock(output, args, kwargs)
        return self._in_float32(output, args, kwargs)

    call = fast  # fit for every call: what is inside decides for itself

    def _watches(self, output: object, args: tuple, kwargs: dict) -> bool:
        """An image, in float16 or by way of it, from arguments that a second call finds as they were."""
        return (
            type(output) is torch.Tensor
            and (output.dtype is torch.float16 or self.half.takes(output))
            and not torch.compiler.is_compiling()
            and self.mode() is None
            and all(type(value) in PLAIN for value in (*args, *kwargs.values()))
            and not (output.is_cuda and torch.cuda.is_current_stream_capturing())
        )

    def _in_float32(self, output: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
        args = tuple(in_dtype(value, torch.float32) for value in args)
        kwargs = {name: in_dtype(value, torch.float32) for name, value in kwargs.items()}
        try:
            wide = upcast(self.module, torch.float32)(*args, **kwargs).to(output.dtype)
        except ValueError as error:  # offloaded, quantized, or replaced in part
            return self._left(output, f"overflowed in float16; not decoded again: {error}")
        except torch.OutOfMemoryError:
            return self._left(output, "overflowed in float16; not enough memory to decode in float32")
        if not finite(wide):
            return self._left(output, "not finite in float16, nor when decoded in float32")
        self.log.fell_back(self.path, "overflowed in float16; decoded in float32")
        return wide

    def _as_stock(self, output: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
        with as_written():
            wide = self.stock(*args, **kwargs)
        if not finite(wide):
            return wide
        self.half.on = False
        self.log.fell_back(self.path, "overflowed with convolutions in float16; they are in TF32 from now on")
        return wide

    def _left(self, output: torch.Tensor, reason: str) -> torch.Tensor:
        self.log.fell_back(self.path, reason)
        return output


def finite(image: torch.Tensor) -> bool:
    """Whether all of an image is finite: its sum in a wider dtype is, and cannot overflow by itself."""
    wider = torch.float32 if image.dtype is torch.float16 else torch.float64
    return bool(image.sum(dtype=wider).isfinite())


def match_overflow_guard(site: Site, context: Context) -> Match | None:
    """A whole forward worth a graph that is an autoencoder's decoder; the graph goes inside the guard."""
    if site.path.rpartition(".")[2] != "decoder":
        return None
    graph = match_graph(site, context)
    if graph is None:
        return None
    if isinstance(graph, Match):
        inner, within = graph.forward, "with its CUDA graph" + (f" ({graph.note})" if graph.note else "")
    else:
        inner, within = None, f"no CUDA graph ({graph.reason})"
    half = HalfOperands.watch(site, context)
    if isinstance(inner, GraphForward):
        inner.variant = half.state
    guard = OverflowGuard(site.module, site.path, context.kernels, context.log, inner=inner, half=half)
    return Match(guard, covers=(), note=f"looks for overflow in float16, {within}")
