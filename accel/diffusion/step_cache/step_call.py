"""What one call of a denoiser is to do, and what it has shown."""

from dataclasses import dataclass, field

from accel.diffusion.step_cache.features import Features
from accel.diffusion.step_cache.stack import Stack, StackTrace


@dataclass(frozen=True)
class StepCall:
    """traces: what a whole call has shown so far of stacks of blocks, by their names. entered, ended: in a call between
    the stacks of which some block and of which the last block was called.
    """

    features: Features
    whole: bool
    traces: dict[str, StackTrace] = field(default_factory=dict)
    entered: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)

    def misfit(self, stacks: tuple[Stack, ...]) -> str | None:
        """Why rows cannot go by the blocks, as a whole call has shown. None too where a graph ran and showed none."""
        for stack in stacks if self.traces else ():
            trace = self.traces.get(stack.name)
            if trace is None:
                return f"{stack.name} are not called"
            if not trace.finished:
                return trace.reason or f"{stack.path(stack.size - 1)} is not called"
        return None
