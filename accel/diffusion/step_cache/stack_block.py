"""The blocks of a diffusion transformer under the step cache."""

from typing import Any

from torch import nn

from accel.diffusion.step_cache.cache import StepCacheState
from accel.diffusion.step_cache.cached_block import CachedBlock
from accel.diffusion.step_cache.stack import Stack, StackTrace
from accel.diffusion.step_cache.step_call import StepCall
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.ledger import Ledger


class StackBlock(CachedBlock):
    """A block of a stack. In the calls between whole ones rows pass it by; the last one adds what all would have added.

    The first of a stack may run in every call.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        kernels: Kernels,
        ledger: Ledger,
        state: StepCacheState,
        inner: FastForward | None,
        stack: Stack,
    ) -> None:
        super().__init__(module, path, kernels, ledger, state, inner)
        self.stack, self.index = stack, int(path.rpartition(".")[2])

    def fast(self, call: StepCall, *args: Any, **kwargs: Any) -> Any:
        given = self.given(args, kwargs)
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
