"""The resnet block of video VAEs: norm, SiLU, convolution, norm, SiLU, convolution, shortcut, over frames.

Each norm and SiLU is written into the convolution's input, with padding and earlier frames. The first convolution's
bias goes into the norm after it, the second's into the pass that adds the shortcut. So a block is two convolutions and
three passes, where stock takes some forty.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from accel.diffusion.blocks.video_convolution import convolve_written, copied, no_video, written_frames
from accel.diffusion.blocks.video_convolution_kind import VideoConvolution, VideoConvolutions
from accel.diffusion.blocks.video_norm import VideoNorm, VideoNorms
from accel.fusion.channels_last import coarser_as_convolution, ndhwc, sum_frames
from accel.patching.fast_forward import FastForward
from accel.patching.guard import Parts
from accel.patching.probe import example
from accel.patching.rule import Context, Match, Site, Skip
from accel.patching.structure import holds, meta_weights, untouched

CACHE, PLACE, CAUSAL = "feat_cache", "feat_idx", "causal"  # arguments, by the names that all such blocks give them
WITHOUT_WEIGHTS = (nn.SiLU, nn.Dropout, nn.Identity)


class BlockParts(NamedTuple):
    """What a block consists of: names of children, and what each computes; None where it has no such child."""

    norms: tuple[VideoNorm, VideoNorm]
    convolutions: tuple[VideoConvolution, VideoConvolution]
    shortcut: tuple[str, VideoConvolution] | None
    shortcut_norm: tuple[str, VideoNorm] | None
    others: tuple[str, ...]


class VideoResnetForward(FastForward):
    """(N, C, T, H, W) -> (N, C', T, H, W), channels-last on a GPU.

    feat_cache, feat_idx: the frames before by convolution, which are replaced, and the next one's place, which moves
    on.
    """

    made: BlockParts

    def parts(self) -> Parts:
        m, made = self.module, self.made
        fixed = [m, *(getattr(m, name, None) for name in made.others)]
        for name, norm in zip(("norm1", "norm2"), made.norms, strict=True):
            fixed += norm.parts(getattr(m, name))
        for name, kind in zip(("conv1", "conv2"), made.convolutions, strict=True):
            fixed += kind.parts(getattr(m, name))
        if made.shortcut is not None:
            fixed += made.shortcut[1].parts(getattr(m, made.shortcut[0]))
        if made.shortcut_norm is not None:
            fixed += made.shortcut_norm[1].parts(getattr(m, made.shortcut_norm[0]))
        return Parts(tuple(fixed))

    def _given(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        given = self.named(args, kwargs)
        return {"x": given.pop(self.names[0])} | {name: value for name, value in given.items() if value is not None}

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        given = self._given(args, kwargs)
        x, cache, place = given.pop("x"), given.pop(CACHE, None), given.pop(PLACE, [0])
        flag = given.pop(CAUSAL, None)
        given.pop("generator", None)  # for noise, and a block that adds noise has weights of its own for it
        if (reason := no_video(x, self.made.convolutions[0].of(self.module.conv1))) is not None:
            return reason
        if given:
            return f"an argument {next(iter(given))}"
        if any(kind.way(flag) is None for kind in self.made.convolutions):
            return f"a flag {flag!r}"
        if any(p.dtype is not x.dtype for p in self.module.parameters()):
            return "weights in several dtypes"
        if cache is None:
            return None
        if type(cache) is not list or type(place) is not list or len(place) != 1 or len(cache) < place[0] + 2:
            return "a cache of frames of another make"
        before = cache[place[0] : place[0] + 2]
        m = self.module
        pairs = zip(self.made.convolutions, (m.conv1, m.conv2), strict=True)
        channels = [kind.of(conv).in_channels for kind, conv in pairs]
        fit = map(VideoConvolution.takes, self.made.convolutions, before, (x, x), channels)
        return None if all(fit) else "frames before that do not fit these"

    def fast(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self._given(args, kwargs)
        cache, place = given.get(CACHE), given.get(PLACE)
        if cache is None or place is None:
            return self._block(given["x"], given.get(CAUSAL), lambda number: None, lambda frames: None)
        start = place[0]
        before = [cache[start], cache[start + 1]]
        after: list[torch.Tensor] = []
        y = self._block(given["x"], None, before.__getitem__, lambda frames: after.append(copied(frames)))
        cache[start : start + 2] = after  # at the end: where something fails, stock finds them as they were
        place[0] = start + 2
        return y

    def _block(self, x: torch.Tensor, flag: object, before: Callable, keep: Callable) -> torch.Tensor:
        m, k, made = self.module, self.kernels, self.made
        x = ndhwc(x)
        h: Any = x
        shift = None
        for number, (norm, kind) in enumerate(zip(made.norms, made.convolutions, strict=True)):
            way, previous, count = kind.way(flag), before(number), h.shape[2]
            assert way is not None
            with_norm = {"norm": norm.of((m.norm1, m.norm2)[number], h), "shift": shift, "silu": True}
            h = written_frames(k, way, h, previous, **with_norm)
            if kind.continues:
                count = min(way.written.front, count + (0 if previous is None else previous.shape[2]))
                keep(h[:, :, h.shape[2] - count :])
            h, shift = convolve_written(way, kind.of((m.conv1, m.conv2)[number]), h)
        return sum_frames(k, h, self._shortcut(x, flag), shift)

    def _shortcut(self, x: torch.Tensor, flag: object) -> torch.Tensor:
        m, k, made = self.module, self.kernels, self.made
        if made.shortcut_norm is not None:
            name, norm = made.shortcut_norm
            x = k.convolution_frames(x, norm=norm.of(getattr(m, name), x))
        if made.shortcut is None:
            return x
        name, shortcut = made.shortcut
        conv, way = shortcut.of(getattr(m, name)), shortcut.way(flag) or shortcut.way()
        assert way is not None
        pointwise = (conv.kernel_size, conv.stride, way.zeros) == ((1, 1, 1), (1, 1, 1), (0, 0, 0))
        if pointwise and not coarser_as_convolution(x):
            rows = k.linear(x.permute(0, 2, 3, 4, 1), conv.weight.flatten(1), conv.bias)
            return rows.permute(0, 4, 1, 2, 3)
        y, bias = convolve_written(way, conv, written_frames(k, way, x))
        return y if bias is None else sum_frames(k, y, None, bias)


def _made(m: nn.Module, context: Context) -> BlockParts | str:
    """What a block is made of, or why it is another one than known here."""
    norms, convolutions = context.of(VideoNorms), context.of(VideoConvolutions)
    first, second = (convolutions.of(getattr(m, name)) for name in ("conv1", "conv2"))
    if first is None or second is None or first.keeps is not None or second.keeps is not None:
        return "a convolution of another make"
    before, between = (norms.of(getattr(m, name)) for name in ("norm1", "norm2"))
    if before is None or between is None:
        return "a norm of another make"
    if any(p is not None for p in vars(m)["_parameters"].values()):
        return "weights of its own"
    shortcut, shortcut_norm, others = None, None, []
    for name, child in vars(m)["_modules"].items():
        if child is None or name in ("norm1", "conv1", "norm2", "conv2"):
            continue
        conv, norm = convolutions.of(child), norms.of(child)
        if type(child) in WITHOUT_WEIGHTS:
            others.append(name)
        elif conv is not None and conv.keeps is None and shortcut is None:
            shortcut = name, conv
        elif norm is not None and shortcut_norm is None:
            shortcut_norm = name, norm
        else:
            return f"a part {name} of another make"
    return BlockParts((before, between), (first, second), shortcut, shortcut_norm, tuple(others))


def match_video_resnet(site: Site, context: Context) -> Match | Skip | None:
    """Two norms and two convolutions over frames, an optional shortcut; confirmed by running it, in chunks too."""
    m: Any = site.module
    if not holds(m, "norm1", "conv1", "norm2", "conv2") or context.find(VideoConvolutions) is None:
        return None
    if any(isinstance(conv, nn.Conv2d) for conv in (m.conv1, m.conv2)):
        return None
    if meta_weights(m):
        return Skip("weights are not loaded (meta device)")
    made = _made(m, context)
    if isinstance(made, str):
        return Skip(made)
    if (reason := untouched(*(getattr(m, name) for name in made.others))) is not None:
        return Skip(reason)
    forward = VideoResnetForward(m, site.path, context.kernels, context.log, made=made)
    x = example(m, 2, made.convolutions[0].of(m.conv1).in_channels, 3, 4, 5)
    reason = context.probe.unlike(forward, (x,), variant=made)
    if reason is None and CACHE in forward.names:
        candidate = VideoResnetForward(m, site.path, context.kernels.plain(), context.log, made=made)
        reason = context.probe.disagreement(InChunks(m), InChunks(m, candidate.fast).forward, (x,), variant=made)
    return Match(forward) if reason is None else Skip(reason)


class InChunks(nn.Module):
    """Calls a block with one frame, another, and the rest of a video, each time with the frames before; for a probe.

    It returns all outputs, and all frames that are kept, as one vector.
    """

    def __init__(self, block: nn.Module, call: Callable | None = None):
        super().__init__()
        self.block = block
        self.call = partial(type(block).forward, block) if call is None else call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache: list = [None, None, None]
        found = []
        for chunk in x.split((1, 1, x.shape[2] - 2), 2):
            place = [0]
            found.append(self.call(chunk, **{CACHE: cache, PLACE: place}))
            found += cache[: place[0]]
        return torch.cat([one.flatten() for one in found])
