"""How a convolution over video pads frames, rows and columns, found by running it on small inputs.

There are many causal ones: subclasses of Conv3d, and modules around one. They pad with zeros or the first frame, and
may take the frames of the chunk before.
"""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accel_kernels import FramePadding, convolution_frames
from torch import nn

from accel.fusion.norm_kind import close, random_twin, stock_output
from accel.patching.guard import plain_settings
from accel.patching.structure import foreign, meta_weights, tampered


class VideoPadding(NamedTuple):
    """written: the padding that is written before the convolution. zeros: what the convolution adds on either side."""

    written: FramePadding
    zeros: tuple[int, int, int]


@dataclass(frozen=True)
class VideoConvolution:
    """inner: the name of the convolution in the module; "" where it is the module itself.

    ways: the padding by the value of the second argument, where that is a flag; under None, the default. continues:
    whether the second argument may be frames before x, in place of as many padding frames. keeps: whether it returns
    its last input frames too, for the next call; None where it returns a single tensor.
    """

    inner: str
    ways: tuple[tuple[object, VideoPadding], ...]
    continues: bool = False
    keeps: bool | None = None

    def of(self, module: Any) -> Any:
        return getattr(module, self.inner) if self.inner else module

    def parts(self, module: Any) -> tuple:
        return (module, self.of(module)) if self.inner else (module,)

    def way(self, flag: object = None) -> VideoPadding | None:
        return next((way for value, way in self.ways if value is flag), None)

    def takes(self, previous: object, x: torch.Tensor, channels: int) -> bool:
        """Whether `previous` may be frames before x, of so many channels and of the size of x."""
        if previous is None:
            return True
        way = self.way()
        return (
            self.continues
            and way is not None
            and type(previous) is torch.Tensor
            and previous.dim() == 5
            and (previous.dtype, previous.device) == (x.dtype, x.device)
            and 0 < previous.shape[2] <= way.written.front
            and (*previous.shape[:2], *previous.shape[3:]) == (x.shape[0], channels, *x.shape[3:])
        )


class VideoConvolutions(dict[tuple, VideoConvolution | None]):
    """The convolutions of one model; those with the same settings are run once for all."""

    def of(self, module: Any) -> VideoConvolution | None:
        """None for what is no convolution known here."""
        name = _inner(module)
        if name is None or tampered(module) is not None or meta_weights(module):
            return None
        conv = getattr(module, name) if name else module
        if tampered(conv) is not None or conv.groups != 1 or conv.padding_mode != "zeros" or conv.transposed:
            return None
        tuples = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.bias is None)
        more = tuple((key, value) for key, value in vars(module).items() if isinstance(value, tuple))
        key = (plain_settings(module), plain_settings(conv), tuples, more)
        if key not in self:
            own = foreign(module) is None and foreign(conv) is None
            self[key] = _Trial(module, name).find() if own else None
        return self[key]


def _inner(module: nn.Module) -> str | None:
    """The name of the convolution over video that is all that a module holds."""
    children = {name: child for name, child in vars(module)["_modules"].items() if child is not None}
    if isinstance(module, nn.Conv3d):
        return "" if not children else None
    one = next(iter(children.items()), ("", None))
    parameters = any(p is not None for p in vars(module)["_parameters"].values())
    return one[0] if len(children) == 1 and isinstance(one[1], nn.Conv3d) and not parameters else None


