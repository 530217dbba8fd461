"""The step cache, lossy: between whole calls of a denoiser only its outermost layers run, the rest is extrapolated.

From step to step of a denoising loop the image a denoiser sees changes in detail, while what its deep layers make of it
changes slowly and smoothly. Every n-th call is computed whole. Of a UNet it keeps what enters the last layer of the
last up block; the calls between run conv_in, that layer and conv_out. Of a transformer it keeps what the blocks after
the first add to the rows; the calls between run the embedders, the first block, and what follows the blocks. What is
left out lies on the straight line through the last two kept values, for transformers half as far along it.

Ma, Fang and Wang, "DeepCache: Accelerating Diffusion Models for Free", CVPR 2024, for the split of UNets, with plain
reuse; Chen et al., "Delta-DiT: A Training-Free Acceleration Method Tailored for Diffusion Transformers", 2024, for what
blocks add; Liu et al., "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", ICCV 2025, for
the extrapolation.

The denoiser's own forward runs in every call, so whatever a pipeline passes to it works; only its blocks know.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from accel_kernels.warmup import warming_up
from torch.utils import _pytree as pytree

from accel.diffusion.dit.block import difference, has_finite_numbers
from accel.diffusion.step_cache.features import Features
from accel.diffusion.step_cache.stack import BlockStack, StepCall
from accel.diffusion.step_cache.tracks import StepArguments, Tracks
from accel.errors import PatchConflict, reason_of
from accel.fusion.loop import DenoisingLoop
from accel.libraries.diffusion import CACHED_STEPS
from accel.libraries.hooks import skips
from accel.patching.fast_forward import FastForward
from accel.patching.owner import PartlyCopied
from accel.patching.rule import ForwardPatch

NAME = "step cache"  # of the rule
DAMPED = 0.5  # of the way along the line, for what blocks add: it bends more than the output of a UNet's layers
MOST_FEATURES = 16  # kept at a time, by thread, shapes of a call and slot
MOST_BYTES = 2**31  # beyond which only those are kept that the loop in progress uses


class StepCacheState(PartlyCopied):
    """What the forwards of one denoiser share: interval, tracks, features, and the call in progress.

    Calls of several threads run one after the other. Each thread has its own tracks and features, so threads do not
    influence each other's results.
    """

    copied = ("loop", "interval", "arguments")

    def __init__(self, loop: DenoisingLoop, interval: int, arguments: StepArguments) -> None:
        self.loop, self.interval, self.arguments = loop, interval, arguments
        self.renew()

    def renew(self) -> None:
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
            self._local.tracks = Tracks(self.loop, self.arguments)
        return self._local.tracks

    def variant(self) -> tuple:
        """What the CUDA graph of the call in progress depends on besides its inputs; shown in the report."""
        if self.current is None:
            return ()
        return "whole" if self.current.whole else "between whole ones", f"features {self.current.features.number}"

    def kept(self, slot: int, shapes: tuple) -> Features:
        """The features of a slot for calls of these shapes; new ones replace those unused the longest."""
        key = threading.get_ident(), slot, shapes
        if key not in self.features:
            used = [track.features for track in self.tracks.tracks.values()]
            idle = [one for one, held in self.features.items() if not any(held is features for features in used)]
            while idle and self._crowded():
                del self.features[idle.pop(0)]
            self.features[key] = Features(self.numbers)
        self.features.move_to_end(key)
        return self.features[key]

    def _crowded(self) -> bool:
        return len(self.features) >= MOST_FEATURES or sum(f.nbytes for f in self.features.values()) > MOST_BYTES

    def follow(self, device: torch.device) -> None:
        """Orders this call behind the last one, where it runs on another CUDA stream."""
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            if self.stream is not None and self.stream != stream:
                stream.wait_stream(self.stream)
            self.stream = stream


class StepCacheForward(FastForward):
    """The model's forward: decides whether a call is whole, and hands it to the CUDA graph or stock forward beneath.

    stacks: of a transformer. Whether rows can bypass their blocks is known only after a whole call.
    """

    def __init__(
        self, *place: Any, state: StepCacheState, paths: tuple[str, ...], stacks: tuple[BlockStack, ...] = ()
    ) -> None:
        super().__init__(*place)
        self.state, self.paths, self.stacks = state, paths, stacks
        self.blocks: dict[str, ForwardPatch] = {}  # what stands in for the blocks of these paths
        self.inner: FastForward | None = None
        self.told = ""  # of the forward beneath, in the report

    def call(self, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner or self.stock
        if torch.compiler.is_compiling():
            return inner(*args, **kwargs)
        given = self.named(args, kwargs)
        with self.state.lock:
            reason = self.mode() or self.unfit(given)
            if reason is not None:
                self._computed_whole(reason)
                self.state.tracks.forget()
                return inner(*args, **kwargs)
            return self.fast(inner, given, args, kwargs)

    def unfit(self, given: dict) -> str | None:
        if (reason := self.state.arguments.unfit(given)) is not None:
            return reason
        if self.state.arguments.samples(given)[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return "part of somebody's CUDA graph"
        if (config := getattr(self.module, CACHED_STEPS, None)) is not None:
            return f"diffusers' own cache is enabled ({type(config).__name__})"
        return next(filter(None, map(self._unfit_block, self.paths)), None)

    def _unfit_block(self, path: str) -> str | None:
        try:
            self.blocks[path].check()
        except (KeyError, PatchConflict):
            return f"{path} has another forward"
        if (reason := self.blocks[path].value.changed()) is not None:
            return f"{path}: {reason}"
        attributes = vars(self.blocks[path].owner)
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
            return f"forward hooks on {path}"
        if skips(self.blocks[path].owner):
            return f"a hook of diffusers in the place of {path}"
        return None

    def fast(self, inner: Callable, given: dict, args: tuple, kwargs: dict) -> Any:
        state = self.state
        if state.interval == 1:
            return inner(*args, **kwargs)
        state.follow(state.arguments.samples(given)[0].device)
        track, reason = state.tracks.find(given)
        if track is None:
            self._computed_whole(reason or "")
            return inner(*args, **kwargs)
        track.features = features = track.features or state.kept(track.slot, state.arguments.shapes(given))
        reason = features.reason or reason
        if reason is not None:
            self._computed_whole(reason)
        if features.reason is not None:
            return inner(*args, **kwargs)
        step = state.tracks.step
        whole = track.due(step, state.interval)
        if whole:
            features.shift(first=track.whole is None)
        else:
            ahead = track.beyond(step) - 1
            features.extrapolate_to(1 + (DAMPED if self.stacks else 1) * ahead)
        # With containers of their own, as some forwards empty them, and more than one call may be needed.
        leaves, structure = pytree.tree_flatten((args, kwargs)) if self.stacks else ([(args, kwargs)], None)

        def run(call: StepCall) -> Any:
            args, kwargs = leaves[0] if structure is None else pytree.tree_unflatten(leaves, structure)
            return self._run(call, inner, args, kwargs)

        call = StepCall(features, whole)
        output = run(call)
        if whole:
            track.computed_whole(step)
            features.reason = call.misfit(self.stacks)
            if features.reason is None and self.stacks and not features.compared and not warming_up():
                features.reason = self._compare(run, features, output)
            if features.reason is not None:
                self._computed_whole(features.reason)
        elif call.entered != call.ended:
            features.reason = "blocks are called otherwise than in the whole call before"
            self._computed_whole(features.reason)
            return run(StepCall(features, True))
        return output

    def _run(self, call: StepCall, inner: Callable, args: tuple, kwargs: dict) -> Any:
        self.state.current = call
        try:
            return inner(*args, **kwargs)
        except BaseException:
            self.state.tracks.forget()
            raise
        finally:
            self.state.current = None

    def _compare(self, run: Callable, features: Features, wanted: Any) -> str | None:
        """Why a call without the blocks, of the same inputs, does not give what the whole call just gave."""
        features.extrapolate_to(1)
        try:
            reason = difference(wanted, run(StepCall(features, False)))
        except Exception as error:
            return f"without its blocks it raised {reason_of(error)}"
        features.compared = has_finite_numbers(wanted)
        return None if reason is None else f"without its blocks it {reason}"

    def note(self) -> str:
        """For the report."""
        often = f"in one call of {self.state.interval}"
        return "; ".join(filter(None, (f"lossy: deep layers run {often}, extrapolated between", self.told)))

    def _computed_whole(self, reason: str) -> None:
        self.log.fell_back(self.path, f"{NAME}: computed whole: {reason}")
