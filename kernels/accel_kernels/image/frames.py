"""What a convolution over video reads: norm, SiLU, earlier frames and padding, in one pass over the frames.

y = pad(cat(previous, silu(norm(x + shift)))). Causal convolutions pad frames at the front alone, with zeros or
the first frame again. Or they continue after the last frames of the chunk before; Wan et al., 2025, and Kong et al.,
"HunyuanVideo", 2024. Computed in fp32, rounded once.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from accel_kernels.norm import group_norm as groups
from accel_kernels.norm import norm as norms
from accel_kernels.norm.norm import Norm, norm_weights
from accel_kernels.op import dtype_reason, make_op, random_cases

MOST_CHANNELS = 8192  # of a pixel that is normed over its channels: a program holds all of them


class FramePadding(NamedTuple):
    """front, back: frames more. height, width: rows and columns more, on either side. Zeros, or what lies next to them:
    repeat_frames, repeat_edges.
    """

    front: int = 0
    back: int = 0
    height: int = 0
    width: int = 0
    repeat_frames: bool = False
    repeat_edges: bool = False


class FrameGroups(NamedTuple):
    """A group norm. per_frame: each frame is normed by itself. channel_stats: as of `group_norm`, over all frames."""

    number: int
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    per_frame: bool = False
    channel_stats: tuple | None = None


NO_PADDING = FramePadding()


def reference(x, padding=NO_PADDING, norm=None, *, shift=None, silu=False, previous=None):
    """x: (N, C, T, H, W); padding: `FramePadding`; norm: a `Norm` over the channels of a pixel, `FrameGroups`, or None.

    shift: (C,), added before the norm. previous: (N, C, P, H, W), frames that stand before those of x as they are.
    Returns (N, C, front + P + T + back, H + 2 height, W + 2 width).
    """
    y = x if shift is None else x + shift.to(x.dtype)[:, None, None, None]
    if isinstance(norm, Norm):
        y = norms.reference(y.movedim(1, -1), norm).movedim(-1, 1)
    elif norm is not None:
        y = _grouped(y, norm)
    y = F.silu(y) if silu else y
    y = y if previous is None else torch.cat([previous, y], 2)
    edges, frames = (padding.width, padding.width, padding.height, padding.height), (padding.front, padding.back)
    y = _padded(y, (*edges, 0, 0), padding.repeat_edges)
    return _padded(y, (0, 0, 0, 0, *frames), padding.repeat_frames)


def _grouped(y, norm):
    if not norm.per_frame:
        return groups.exact(y, norm.number, norm.weight, norm.bias, norm.eps)
    frames = y.transpose(1, 2).flatten(0, 1)
    return groups.exact(frames, *norm[:4]).unflatten(0, (y.shape[0], -1)).transpose(1, 2)


def _padded(y, sides, repeat):
    if not any(sides):
        return y
    return F.pad(y, sides, mode="replicate") if repeat else F.pad(y, sides)


def frames_last(x: torch.Tensor) -> bool:
    """Whether each of (N, C, T, H, W) lies as (T, H, W, C), whatever is between two of them."""
    c, _, h, w = x.shape[1:]
    strides = zip(x.shape[1:], x.stride()[1:], (1, h * w * c, w * c, c), strict=True)
    return all(size == 1 or ours == wanted for size, ours, wanted in strides)


def supports(x, padding=NO_PADDING, norm=None, *, shift=None, silu=False, previous=None) -> str | None:
    if x.dim() != 5:
        return f"{x.dim()} dimensions, not 5"
    if x.numel() == 0:
        return "empty"
    if not frames_last(x) or (previous is not None and not frames_last(previous)):
        return "not channels-last"
    if previous is not None:
        if previous.dtype != x.dtype or previous.shape[:2] != x.shape[:2] or previous.shape[3:] != x.shape[3:]:
            return "earlier frames of another shape or dtype"
    if isinstance(norm, Norm) and x.shape[1] > MOST_CHANNELS:
        return f"{x.shape[1]} channels, more than {MOST_CHANNELS}"
    if isinstance(norm, FrameGroups):
        if (reason := _groups_reason(x, norm)) is not None:
            return reason
    return dtype_reason(x, shift, previous, *norm_weights(norm))


def _groups_reason(x, norm) -> str | None:
    if x.shape[0] > 1 and x.stride(0) != x[0].numel():
        return "samples that do not follow each other"
    return groups.supports(as_images(x, norm.per_frame), *norm[:4])


def as_images(x: torch.Tensor, per_frame: bool = False) -> torch.Tensor:
    """(N, C, T, H, W), dense and channels-last, as (N, C, T * H, W), or (N * T, C, H, W); a view."""
    return x.transpose(1, 2).flatten(0, 1) if per_frame else x.flatten(2, 3)


@random_cases
def _case(rand, n, c, t, h, w, padding=NO_PADDING, norm=None, shift=False, silu=True, earlier=0, per_frame=False):
    """norm: "rms", "layer", or a number of groups. earlier: frames."""

    def frames(count):
        more = 1 if n == 1 else 0  # a part of more frames, as the chunks of a video are
        return rand(n, count + more, h, w, c).permute(0, 4, 1, 2, 3)[:, :, more:]

    made = norm
    if isinstance(norm, str):
        made = Norm(rand(c), rand(c) if norm == "layer" else None, 1e-6, norm == "layer")
    elif norm is not None:
        made = FrameGroups(norm, rand(c), rand(c), 1e-6, per_frame)
    given = {"shift": rand(c) if shift else None, "silu": silu}
    given["previous"] = frames(earlier) if earlier else None
    return (frames(t), padding, made), given


CAUSAL, AROUND = FramePadding(front=2), FramePadding(2, 0, 1, 1, True, True)
FIRST, BOTH = FramePadding(front=2, repeat_frames=True), FramePadding(1, 1, repeat_frames=True)
CASES = (
    _case("tiny", 1, 32, 2, 3, 4, CAUSAL, "rms", small=True),
    _case("chunk", 2, 24, 3, 5, 3, NO_PADDING, "rms", shift=True, earlier=2, small=True),
    _case("second-chunk", 1, 40, 2, 3, 5, FramePadding(1), "rms", earlier=1, small=True),
    _case("first-frame", 2, 17, 3, 4, 3, FIRST, "layer", shift=True, small=True),
    _case("both-ends", 1, 16, 3, 2, 5, BOTH, "rms", silu=False, small=True),
    _case("around", 2, 24, 2, 4, 3, AROUND, 4, shift=True, small=True),
    _case("frames-of-groups", 2, 12, 3, 3, 5, FramePadding(2, 0, 1, 2, True), 1, per_frame=True, small=True),
    _case("zeros-around", 1, 9, 2, 3, 2, FramePadding(1, 1, 1, 1), silu=False, earlier=1, small=True),
    _case("one-frame", 1, 20, 1, 3, 3, AROUND, 2, small=True),
    _case("norm-only", 2, 33, 2, 3, 3, NO_PADDING, "rms", silu=False, small=True),
    _case("wan-480p", 1, 96, 4, 480, 832, NO_PADDING, "rms", shift=True, earlier=2),
    _case("wan-240p", 1, 192, 4, 240, 416, NO_PADDING, "rms", shift=True, earlier=2),
    _case("ltx-480p", 1, 128, 81, 120, 176, BOTH, "rms", shift=True),
    _case("hunyuan-320p", 1, 128, 33, 320, 512, AROUND, 32, shift=True),
)

convolution_frames = make_op("convolution_frames", reference, supports, CASES)
