"""Norms over the channels of a pixel of a video, or over groups of channels, recognized by running them.

Stock takes up to nine passes over all frames for one, some of them in float32. Here it is one pass, or none where the
convolution after it includes the norm.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from accel_kernels import FrameGroups, Norm, convolution_frames
from torch import nn

from accel.fusion.channels_last import channel_stats_of, ndhwc
from accel.fusion.norm_kind import close, random_twin, stock_output
from accel.patching.fast_forward import FastForward
from accel.patching.guard import Parts, plain_settings
from accel.patching.rule import Context, Match, Site
from accel.patching.structure import foreign, meta_weights, tampered

SMALLEST = 1e-12  # length by which F.normalize divides at least
FORMS = {"frames": "(N, C, T, H, W)", "images": "(N, C, H, W)", "last": "(..., C)"}
DIMENSIONS = {"frames": 5, "images": 4, "last": 5}
WIDTH = 24  # channels that a norm without weights is tried with


@dataclass(frozen=True)
class VideoNorm:
    """groups: whether it is a group norm; then `inner` is the name of the GroupNorm in the module, "" the module
    itself.

    weight, bias: names of parameters. eps: the name of a setting; None is that of F.normalize. forms: of FORMS, those
    of inputs that the module takes.
    """

    weight: str | None = None
    bias: str | None = None
    eps: str | None = None
    centered: bool = False
    forms: tuple[str, ...] = ("frames",)
    groups: bool = False
    inner: str = ""
    per_frame: bool = False

    def parts(self, module: Any) -> tuple:
        return (module, getattr(module, self.inner)) if self.inner else (module,)

    def of(self, module: Any, x: torch.Tensor) -> Norm | FrameGroups:
        """With the tensors that the module holds now, for the frames x."""
        if self.groups:
            norm = getattr(module, self.inner) if self.inner else module
            stats = None if self.per_frame else channel_stats_of(x)
            return FrameGroups(norm.num_groups, norm.weight, norm.bias, norm.eps, self.per_frame, stats)
        held = module._parameters
        weight, bias = (None if name is None else held[name].view(-1) for name in (self.weight, self.bias))
        eps = SMALLEST**2 / x.shape[1] if self.eps is None else float(getattr(module, self.eps))
        return Norm(weight, bias, eps, self.centered)


class VideoNorms(dict[tuple, VideoNorm | None]):
    """The norms of one model; those with the same settings and sizes are run once for all."""

    def of(self, module: nn.Module) -> VideoNorm | None:
        """None for what is no norm known here."""
        if tampered(module) is not None or meta_weights(module) or not _like_a_norm(module):
            return None
        shapes = tuple((name, parameter.shape) for name, parameter in module.named_parameters())
        key = (plain_settings(module), *map(plain_settings, module.children()), shapes)
        if key not in self:
            self[key] = _find(module) if foreign(module) is None else None
        return self[key]


def _like_a_norm(module: nn.Module) -> bool:
    """Whether it is a group norm, holds one and nothing else, or holds at most a weight and a bias by channel."""
    children = [child for child in vars(module)["_modules"].values() if child is not None]
    own = [p for p in vars(module)["_parameters"].values() if p is not None]
    if type(module) is nn.GroupNorm:
        return True
    if children:
        return len(children) == 1 and not own and type(children[0]) is nn.GroupNorm and tampered(children[0]) is None
    if vars(module)["_buffers"] or len(own) > 2 or not ("norm" in type(module).__name__.lower() or own):
        return False
    return all(p.numel() == p.shape[0] == own[0].numel() for p in own if p.dim()) and all(p.dim() for p in own)


def _find(module: nn.Module) -> VideoNorm | None:
    if type(module) is nn.GroupNorm:
        return VideoNorm(groups=True)
    name = next((name for name, child in vars(module)["_modules"].items() if child is not None), "")
    trial, channels = _copy(module, name)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, channels, 3, 2, 3, generator=generator, device="cpu") * 2 + 1.5
    grouped = [VideoNorm(groups=True, inner=name, per_frame=per_frame) for per_frame in (False, True)]
    kinds = grouped if name else list(_kinds(module))
    inputs = [x, x * 1e-4]  # numbers so small that eps shows
    wanted = {form: [_run(trial, one, form) for one in inputs] for form in (("frames",) if name else FORMS)}
    for kind in kinds:
        normed = [convolution_frames.reference(one, norm=kind.of(trial, one)) for one in inputs]
        if forms := tuple(form for form, outs in wanted.items() if all(map(_agree, normed, outs))):
            return replace(kind, forms=forms)
    return None


def _copy(module: nn.Module, name: str) -> tuple[nn.Module, int]:
    """The module with random weights in float32 on the CPU, and its channels."""
    generator = torch.Generator().manual_seed(0)
    trial = random_twin(module, generator)
    if name:
        held = random_twin(getattr(module, name), generator)
        vars(trial).update(_modules={name: held})
        return trial, int(held.num_channels)
    return trial, next((p.shape[0] for p in trial.parameters()), WIDTH)


def _kinds(module: nn.Module) -> Iterator[VideoNorm]:
    names = [name for name, p in vars(module)["_parameters"].items() if p is not None]
    first, second = (*names, None, None)[:2]
    pairs = [(first, None)] if second is None else [(first, second), (second, first)]
    epsilons = [name for name, value in vars(module).items() if type(value) is float and 0 < value < 0.1]
    for weight, bias in pairs:
        for eps in (*epsilons, None):
            for centered in (False, True):
                yield VideoNorm(weight, bias, eps, centered)


def _run(trial: nn.Module, x: torch.Tensor, form: str) -> torch.Tensor | None:
    """What its class's forward gives, as (N, C, T, H, W); None where it takes no such input."""
    given = _formed(x, form)
    out = stock_output(trial, given)
    if not isinstance(out, torch.Tensor) or out.dtype != x.dtype or out.shape != given.shape:
        return None
    return out.view(x.shape) if form == "images" else out.movedim(-1, 1) if form == "last" else out


