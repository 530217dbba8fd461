"""What belongs to a pipeline as a whole: where its loops begin, and which schedulers it has."""

import copy
import types
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from accel.cuda_graphs.rule import GraphForward
from accel.diffusion.schedulers import RULES, fetch_timesteps
from accel.diffusion.tiling import tiles_within
from accel.errors import PatchConflict
from accel.fusion.channels_last import ChannelsLast
from accel.fusion.loop import DenoisingLoop
from accel.fusion.stacked_linears import Stacked
from accel.libraries.models import denoising_loops, pipelines_in
from accel.offload.hooks import SWITCH, OffloadPatch
from accel.patching.owner import InstanceMethod, PartlyCopied, disown
from accel.patching.probe import Probe
from accel.patching.rule import Context, Patch
from accel.planning.memory import models_of, pipeline_turns
from accel.planning.plan import PLAN, Plan, StageResult, plan_of
from accel.planning.targets import schedulers_in


class LoopStart(PartlyCopied, InstanceMethod):
    """Callable that stands in `vars(holder)["progress_bar"]`, which is called between set_timesteps and a loop.

    It announces the loop and patches a scheduler that was put into the pipeline since. holder: the pipeline, or a block
    of it that loops.
    """

    name = "progress_bar"
    copied = ("pipe", "holder", "context", "wrapped", "current")

    def __init__(self, pipe: Any, holder: Any, context: Context):
        self.pipe, self.holder = pipe, holder
        self.context = replace(context, options=replace(context.options, strict=False), probe=Probe())
        self.wrapped = vars(holder).get("progress_bar")
        self.current = schedulers_in(pipe)
        self.renew()

    def renew(self) -> None:
        self.former: WeakSet = WeakSet()

    @property
    def owner(self) -> Any:
        return self.holder

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of a block that is copied without its pipeline, as `pipe.blocks` does, the copy's own method."""
        if id(self.pipe) not in memo and id(self.holder) in memo:
            return types.MethodType(type(self.holder).progress_bar, memo[id(self.holder)])
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self._follow()
        self.context.of(DenoisingLoop).begin(self.current.values())
        if self.wrapped is not None:
            return self.wrapped(*args, **kwargs)
        return type(self.holder).progress_bar(self.holder, *args, **kwargs)

    def _follow(self) -> None:
        schedulers = schedulers_in(self.pipe)
        for name, scheduler in schedulers.items():
            if self.current.get(name) is not scheduler and plan_of(scheduler) is None:
                disown(scheduler)
                plan = Plan(scheduler, RULES, self.context.for_model())
                plan.apply()
                vars(scheduler)[PLAN] = plan
            fetch_timesteps(scheduler)
        # One that was taken out may come back, or be another pipeline's: it stays as it is until `restore`.
        self.former.update(self.current.values())
        self.former.difference_update(schedulers.values())
        self.current = schedulers

    def restore_former(self) -> None:
        """Restores the schedulers that were in the pipeline and are not any more."""
        self.former.update(self.current.values())
        self.former.difference_update(schedulers_in(self.pipe).values())
        for scheduler in self.former:
            plan = plan_of(scheduler)
            if plan is not None:
                try:
                    plan.undo()
                except PatchConflict:  # patched by someone since, and none of this pipeline's any more
                    continue
                vars(scheduler).pop(PLAN)
        self.former.clear()


class LoopStartPatch(Patch):
    """Schedulers that passed through the pipeline are restored with it."""

    def __init__(self, start: LoopStart):
        super().__init__(start.holder, "progress_bar", start)
        self.start = start

    def undo(self) -> None:
        super().undo()
        self.start.restore_former()


def pipeline_plan(pipe: object, context: Context) -> Plan:
    """The plan of a pipeline as a whole; its models and schedulers have their own."""
    return Plan(pipe, (), context, (announce_loops, take_over_offload))


def take_over_offload(pipe: object, context: Context) -> StageResult:
    """Models that hooks move to the GPU and back come to the same addresses each time."""
    if not hasattr(pipe, SWITCH):
        return StageResult()
    turns = pipeline_turns(pipe, context)
    budget = None if turns is None else turns.budget
    added = turns is not None and not turns.hooked()
    taken = tuple(OffloadPatch(one, lay_out_for_gpu, budget, added) for one in pipelines_in(pipe))
    if turns is None:
        return StageResult(taken)
    return StageResult((turns, *taken, *tiles_within(pipe, models_of(pipe), turns.budget)))


def lay_out_for_gpu(model: nn.Module, device: torch.device) -> None:
    """The model is about to go to a GPU: its weights get the layout that they are to have there."""
    plan = vars(model).get(PLAN)
    for patch in () if plan is None else plan.patches:
        if isinstance(patch, ChannelsLast) and not patch.on_gpu:
            patch.apply(coming=True)
        if isinstance(patch, Stacked):
            patch.apply()
        forward = getattr(patch, "value", None)
        forward = getattr(forward, "inner", None) or forward  # within a guard against overflow
        if isinstance(forward, GraphForward) and forward.path:
            forward.holder = model


def announce_loops(pipe: object, context: Context) -> StageResult:
    """The pipeline says where its loops begin."""
    return StageResult(tuple(LoopStartPatch(LoopStart(pipe, holder, context)) for holder in denoising_loops(pipe)))
