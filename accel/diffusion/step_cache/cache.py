"""The step cache, lossy: between whole calls of a UNet only its outermost layers run, the rest is extrapolated.

From step to step of a denoising loop the image a UNet sees changes in detail, while what its deep layers make of it
changes slowly and smoothly. Every n-th call is computed whole and keeps what enters the last layer of the last up
block. The calls between run conv_in, that layer and conv_out; what enters it lies on the straight line through the last
two kept values. Ma, Fang and Wang, "DeepCache: Accelerating Diffusion Models for Free", CVPR 2024, for the split, with
plain reuse; Liu et al., "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", ICCV 2025, for
the extrapolation.

The UNet's own forward runs in every call, so whatever a pipeline passes to it works; only its blocks know.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accel.diffusion.step_cache.features import Features, StepCall
from accel.diffusion.step_cache.tracks import Tracks
from accel.errors import PatchConflict
from accel.fusion.loop import Loop
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.ledger import Ledger
from accel.patching.patch import ForwardPatch

NAME = "step cache"  # of the rule
MOST_FEATURES = 16  # kept at a time, by thread, shape of the sample and lane


class StepCacheState:
    """What the forwards of one UNet share: interval, tracks, features, and the call in progress.

    Calls of several threads run one after the other. Each thread has tracks and features of its own: what it computes
    does not depend on what the others do meanwhile.
    """

    def __init__(self, loop: Loop, interval: int) -> None:
        self.loop, self.interval = loop, interval
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        return {"loop": self.loop, "interval": self.interval}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.lock = threading.RLock()
        self._local = threading.local()
        self.features: OrderedDict[tuple, Features] = OrderedDict()
        self.numbers = itertools.count()
        self.current: StepCall | None = None
        self.stream: torch.cuda.Stream | None = None

    @property
    def tracks(self) -> Tracks:
        """This thread's."""
        if not hasattr(self._local, "tracks"):
            self._local.tracks = Tracks(self.loop)
        return self._local.tracks

    def variant(self) -> tuple:
        """What the CUDA graph of the call in progress depends on besides its inputs; the report shows it."""
        if self.current is None:
            return ()
        return "whole" if self.current.whole else "between whole ones", f"features {self.current.features.number}"

    def kept(self, lane: int, sample: torch.Tensor) -> Features:
        key = threading.get_ident(), lane, sample.shape, sample.dtype, sample.device
        if key not in self.features:
            if len(self.features) >= MOST_FEATURES:
                self.features.popitem(last=False)
            self.features[key] = Features(next(self.numbers))
        self.features.move_to_end(key)
        return self.features[key]

    def follow(self, device: torch.device) -> None:
        """On another CUDA stream than before: what was kept there is written, and read, before this call begins."""
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            if self.stream is not None and self.stream != stream:
                stream.wait_stream(self.stream)
            self.stream = stream


class StepCacheForward(FastForward):
    """The UNet's forward: decides what a call is to do, and hands it to the forward beneath, a CUDA graph or stock."""

    def __init__(
        self,
        module: nn.Module,
        path: str,
        kernels: Kernels,
        ledger: Ledger,
        state: StepCacheState,
        paths: tuple[str, ...],
    ) -> None:
        super().__init__(module, path, kernels, ledger)
        self.state, self.paths = state, paths
        self.blocks: dict[str, ForwardPatch] = {}  # what stands in for the blocks of these paths
        self.inner: FastForward | None = None
        self.told = ""  # of the forward beneath, in the report
        self.names = tuple(self.__signature__.parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner or self.stock
        if torch.compiler.is_compiling():
            return inner(*args, **kwargs)
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        with self.state.lock:
            reason = self.mode() or self.unfit(arguments)
            if reason is not None:
                self._computed_whole(reason)
                self.state.tracks.forget()
                return inner(*args, **kwargs)
            return self.fast(inner, arguments, args, kwargs)

    def unfit(self, arguments: dict) -> str | None:
        sample = arguments.get("sample")
        if type(sample) is not torch.Tensor:
            return f"a sample of type {type(sample).__name__}"
        if sample.is_cuda and torch.cuda.is_current_stream_capturing():
            return "part of somebody's CUDA graph"
        return next(filter(None, map(self._unfit_block, self.paths)), None)

    def _unfit_block(self, path: str) -> str | None:
        try:
            self.blocks[path].check()
        except (KeyError, PatchConflict):
            return f"{path} has another forward"
        reason = self.blocks[path].value.changed()
        if reason is not None:
            return f"{path}: {reason}"
        attributes = vars(self.blocks[path].owner)
        return f"forward hooks on {path}" if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] else None

    def fast(self, inner: Callable, arguments: dict, args: tuple, kwargs: dict) -> Any:
        state, sample = self.state, arguments["sample"]
        if state.interval == 1:
            return inner(*args, **kwargs)
        state.follow(sample.device)
        track, reason = state.tracks.find(arguments)
        if reason is not None:
            self._computed_whole(reason)
        if track is None:
            return inner(*args, **kwargs)
        step = state.tracks.step
        track.features = features = track.features or state.kept(track.lane, sample)
        whole = track.due(step, state.interval)
        if whole:
            features.shift(first=track.whole is None)
        else:
            features.aim(track.beyond(step))
        state.current = StepCall(features, whole)
        try:
            output = inner(*args, **kwargs)
        except BaseException:
            state.tracks.forget()
            raise
        finally:
            state.current = None
        if whole:
            track.computed_whole(step)
        return output

    def note(self) -> str:
        """For the report."""
        often = f"in one call of {self.state.interval}"
        return "; ".join(filter(None, (f"lossy: deep layers run {often}, extrapolated between", self.told)))

    def _computed_whole(self, reason: str) -> None:
        self.ledger.fell_back(self.path, f"{NAME}: computed whole: {reason}")
