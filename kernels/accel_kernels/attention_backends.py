"""Which attention implementation to run: measured on this card, for this shape, once, and remembered on disk.

The best one differs from card to card and from shape to shape: kernels/README.md has the table of one card.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from accel_kernels.attention import attention
from accel_kernels.choices import Choices, milliseconds
from accel_kernels.matmul_attention import matmul_attention
from accel_kernels.matmul_attention import refuses as refuses_matmul
from accel_kernels.rehearsal import rehearsing


class Backend(NamedTuple):
    """`run(q, k, v, scale)` on (B, H, S, D) tensors; `refuses(q, k, v)` gives None or the reason it cannot."""

    run: Callable[..., torch.Tensor]
    refuses: Callable[..., str | None]


def _cudnn(q, k, v, scale):
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, 0.0, False, False, scale=scale)[0]


def _flash(q, k, v, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)[0]


def _efficient(q, k, v, scale):
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, False, 0.0, False, scale=scale)[0]


def _xformers(q, k, v, scale):
    from xformers.ops import memory_efficient_attention

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return memory_efficient_attention(q, k, v, scale=scale).transpose(1, 2)


def _sdpa(q, k, v, scale):
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def _half_precision(limit: int):
    def refuses(q, k, v) -> str | None:
        if not q.is_cuda:
            return f"runs on CUDA, not on {q.device.type}"
        if q.dtype not in (torch.float16, torch.bfloat16):
            return f"runs in 16 bit, not in {q.dtype}"
        if q.shape[-1] % 8 or q.shape[-1] > limit:
            return f"head dimension {q.shape[-1]} is not a multiple of 8 up to {limit}"
        return None

    return refuses


def _refuses_cuda(q, k, v) -> str | None:
    return None if q.is_cuda else f"runs on CUDA, not on {q.device.type}"


def _refuses_xformers(q, k, v) -> str | None:
    try:
        import xformers.ops  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: its CUDA runtime is not the one torch loaded
        return f"xformers cannot be imported: {error}"
    return _half_precision(512)(q, k, v)


def _refuses_triton(q, k, v) -> str | None:
    return _refuses_cuda(q, k, v) or attention.supports(q, k, v)


BACKENDS = {
    "cudnn": Backend(_cudnn, _half_precision(256)),
    "flash": Backend(_flash, _half_precision(256)),
    "efficient": Backend(_efficient, _refuses_cuda),
    "xformers": Backend(_xformers, _refuses_xformers),
    "triton": Backend(lambda q, k, v, scale: attention.triton(q, k, v, scale), _refuses_triton),
    "matmul": Backend(matmul_attention, refuses_matmul),
    "sdpa": Backend(_sdpa, lambda q, k, v: None),
}


def worth_trying(name: str, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether a backend wins anywhere near this shape: those that do not are not worth compiling and timing."""
    dim, keys = q.shape[-1], k.shape[2]
    if name == "triton":  # a prompt's few keys, where vendor kernels fill half a tile
        return keys <= 128 and dim <= 128
    return name != "matmul" or dim > 256  # materialised scores: where no vendor kernel keeps a block in registers


def _possible(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return worth_trying(name, q, k) and BACKENDS[name].refuses(q, k, v) is None


class AttentionChooser(Choices):
    """Callable softmax attention, (B, H, Sq, D) x (B, H, Sk, D) -> (B, H, Sq, D); picks its backend per shape.

    preference: "auto" measures the candidates on the first call of a shape; a backend's name always takes that one and
    raises ValueError where it cannot run. cache: a JSON file that keeps the choices, or None.
    Choices are made on the caller's own tensors; a candidate that errs, or disagrees with torch, is dropped.
    """

    def __init__(self, preference: str = "auto", cache: Path | None = None):
        if preference != "auto" and preference not in BACKENDS:
            raise ValueError(f"attention {preference!r} is not one of auto, {', '.join(BACKENDS)}")
        super().__init__(cache)
        self.preference = preference

    def __getstate__(self):
        return {"preference": self.preference, "cache": self.cache}

    def __setstate__(self, state):
        self.__init__(**state)

    def __call__(self, q, k, v, scale=None):
        return BACKENDS[self.choose(q, k, v)].run(q, k, v, scale)

    def choose(self, q, k, v) -> str:
        """The backend's name for these tensors."""
        if self.preference != "auto":
            reason = BACKENDS[self.preference].refuses(q, k, v)
            if reason is not None:
                raise ValueError(f"attention={self.preference!r}: {reason}")
            return self.preference
        if not q.is_cuda or v.shape != k.shape:
            return "sdpa"
        packed = "packed" if q.stride(2) != q.shape[1] * q.shape[3] else "dense"
        key = f"{tuple(q.shape)}x{k.shape[2]} {str(q.dtype)[6:]} {packed}"
        choice = self.choices.get(key)
        if choice is not None:
            return choice
        if rehearsing():  # values are garbage: compile what could be chosen, measure later
            return next((name for name in ("triton", "matmul") if _possible(name, q, k, v)), "sdpa")
        if torch.cuda.is_current_stream_capturing():
            return "sdpa"  # nothing can be measured inside a capture; correct, and known by the next one
        return self.decide(key, lambda stored: self._holds(stored, q, k, v), lambda: self._measure(q, k, v))

    def _holds(self, stored: str, q, k, v) -> bool:
        return stored in BACKENDS and BACKENDS[stored].refuses(q, k, v) is None

    def _measure(self, q, k, v) -> str:
        wanted = _sdpa(q, k, v, None).float()
        limit = 0.02 * wanted.abs().max().clamp_min(1e-6)
        times = {}
        for name, backend in BACKENDS.items():
            if name == "sdpa" or not _possible(name, q, k, v):
                continue  # sdpa picks one of the others
            try:
                agrees = bool((backend.run(q, k, v, None).float() - wanted).abs().max() <= limit)
                if agrees:
                    times[name] = milliseconds(lambda run=backend.run: run(q, k, v, None))
            except Exception:  # this card or build has no kernel for it, each library saying so in its own way
                continue
        return min(times, key=times.get) if times else "sdpa"
