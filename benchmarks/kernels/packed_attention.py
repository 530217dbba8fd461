"""Attention of sequences of different lengths in a CUDA graph, microseconds a layer, in bf16.

Ours, by the tile that is chosen and by others; torch's flash attention over the same packed rows; torch's SDPA over
rows that are padded to the longest, with the mask that hides the padding, and without one. `limit_us`: of the products
at 700 TFLOP/s, or of the bytes at 4.2 TB/s. A way is timed only when it is right. `--tiles no` leaves the others out.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from accel_kernels import packed_attention
from accel_kernels.attention.flash_attention_triton import Tile
from accel_kernels.attention.packed import packed_attention_triton as kernels

from accel.comparison import relative_rms
from benchmarks.kernels.stored_attention import changed
from benchmarks.kernels.timer import compile_ahead, time_us
from benchmarks.study import DEVICE, HALF, TOY, Study

FLOPS, BANDWIDTH = 700e12, 4.2e12
MIXED = [10 + 490 * (i * 37 % 64) // 63 for i in range(64)]  # 10 to 500


class Shape(NamedTuple):
    lengths: list[int]
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    reach: int | None = None  # of a bias by distance
    causal: bool = False


SHAPES = {
    "bge-base": Shape(MIXED, 12, 12, 64),
    "bge-m3": Shape(MIXED, 16, 16, 64),
    "minilm": Shape(MIXED, 12, 12, 32),
    "modernbert": Shape(MIXED, 12, 12, 64, window=64),
    "mpnet": Shape(MIXED, 12, 12, 64, reach=128),
    "qwen3-embedding": Shape(MIXED, 16, 8, 128, causal=True),
    "query": Shape([16], 12, 12, 64),
    "queries": Shape([16] * 64, 12, 12, 64),
    "siglip": Shape([729] * 32, 16, 16, 72),
    "clip-l": Shape([577] * 32, 16, 16, 64),
    "qwen-tower": Shape([4096, 1024, 256, 2304], 16, 16, 80),
}
SHAPES = {"toy": Shape([40, 3, 17], 2, 1, 32, reach=8)} if TOY else SHAPES
TILES = [] if TOY else [
    Tile(16, 32, 2, 2), Tile(32, 32, 4, 2), Tile(64, 32, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3),
    Tile(64, 128, 4, 2), Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(128, 64, 8, 3), Tile(128, 128, 8, 2),
]  # fmt: skip


class Packed:
    """One call, and the same as other ways take it."""

    def __init__(self, shape: Shape):
        self.shape, self.longest = shape, max(shape.lengths)
        lengths, heads, kv_heads, dim, *_ = shape
        generator = torch.Generator(DEVICE).manual_seed(0)
        qkv = torch.randn(sum(lengths), heads + 2 * kv_heads, dim, generator=generator, device=DEVICE)
        self.qkv = qkv.to(HALF).split([heads, kv_heads, kv_heads], dim=1)
        ends = torch.tensor(lengths, device=DEVICE).cumsum(0)
        self.starts = F.pad(ends, (1, 0)).int()
        self.given: dict = {"longest": self.longest, "causal": shape.causal}
        if shape.window is not None:
            self.given["window"] = (shape.window, shape.window)
        if shape.reach is not None:
            self.given["bias"] = torch.randn(heads, 2 * shape.reach + 1, generator=generator, device=DEVICE)
        at = torch.arange(self.longest, device=DEVICE)
        self.real = at < torch.tensor(lengths, device=DEVICE)[:, None]  # (sequences, longest)
        distance = at - at[:, None]
        hidden = (distance > 0) & shape.causal
        if shape.window is not None:
            hidden |= distance.abs() > shape.window
        self.mask = self.real[:, None, None] & ~hidden
        if shape.reach is not None:
            bias = self.given["bias"][:, distance.clamp(-shape.reach, shape.reach) + shape.reach]
            self.mask = bias.to(HALF).masked_fill(~self.mask, -torch.inf)
        self.padded = [t.new_zeros(*self.real.shape, *t.shape[1:]) for t in self.qkv]
        for t, packed in zip(self.padded, self.qkv, strict=True):
            t[self.real] = packed
        self.padded = [t.transpose(1, 2) for t in self.padded]

    def ours(self) -> torch.Tensor:
        return packed_attention.triton(*self.qkv, self.starts, self.shape.dim**-0.5, **self.given)

    def flash(self) -> torch.Tensor:
        """(T, heads, D). Raises RuntimeError where torch's has no such thing."""
        if self.shape.reach is not None:
            raise RuntimeError("no bias")
        q, k, v = self.qkv
        side = self.shape.window
        window = {} if side is None else {"window_size_left": side, "window_size_right": side}
        return torch.ops.aten._flash_attention_forward(
            q, k, v, self.starts, self.starts, self.longest, self.longest, 0.0, self.shape.causal, False,
            scale=self.shape.dim**-0.5, **window,
        )[0]  # fmt: skip

    def sdpa(self, mask: torch.Tensor | None) -> torch.Tensor:
        """(sequences, heads, longest, D)."""
        gqa = self.shape.heads != self.shape.kv_heads
        return F.scaled_dot_product_attention(*self.padded, attn_mask=mask, enable_gqa=gqa)

    def limit_us(self) -> float:
        lengths, heads, kv_heads, dim, window, *_ = self.shape
        seen = sum(n * (n if window is None else min(n, 2 * window + 1)) for n in lengths) / (1 + self.shape.causal)
        moved = sum(lengths) * (2 * heads + 2 * kv_heads) * dim * 2
        return round(1e6 * max(4 * seen * heads * dim / FLOPS, moved / BANDWIDTH), 1)


