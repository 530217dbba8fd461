"""From a model to patches, stage by stage: applied all or nothing, undone last in, first out."""

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accel_kernels.attention.backends import AttentionChooser
from accel_kernels.caches.cache_file import cache_folder
from accel_kernels.gemm.linear import LinearChooser, torch_linear
from accel_kernels.moe.chooser import ExpertsChooser
from torch import nn

from accel.cuda_graphs.pool import GraphPool
from accel.fusion.loop import DenoisingLoop
from accel.in_flight import alone
from accel.options import Options
from accel.patching.context import Context
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import Kernels
from accel.patching.owner import Owned
from accel.patching.patch import Change
from accel.patching.rule import Rule
from accel.patching.user_ops import registered
from accel.planning.matching import match
from accel.planning.parts import WeakList
from accel.planning.stages import Row, Stage
from accel.quantization.module import dequantizing
from accel.quantization.patch import QuantizedModulePatch


def choices_file(kind: str) -> Path | None:
    """One file a kind, a GPU and a set of versions, in `cache_folder()`; None without a GPU or a home."""
    folder = cache_folder()
    if folder is None or not torch.cuda.is_available():
        return None
    name = f"{torch.cuda.get_device_name()}-torch{torch.__version__}-cudnn{torch.backends.cudnn.version()}"
    return folder / (f"{kind}-" + "".join(c if c.isalnum() or c in ".-" else "_" for c in name) + ".json")


PLAN = "_accel_plan"  # where an object keeps its plan; copies and pickles of the object take it along


class PendingStages(NamedTuple):
    """What a plan that was never applied has before it."""

    stages: tuple[Stage, ...]
    context: Context


def create_context(options: Options, cache: Callable[[str], Path | None] | None = None) -> Context:
    """For all that is optimized together. cache: the file that keeps choices of "attention", "linear" or "experts"."""
    attention, linear, experts = (cache(kind) if cache else None for kind in ("attention", "linear", "experts"))
    chosen = torch_linear if options.graphs is False else LinearChooser(linear)  # which chooses for graphs alone
    replaced: dict[str, Any] = {"experts": ExpertsChooser(experts), **registered()}
    kernels = Kernels(AttentionChooser(options.attention, attention), chosen, **replaced)
    shared = {GraphPool: GraphPool(options.graph_memory_gb), DenoisingLoop: DenoisingLoop()}
    return Context(options, kernels, FallbackLog(), shared=ChainMap({}, shared))


class Plan(Owned):
    """How one model, scheduler or pipeline becomes fast, in stages; once applied its patches, and what they tell.

    Making a plan changes nothing. `stages` come before the rules are asked, in this order.
    users: what the object was optimized through, a pipeline or itself.
    pace: times a call of the object, in seconds fused and stock; None where there is no typical call.
    """

    def __init__(
        self,
        root: Any,
        rules: Sequence[Rule],
        context: Context,
        stages: Sequence[Stage] = (),
        pace: Callable[[nn.Module, FallbackLog], tuple[float, float]] | None = None,
    ):
        self.root = root  # a model, a scheduler or a pipeline
        self.options, self.pace = context.options, pace
        self.log, self.pool = context.log, context.of(GraphPool)
        self.pending: PendingStages | None = PendingStages(
            (*stages, lambda root, context: match(root, rules, context)), context
        )
        self.patches: list[Change] = []
        self.rows: list[Row] = []
        self.weights: list[dict] = []  # what was quantized, as `Report.weights` tells it
        self.warnings: list[str] = []  # what was asked for and cannot be, once all is optimized
        self.prequantized = False  # some of its layers came quantized by another library
        self.users = WeakList()

    @property
    def owner(self) -> Any:
        return self.root

    def apply(self) -> None:
        """The first time one stage after the other, then the same patches again. All or nothing: an error undoes every
        patch before it and is raised again.
        """
        done = []
        try:
            for patches in [self.patches] if self.pending is None else self._staged(self.pending):
                with alone(*(self.models if patches else ())):
                    for patch in patches:
                        patch.apply()
                        done.append(patch)
        except BaseException:
            with alone(*self.models, anyway=True):
                for patch in reversed(done):
                    patch.undo()
            raise
        self.patches, self.pending = done, None

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """What no other thread may be in a call of while patches come and go."""
        return (self.root,) if isinstance(self.root, nn.Module) else ()

    def _staged(self, pending: PendingStages) -> Iterator[Sequence[Change]]:
        """The patches of every stage, which looks once those of the stages before are applied."""
        found = []
        for stage in pending.stages:
            found.append(stage(self.root, pending.context))
            yield found[-1].patches
        told = [staged.report() for staged in reversed(found)]  # what the rules answered comes first
        self.rows = [row for one in told for row in one.rows]
        self.weights = [row for one in told for row in one.weights]
        self.warnings = [warning for one in told for warning in one.warnings]
        self.prequantized = any(one.prequantized for one in told)

    def settle(self) -> None:
        """All of the object is optimized: patches let go of what the options say need not be kept."""
        for patch in self.patches:
            if hasattr(patch, "settle"):
                patch.settle()

    def undo(self) -> None:
        """Exactly the stock object again. Raises PatchConflict where someone patched on top, InUse where a call on
        another thread does not end; nothing is changed then.
        """
        for patch in self.patches:
            patch.check()
        leave(self.patches)
        with alone(*self.models):
            for patch in reversed(self.patches):
                patch.undo()
            self.pool.forget()
            for patch in self.patches:
                forget = getattr(getattr(patch, "value", None), "forget", None)
                if forget is not None:
                    forget()

    @contextmanager
    def unfused(self) -> Iterator[None]:
        """Inside, the model is stock but for its quantized linears, which multiply by torch's own products."""
        with self.only(QuantizedModulePatch):
            yield

    @contextmanager
    def only(self, kept: type) -> Iterator[None]:
        """Inside, patches of this class alone are in place, and quantized linears multiply by torch's own products."""
        patches = [patch for patch in self.patches if not isinstance(patch, kept)]
        for patch in patches:
            patch.check()
        leave(patches)
        with alone(*self.models):
            for patch in reversed(patches):
                patch.undo()
            self.pool.clear()
        try:
            with dequantizing(self.root):
                yield
        finally:
            with alone(*self.models, anyway=True):
                for patch in patches:
                    patch.apply()


def plan_of(obj: object) -> Plan | None:
    """The plan that an object keeps, its own: a shallow copy keeps that of another one, by which nothing is undone."""
    plan = vars(obj).get(PLAN)
    return plan if plan is not None and plan.root is obj else None


def leave(patches: Sequence[Change]) -> None:
    """Before the first of them is undone: stops what computes with them on a thread of its own."""
    for patch in patches:
        if hasattr(patch, "leave"):
            patch.leave()
