"""The blocks of a denoiser under the step cache."""

import copy
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from accel.diffusion.blocks.up_block import SKIPS
from accel.diffusion.step_cache.cache import StepCacheState
from accel.diffusion.step_cache.stack import BlockStack, StackTrace, StepCall
from accel.patching.fast_forward import FastForward


class CachedBlock(FastForward):
    """Outside of a call of the cache it runs its fast forward, `inner`, or stock where it has none."""

    state: StepCacheState
    inner: FastForward | None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        call = None if torch.compiler.is_compiling() else self.state.current
        if call is None:
            return self.whole(*args, **kwargs)
        return self.fast(call, *args, **kwargs)

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """The block itself."""
        return (self.inner or self.stock)(*args, **kwargs)

    @abstractmethod
    def fast(self, call: StepCall, *args: Any, **kwargs: Any) -> Any:
        """The block in a call of the cache."""


HIDDEN = "what enters the last layer"
RESAMPLERS = ("downsamplers", "upsamplers")


class DeepBlock(CachedBlock):
    """A block of the UNet that runs in whole calls alone; its output is not used in the calls between."""

    def fast(self, call: StepCall, *args: Any, **kwargs: Any) -> Any:
        if not call.whole:
            return call.features.blank(self.path)
        output = self.whole(*args, **kwargs)
        call.features.note(self.path, output)
        return output


class LastUpBlock(DeepBlock):
    """The last up block. Its last layer runs in every call; what the layers before it give is extrapolated."""

    def fast(self, call: StepCall, *args: Any, **kwargs: Any) -> Any:
        given = self.named(args, kwargs)
        run = self._runner(given)
        if call.whole:
            hidden = self._before_last(run, given)
            call.features.record(HIDDEN, hidden)
        else:
            hidden = call.features.extrapolated(HIDDEN)
        return self._last(run, given, hidden)

    def in_two_parts(self, **given: Any) -> torch.Tensor:
        """The whole block as stock computes it, for the probe."""
        return self._last(self._stock, given, self._before_last(self._stock, given))

    def _before_last(self, run: Callable, given: dict) -> torch.Tensor:
        return run(PartialBlock(self.module, slice(None, -1), resamplers=False), given | {SKIPS: given[SKIPS][1:]})

    def _last(self, run: Callable, given: dict, hidden: torch.Tensor) -> torch.Tensor:
        given = given | {"hidden_states": hidden, SKIPS: given[SKIPS][:1]}  # the first skip connection is used last
        return run(PartialBlock(self.module, slice(-1, None), resamplers=True), given)

    def _runner(self, given: dict) -> Callable:
        """How to run a part of the block: the fast forward beneath where it takes the call, else stock."""
        inner = self.inner
        if inner is None:
            return self._stock
        reason = inner.mode() or inner.unfit(**given)
        if reason is None:
            return partial(_fused, inner)
        self.log.fell_back(self.path, reason)
        return self._stock

    def _stock(self, part: "PartialBlock", given: dict) -> torch.Tensor:
        return type(self.module).forward(part, **given)


def _fused(inner: FastForward, part: "PartialBlock", given: dict) -> torch.Tensor:
    forward = copy.copy(inner)
    forward.module = part
    return forward.fast(**given)


class PartialBlock:
    """A block with some of its layers; everything else is the block's own."""

    def __init__(self, block: nn.Module, layers: slice, resamplers: bool):
        self.block = block
        for name, child in block.named_children():
            if name in RESAMPLERS:
                setattr(self, name, child if resamplers else None)
            elif isinstance(child, nn.ModuleList):  # lists of equal length, gone through in step
                setattr(self, name, list(child)[layers])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


class StackBlock(CachedBlock):
    """A block of a stack. Between whole calls rows bypass it; the last block adds what all of them would have added.

    The first block of a stack may run in every call.
    """

    def __init__(self, *place: Any, stack: BlockStack, **shared: Any) -> None:
        super().__init__(*place, **shared)
        self.stack, self.index = stack, int(self.path.rpartition(".")[2])

    def fast(self, call: StepCall, *args: Any, **kwargs: Any) -> Any:
        given = self.named(args, kwargs)
        if call.whole:
            trace = call.traces.setdefault(self.stack.name, StackTrace(self.stack))
            trace.enter(self.index, given)
            output = self.whole(*args, **kwargs)
            trace.leave(self.index, output, call.features)
            return output
        call.entered.add(self.stack.name)
        if self.index < self.stack.kept:
            return self.whole(*args, **kwargs)
        rows = call.features.rows[self.stack.name]
        if self.index < self.stack.size - 1:
            return rows.passed(given)
        call.ended.add(self.stack.name)
        return rows.ended(given, self.stack.name, call.features)