def timed(run: Callable[[], torch.Tensor], rows: Callable, exact: torch.Tensor, allowed: float) -> dict:
    """rows: makes what comes out (T, heads * D). Raises ValueError for a result that is wrong."""
    if (error := relative_rms(rows(run()), exact)) > allowed:
        raise ValueError(f"off by {error:.1e}, more than {allowed:.1e}")
    return {"us": time_us(run)}


def main(out: Path, only: str = "", tiles: bool = True) -> None:
    """only: a shape."""
    record = Study("packed-attention", out, "attention of packed sequences, microseconds a layer", rows=[])
    for name, shape in SHAPES.items():
        if only not in ("", name):
            continue
        call = Packed(shape)
        scale = shape.dim**-0.5
        exact = packed_attention.reference(*(t.float() for t in call.qkv), call.starts, scale, **call.given)
        theirs = packed_attention.reference(*call.qkv, call.starts, scale, **call.given)
        allowed = 2 * relative_rms(theirs, exact) + 1e-6

        def unpadded(padded: torch.Tensor, call=call) -> torch.Tensor:
            return padded.transpose(1, 2)[call.real].flatten(1)

        ways = {
            "ours": (call.ours, lambda t: t),
            "flash": (call.flash, lambda t: t.flatten(1)),
            "sdpa": (partial(call.sdpa, call.mask), unpadded),
        }
        if min(shape.lengths) == call.longest and shape.reach is None and not shape.causal:
            ways["sdpa-no-mask"] = (partial(call.sdpa, None), unpadded)
        for way, (run, rows) in ways.items():
            with record.attempt(shape=name, way=way):
                found = timed(run, rows, exact, allowed)
                record.add("rows", {"shape": name, "way": way, "limit_us": call.limit_us()} | found)
        for tile in TILES if tiles else ():
            with (
                record.attempt(shape=name, way=str(tuple(tile))),
                changed(kernels, packed_tile=lambda *_, tile=tile: tile),
            ):
                compile_ahead([call.ours])
                found = timed(call.ours, lambda t: t, exact, allowed)
                record.add("rows", {"shape": name, "way": "ours", "tile": tuple(tile)} | found)