def _formed(x: torch.Tensor, form: str) -> torch.Tensor:
    """(N, C, T, H, W) as a norm of this form takes it."""
    return x.flatten(2, 3) if form == "images" else x.movedim(1, -1) if form == "last" else x


def _agree(normed: torch.Tensor, wanted: torch.Tensor | None) -> bool:
    return wanted is not None and close(normed, wanted)


class VideoNormForward(FastForward):
    """A norm over (N, C, T, H, W), or (N, C, H, W) of single frames, or with channels last, through one pass."""

    norm: VideoNorm

    def _form(self, x: torch.Tensor) -> str | None:
        return next((form for form in self.norm.forms if DIMENSIONS[form] == x.dim()), None)

    def parts(self) -> Parts:
        return Parts(self.norm.parts(self.module))

    def _given(self, args: tuple, kwargs: dict) -> Any:
        given = self.named(args, kwargs)
        return given.pop(self.names[0]), [value for value in given.values() if value is not None]

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        x, others = self._given(args, kwargs)
        if type(x) is not torch.Tensor or self._form(x) is None or x.numel() == 0:
            return f"input other than {' or '.join(FORMS[form] for form in self.norm.forms)}, frames of a video"
        if others or any(p.dtype is not x.dtype for p in self.module.parameters()):
            return "more than one argument, or dtypes of which stock promotes one to another"
        weight = next(self.module.parameters(), None)
        channels = x.shape[-1] if self._form(x) == "last" else x.shape[1]
        return None if weight is None or weight.numel() == channels else "input of another number of channels"

    def fast(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x, _ = self._given(args, kwargs)
        form = self._form(x)
        frames = ndhwc(x.unsqueeze(2) if form == "images" else x.movedim(-1, 1) if form == "last" else x)
        y = self.kernels.convolution_frames(frames, norm=self.norm.of(self.module, frames))
        return y.squeeze(2) if form == "images" else y.movedim(1, -1) if form == "last" else y


def match_video_norm(site: Site, context: Context) -> Match | None:
    """A norm in a model with convolutions over video; nn.GroupNorm and nn.LayerNorm have rules of their own."""
    norms = context.find(VideoNorms)
    if norms is None or type(site.module) in (nn.GroupNorm, nn.LayerNorm):
        return None
    found = norms.of(site.module)
    if found is None:
        return None
    return Match(VideoNormForward(site.module, site.path, context.kernels, context.log, norm=found))
