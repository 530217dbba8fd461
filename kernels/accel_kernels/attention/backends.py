"""Which attention implementation to run: measured on this card, for this shape, once, and remembered on disk.

Until a shape is measured, one runs that needs no plan: cuDNN's takes 45 to 70 ms on an H200. Figures of one card are in
docs/measurements/kernels.md.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from accel_kernels.attention.flash_attention import attention
from accel_kernels.autotune import Choices, Place, TensorForm, contest, filled
from accel_kernels.elementwise.softmax import softmax
from accel_kernels.errors import out_of_memory, set_aside
from accel_kernels.op import FLOATS
from accel_kernels.tolerances import BACKEND, SMALLEST_OUTPUT
from accel_kernels.warmup import alongside, warming_up


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


def _matmul(q, k, v, scale):
    """Two matrix products with a softmax between, for wide heads such as the VAE's 512. Lies as (B, Sq, H, D).

    A flash kernel keeps an accumulator of queries x head dimension in registers; at 512 only 64 queries fit and the
    tensor cores starve. Here blocks of queries give fp32 scores, which pass through memory once.
    """
    batch, heads, length, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    out = torch.empty((batch, length, heads, dim), device=q.device, dtype=q.dtype).transpose(1, 2)
    exact: dict[str, Any] = {} if q.dtype == torch.float32 else {"out_dtype": torch.float32}
    step = max(1, min(length, SCORES // k.shape[2]))
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h].t(), v[b, h]
            for first in range(0, length, step):
                rows = slice(first, min(first + step, length))
                scores = torch.mm(q[b, h, rows], keys, **exact)
                out[b, h, rows] = softmax(scores, scale, q.dtype) @ values
    return out


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


def _refuses_matmul(q, k, v) -> str | None:
    wrong = None if q.dtype in FLOATS else f"dtype {q.dtype} is not float16, bfloat16 or float32"
    return _refuses_cuda(q, k, v) or wrong


def _refuses_xformers(q, k, v) -> str | None:
    try:
        import xformers.ops  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: its CUDA runtime is not the one torch loaded
        return f"xformers cannot be imported: {error}"
    return _half_precision(512)(q, k, v)


def _refuses_triton(q, k, v) -> str | None:
    return _refuses_cuda(q, k, v) or attention.supports(q, k, v)


SCORES = 2**25  # of `_matmul` at a time: 128 MiB in fp32
BACKENDS = {
    "cudnn": Backend(_cudnn, _half_precision(256)),
    "flash": Backend(_flash, _half_precision(256)),
    "efficient": Backend(_efficient, _refuses_cuda),
    "xformers": Backend(_xformers, _refuses_xformers),
    "triton": Backend(lambda *given: attention.guarded(attention.triton, *given), _refuses_triton),
    "matmul": Backend(_matmul, _refuses_matmul),
    "sdpa": Backend(_sdpa, lambda q, k, v: None),
}


FEW = 128  # keys of a prompt
LONG = 1024  # tokens: more than few, by far
TILE = 128  # tokens: cuDNN has one kernel for lengths that are multiples of it, and one for others
NEEDS_PLAN = "cudnn"
REACH = 4.0  # factor between the sizes of two shapes up to which the best for one is taken to be the best for the other


def worth_trying(name: str, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether a backend wins anywhere near this shape: those that do not are not worth compiling and timing."""
    dim, keys = q.shape[-1], k.shape[2]
    if name == "triton":  # a prompt's few keys, where vendor kernels fill half a tile
        return keys <= FEW and dim <= 128
    if name == NEEDS_PLAN:  # with few keys it saves microseconds, which its plans never win back
        return keys > FEW
    return name != "matmul" or dim > 256  # materialized scores: where no vendor kernel keeps a block in registers