class _Trial:
    """A copy of a module whose convolution has few channels and random weights, in float32 on the CPU."""

    def __init__(self, module: Any, name: str):
        self.generator = torch.Generator().manual_seed(0)
        conv = getattr(module, name) if name else module
        conv = random_twin(conv, self.generator, {"weight": (3, 2, *conv.kernel_size), "bias": (3,)})
        vars(conv).update(in_channels=2, out_channels=3)
        self.conv, self.name, self.module = conv, name, conv
        if name:
            self.module = copy.copy(module)
            vars(self.module).update(_modules={name: conv}, training=False)
        self.x = self._random(2, 2, 5, 6, 7)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device="cpu")

    def find(self) -> VideoConvolution | None:
        others = list(inspect.signature(type(self.module).forward).parameters.values())[2:]
        defaults = [one.default for one in others]
        if any(default is inspect.Parameter.empty for default in defaults) or len(others) > 1:
            return None
        usual = self._way()
        if usual is None:
            return None
        found = VideoConvolution(self.name, ((None, usual[0]),), keeps=usual[1])
        if not others:
            return found if found.keeps is None else None
        if isinstance(defaults[0], bool):
            ways = [(flag, self._way(flag)) for flag in (True, False)]
            known = tuple((flag, way[0]) for flag, way in ways if way is not None)
            return VideoConvolution(self.name, (*found.ways, *known)) if found.keeps is None else None
        if self._continues(usual[0], usual[1]):
            return VideoConvolution(self.name, found.ways, True, usual[1])
        return None if found.keeps else found

    def _way(self, *more: object) -> tuple[VideoPadding, bool | None] | None:
        """How it pads, and `keeps`."""
        wanted = self._stock(self.x, *more)
        for way in _ways(self.conv) if wanted is not None else ():
            frames = _written(self.x, way)
            if (keeps := self._agrees(wanted, frames, way)) is not False:
                return way, None if keeps is True else keeps[0]
        return None

    def _stock(self, *inputs: object) -> Any:
        """The output of the module; None where it takes no such inputs, or changes its own attributes."""
        before = dict(vars(self.module)), dict(vars(self.conv))
        out = stock_output(self.module, *inputs)
        after = vars(self.module), vars(self.conv)
        same = all(_same(*pair) for pair in zip(before, after, strict=True))
        return out if same else None

    def _agrees(self, wanted: Any, frames: torch.Tensor, way: VideoPadding) -> Any:
        """Whether the convolution of these frames is what it gives; where it gives two, a tuple with `keeps`."""
        try:
            got = F.conv3d(frames, self.conv.weight, self.conv.bias, self.conv.stride, way.zeros, self.conv.dilation)
        except RuntimeError:  # fewer frames than its kernel has
            return False
        if isinstance(wanted, torch.Tensor):
            return close(got, wanted)
        if not (isinstance(wanted, tuple) and len(wanted) == 2 and _same_tensor(got, wanted[0])):
            return False
        if wanted[1] is None:
            return (False,)
        return (True,) if _same_tensor(kept(frames, self.conv), wanted[1]) else False

    def _continues(self, way: VideoPadding, keeps: bool | None) -> bool:
        """Whether frames given second stand for as many of the padding in front of the others, one or all of them."""
        front = way.written.front
        for count in {1, front} if keeps is None else {front}:
            previous = self._random(2, 2, count, 6, 7)
            padding = way.written._replace(front=front - count)
            frames = _written(torch.cat([previous, self.x], 2), way._replace(written=padding))
            wanted = self._stock(self.x, previous)
            agrees = front > 0 and wanted is not None and self._agrees(wanted, frames, way)
            if agrees is not (True if keeps is None else agrees) or not agrees:
                return False
        return front > 0


def kept(frames: torch.Tensor, conv: nn.Conv3d) -> torch.Tensor:
    """The last input frames that a convolution returns for the next call; all of them for a kernel of one frame."""
    return frames[:, :, 1 - conv.kernel_size[0] :] if conv.kernel_size[0] > 1 else frames


def _ways(conv: nn.Conv3d) -> Iterator[VideoPadding]:
    """The paddings that a convolution may have."""
    spans = [(size - 1) * step for size, step in zip(conv.kernel_size, conv.dilation, strict=True)]
    own = conv.padding if isinstance(conv.padding, tuple) else (0, 0, 0)
    fronts = [(spans[0], 0), (spans[0] // 2, spans[0] // 2), (own[0], own[0]), (spans[0] + 1 - conv.stride[0], 0)]
    fronts.append((0, 0))
    edges = [(spans[1] // 2, spans[2] // 2), own[1:], (0, 0)]
    for (front, back), (height, width) in product(dict.fromkeys(fronts), dict.fromkeys(edges)):
        if front < 0:
            continue
        for repeat_frames, repeat_edges in product((False, True), (False, True)):
            if (repeat_frames and not front + back) or (repeat_edges and not height + width):
                continue
            zeros = [0, height, width]
            written = FramePadding(front, back, height, width, repeat_frames, repeat_edges)
            if repeat_edges:
                zeros = [0, 0, 0]
            else:
                written = written._replace(height=0, width=0)
            if front == back and not repeat_frames:
                written, zeros[0] = written._replace(front=0, back=0), front
            yield VideoPadding(written, (zeros[0], zeros[1], zeros[2]))


def _written(x: torch.Tensor, way: VideoPadding) -> torch.Tensor:
    return convolution_frames.reference(x, way.written)


def _same(before: dict, after: dict) -> bool:
    return before.keys() == after.keys() and all(before[name] is after[name] for name in before)


def _same_tensor(got: torch.Tensor, wanted: object) -> bool:
    return isinstance(wanted, torch.Tensor) and close(got, wanted)
