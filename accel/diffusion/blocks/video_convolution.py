"""Convolutions over video: padding is left to the convolution, or written by the pass that writes its input.

Stock copies all frames once or twice to pad them. Here the convolution adds zeros where it can. Other padding is
written together with the norm before it: see `accel_kernels.image.frames`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from accel_kernels.image.frames import NO_PADDING
from torch import nn

from accel.diffusion.blocks.video_convolution_kind import VideoConvolution, VideoConvolutions, VideoPadding, kept
from accel.fusion.channels_last import ndhwc, sum_frames
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.guard import Parts
from accel.patching.rule import Context, Match, Site

LEAST_CHANNELS = 32  # of the output; a narrower one ends a model, and no norm comes after


def written_frames(
    kernels: Kernels, way: VideoPadding, x: torch.Tensor, previous: torch.Tensor | None = None, **first: Any
) -> torch.Tensor:
    """The convolution's input: (N, C, T, H, W) with the padding that has to be written, or x itself where there is
    none.

    previous: frames before x, in place of as many padding frames. first: what `convolution_frames` computes besides.
    """
    padding = way.written
    if previous is not None:
        padding = padding._replace(front=padding.front - previous.shape[2])
        previous = ndhwc(previous)
    x = ndhwc(x)
    if not first and previous is None and padding == NO_PADDING:
        return x
    return kernels.convolution_frames(x, padding, previous=previous, **first)


def convolve_written(
    way: VideoPadding, conv: nn.Conv3d, frames: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The convolution, and the bias that is still to be added. On a CPU it adds the bias itself."""
    bias = None if frames.is_cuda else conv.bias
    y = F.conv3d(frames, conv.weight, bias, conv.stride, way.zeros, conv.dilation)
    return y, conv.bias if frames.is_cuda else None


class VideoConvolutionForward(FastForward):
    """(N, C, T, H, W) -> (N, C', T', H', W'), channels-last on a GPU; and the last frames, where stock returns them."""

    convolution: VideoConvolution

    def parts(self) -> Parts:
        return Parts(self.convolution.parts(self.module))

    def _given(self, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        given = self.named(args, kwargs)
        return given[self.names[0]], given.get(self.names[1]) if len(self.names) > 1 else None

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        x, second = self._given(args, kwargs)
        if (reason := no_video(x, self.convolution.of(self.module))) is not None:
            return reason
        if isinstance(second, torch.Tensor):
            known = self.convolution.takes(second, x, x.shape[1])
        else:
            known = self.convolution.way(second) is not None
        return None if known else "a second argument of another kind"

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        x, second = self._given(args, kwargs)
        conv, previous = self.convolution.of(self.module), second if isinstance(second, torch.Tensor) else None
        way = self.convolution.way(None if previous is not None else second)
        assert way is not None
        frames = written_frames(self.kernels, way, x, previous)
        y, bias = convolve_written(way, conv, frames)
        if bias is not None and y.shape[1] < LEAST_CHANNELS:
            y = y.add_(bias[:, None, None, None])
        elif bias is not None:
            y = sum_frames(self.kernels, y, None, bias)
        if self.convolution.keeps is None:
            return y
        return y, copied(kept(frames, conv)) if self.convolution.keeps else None


def no_video(x: object, conv: nn.Conv3d) -> str | None:
    """Why x is no input for a convolution over video."""
    if type(x) is not torch.Tensor or x.dim() != 5 or x.numel() == 0:
        return "input that is not a batch of videos"
    return None if x.dtype is conv.weight.dtype else "input of another dtype than the weight"


def copied(frames: torch.Tensor) -> torch.Tensor:
    """A copy of frames, channels-last on a GPU. A view would keep the memory of all frames alive."""
    layout = torch.channels_last_3d if frames.is_cuda else torch.contiguous_format
    return frames.clone(memory_format=layout)


def match_video_convolution(site: Site, context: Context) -> Match | None:
    """A convolution over frames, rows and columns, or a module around one, whose padding is known."""
    found = context.of(VideoConvolutions).of(site.module)
    if found is None:
        return None
    return Match(VideoConvolutionForward(site.module, site.path, context.kernels, context.log, convolution=found))