def _possible(name: str | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return name in BACKENDS and worth_trying(name, q, k) and BACKENDS[name].refuses(q, k, v) is None


class AttentionChooser(Choices):
    """Callable softmax attention, (B, H, Sq, D) x (B, H, Sk, D) -> (B, H, Sq, D); picks its backend per shape.

    preference: "auto" measures the candidates on tensors like the caller's, or takes what was measured for a shape near
    by. A backend's name always takes that one, and raises ValueError where it cannot run. cache: see `Choices`.
    A candidate that errs, or disagrees with the others, is dropped.
    """

    def __init__(self, preference: str = "auto", cache: Path | None = None):
        if preference != "auto" and preference not in BACKENDS:
            raise ValueError(f"attention {preference!r} is not one of auto, {', '.join(BACKENDS)}")
        super().__init__(cache)
        self.preference = preference
        self.loaded: set[tuple] = set()  # heads that cuDNN has loaded its kernels for

    def __getstate__(self):
        return {"preference": self.preference, **super().__getstate__()}

    def __call__(self, q, k, v, scale=None):
        if warming_up() and q.is_cuda:
            return self._warm_up(q, k, v)
        return BACKENDS[self.choose(q, k, v)].run(q, k, v, scale)

    def choose(self, q, k, v) -> str:
        """The backend's name for these tensors."""
        if self.preference != "auto":
            if (reason := BACKENDS[self.preference].refuses(q, k, v)) is not None:
                raise ValueError(f"attention={self.preference!r}: {reason}")
            return self.preference
        if not q.is_cuda or v.shape != k.shape:
            return "sdpa"
        batch, heads, queries, dim = q.shape
        packed = "packed" if q.stride(2) != heads * dim else "dense"
        key = f"{batch}x{heads}x{queries}x{k.shape[2]}x{dim} {str(q.dtype)[6:]} {packed}"
        if (choice := self.choices.get(key)) is not None:
            return choice
        possible = [name for name in BACKENDS if name != "sdpa" and _possible(name, q, k, v)]  # it picks one of them
        otherwise = self._otherwise(key, possible)
        if torch.cuda.is_current_stream_capturing():
            return otherwise  # nothing can be measured inside a capture
        forms = [TensorForm.of(t) for t in (q, k, v)]
        return self.decide(key, partial(self._trial, key, possible, otherwise, forms), otherwise)

    def place(self, key: str) -> Place:
        shape, *kind = key.split(" ")
        batch, heads, queries, keys, dim = map(int, shape.split("x"))
        return Place((dim, keys <= FEW, *kind), (batch * heads * queries, keys))

    def _otherwise(self, key: str, possible: list[str]) -> str:
        """What runs until it is decided: what is best near by, or else the first of these; cuDNN would need a plan."""
        near = self.neighbor(key, REACH)
        names = (None if near == NEEDS_PLAN else near, "triton", "matmul", "flash", "efficient")
        return next((name for name in names if name in possible), "sdpa")

    def _trial(self, key: str, possible: list[str], otherwise: str, forms: list[TensorForm]) -> Iterator[str | None]:
        """Takes over what an earlier process, or a shape near by, found; else races the candidates."""
        stored, near = self.stored(key), self.neighbor(key, REACH)
        if stored in possible and _agrees(stored, otherwise, forms):
            self.learn(key, stored)
            return
        if near in possible and _agrees(near, otherwise, forms):
            self.adopt(key, near)
            return

        def runs(names: Sequence[str]) -> list[Callable[[], object]]:
            given = filled(forms)
            return [partial(BACKENDS[name].run, *given, None) for name in names]

        yield from contest(possible, lambda name: _agrees(name, otherwise, forms), runs, forms[0].device)

    def _warm_up(self, q, k, v) -> torch.Tensor:
        """Compiles and loads what is chosen from, for this size and others; nothing of shape q's."""
        if v.shape != k.shape:
            return _sdpa(q, k, v, None)
        few = [t[:, :, :FEW] for t in (q, k, v)]
        for name in ("triton", "matmul"):
            if self.preference == name:
                BACKENDS[name].run(q, k, v, None)
            if self.preference == name or (self.preference == "auto" and _possible(name, *few)):
                BACKENDS[name].run(*few, None)
        batch, heads, _, dim = q.shape
        kind = (heads, dim, q.dtype, q.device)
        if self.preference in ("auto", NEEDS_PLAN) and kind not in self.loaded:
            self.loaded.add(kind)
            tokens = LONG + max(q.shape[2], LONG) % TILE  # not q's own: the model itself is at work, in its own memory
            longer = torch.empty((1, tokens, heads, dim), dtype=q.dtype, device=q.device)
            if BACKENDS[NEEDS_PLAN].refuses(q, k, v) is None:
                alongside(partial(_load, longer.transpose(1, 2)))
        return torch.empty((batch, q.shape[2], heads, dim), dtype=q.dtype, device=q.device).transpose(1, 2)


def _agrees(name: str, other: str, forms: list[TensorForm]) -> bool:
    """Whether one backend computes what another does, on tensors of these forms.

    Compared head by head: in float32 all at once would take more memory than a call of the model itself does.
    """
    with torch.cuda.device(forms[0].device):
        given = filled(forms)
        wanted = BACKENDS[other].run(*given, None)
        try:
            got = BACKENDS[name].run(*given, None)
        except Exception as error:  # this card or build has no kernel for it, each library saying so in its own way
            if out_of_memory(error):  # says nothing of the backend; `Choices` goes on without a trial
                raise
            set_aside(error)
            return False
        off, largest = (torch.stack(one).max() for one in zip(*_extremes(got, wanted), strict=True))
        return bool(off <= BACKEND * largest.clamp_min(SMALLEST_OUTPUT))


def _extremes(got: torch.Tensor, wanted: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each head: the largest difference, and the largest number that was wanted. Writes into both in float32."""
    for ours, theirs in zip(got.unbind(1), wanted.unbind(1), strict=True):
        exact = theirs.float()
        yield ours.float().sub_(exact).abs_().max(), exact.abs_().max()


def _load(x: torch.Tensor) -> None:
    """Lets cuDNN load, or the driver compile, its kernels for such heads: up to a second, once for all lengths."""
    with torch.cuda.device(x.device), torch.no_grad():
        _cudnn(x, x, x, None)
