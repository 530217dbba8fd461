"""From a model to patches: stages, of which the last asks every rule about every site; all are applied, or none.

A stage looks when it is asked, and changes nothing. Patches are undone last in, first out.
"""

import os
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accel_kernels.attention.backends import AttentionChooser
from accel_kernels.caches.cache_file import cache_folder
from accel_kernels.gemm.linear import LinearChooser, torch_linear
from accel_kernels.moe.chooser import ExpertsChooser
from torch import nn

from accel.cuda_graphs.pool import GraphPool
from accel.errors import SkippedSite
from accel.fusion.loop import DenoisingLoop
from accel.in_flight import alone
from accel.options import Options
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import Kernels
from accel.patching.owner import PLAN, Owned
from accel.patching.rule import Change, Context, ForwardPatch, Match, Rule, Site, Skip, foreign_forward
from accel.patching.structure import kernelized, own_forward
from accel.patching.user_ops import UserOp, registered
from accel.planning.sites import LoneSites
from accel.planning.targets import WeakList
from accel.quantization.module import dequantizing
from accel.quantization.patch import QuantizedModulePatch

KERNELIZED = Rule("kernels", lambda site, context: None)  # names the rows about modules that no rule may touch


@dataclass(frozen=True)
class Row:
    """One line of the report: what became of a site."""

    path: str
    rule: str
    status: str
    reason: str


def rows_of(rule: str, found: Iterable[tuple[str, str, str]]) -> list[Row]:
    """Lines of one rule, of the path, status and reason of each site."""
    return [Row(path, rule, status, reason) for path, status, reason in found]


@dataclass
class StageReport:
    """What a stage has for the report. weights: what was quantized, see `Report.weights`. warnings: requests that
    cannot be met. prequantized: some layers came quantized by another library.
    """

    rows: list[Row] = field(default_factory=list)
    weights: list[dict] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    prequantized: bool = False


@dataclass(frozen=True)
class StageResult:
    """What a stage found. patches: applied before the next stage looks. report: called once all are applied."""

    patches: tuple[Change, ...] = ()
    report: Callable[[], StageReport] = StageReport


Stage = Callable[[Any, Context], StageResult]  # (what is optimized, what rules may use); raises what `optimize` raises


def match(root: Any, context: Context, rules: Sequence[Rule]) -> StageResult:
    """The last stage: which rule takes which site, and its patches. Raises SkippedSite with strict=True."""
    matching = Matching(root, rules, context)
    matching.visit(Site("", root))
    matching.leave_out_what_would_not_pay()
    matching.tell_of_user_ops()
    matching.tell_of_kernelized(root)
    return StageResult(tuple(matching.patches), lambda: StageReport(matching.rows))


class Matching:
    """The answers of the rules so far."""

    def __init__(self, root: Any, rules: Sequence[Rule], context: Context):
        self.rules, self.context = rules, context
        self.rows: list[Row] = []
        self.patches: list[Change] = []
        self.lone = LoneSites(root, context.options)
        self.found: list[tuple[tuple, Row, ForwardPatch]] = []  # of lone sites, each with its kind

    def visit(self, site: Site, captured: bool = False, covered: set[str] | None = None) -> None:
        """Asks about the site, then about its children that no rule covers. captured: the site runs inside of CUDA
        graphs. covered: children, and parts of these, whose work a rule does already.
        """
        covered = set() if covered is None else covered
        for rule in self.rules:
            answer = rule.answer(site, self.context)
            if isinstance(answer, Match) and answer.forward is not None:
                reason = foreign_forward(site.module)
                answer = answer if reason is None else Skip(reason)
            if isinstance(answer, Skip):
                self._row(site, rule, "skipped", answer.reason)
            elif isinstance(answer, Match):
                row = self._row(site, rule, "patched", answer.note)
                self.rows += [Row(path, name, "patched", "") for path, name in answer.inside]
                self.patches += answer.patches
                if answer.forward is not None:
                    patch = ForwardPatch(site.module, answer.forward)
                    self.patches.append(patch)
                    kind = None if captured else self.lone.kind_of(answer.forward)
                    if kind is not None:
                        self.found.append((kind, row, patch))
                    captured = captured or getattr(answer.forward, "captures", False)
                    covered = None if answer.covers is None or covered is None else {*covered, *answer.covers}
                    break
        if covered is None or not isinstance(site.module, nn.Module):
            return
        for child in site.children():
            name = child.path.rpartition(".")[2]
            if name not in covered:
                inside = {one.removeprefix(f"{name}.") for one in covered if one.startswith(f"{name}.")}
                self.visit(child, captured, inside)

    def leave_out_what_would_not_pay(self) -> None:
        """Takes out the patches of lone sites that are not faster."""
        reasons = self.lone.reasons()
        stays = {id(row): (patch, reasons[kind]) for kind, row, patch in self.found if kind in reasons}
        left = {id(patch) for patch, _ in stays.values()}
        self.patches = [patch for patch in self.patches if id(patch) not in left]
        told = ((row, stays.get(id(row))) for row in self.rows)
        self.rows = [row if stay is None else replace(row, status="skipped", reason=stay[1]) for row, stay in told]

    def _row(self, site: Site, rule: Rule, status: str, reason: str) -> Row:
        if status == "skipped" and self.context.options.strict:
            raise SkippedSite(f"strict=True: {site.path or type(site.module).__name__} ({rule.name}): {reason}")
        self.rows.append(Row(site.path, rule.name, status, reason))
        return self.rows[-1]

    def tell_of_user_ops(self) -> None:
        """Ops that a user put in the place of ours, where anything uses them."""
        if any(isinstance(patch, ForwardPatch) for patch in self.patches):
            ops = (op for op in vars(self.context.kernels).values() if isinstance(op, UserOp))
            self.rows += [Row("", op.name, "patched", f"{op}, by accel.register_op") for op in ops]

    def tell_of_kernelized(self, root: object) -> None:
        """Modules that keep running a forward of the package kernels, also inside of fused blocks."""
        told = {row.path for row in self.rows}
        modules = root.named_modules() if isinstance(root, nn.Module) else ()
        for path, module in modules:
            if path not in told and kernelized(module):
                self._row(Site(path, module), KERNELIZED, "skipped", f"runs {own_forward(module)}")


def choices_file(kind: str) -> Path | None:
    """A file for a kind, a GPU (or ACCEL_CARD) and the versions, in `cache_folder()`; None without GPU or home."""
    folder = cache_folder()
    if folder is None or not torch.cuda.is_available():
        return None
    card = torch.cuda.get_device_name() + os.environ.get("ACCEL_CARD", "")  # what it is made into chooses by itself
    name = f"{card}-torch{torch.__version__}-cudnn{torch.backends.cudnn.version()}"
    return folder / (f"{kind}-" + "".join(c if c.isalnum() or c in ".-" else "_" for c in name) + ".json")


def create_context(options: Options, cache: Callable[[str], Path | None] | None = None) -> Context:
    """For all that is optimized together. cache: the file that keeps choices of "attention", "linear" or "experts"."""
    attention, linear, experts = (cache(kind) if cache else None for kind in ("attention", "linear", "experts"))
    chosen = torch_linear if options.graphs is False else LinearChooser(linear)  # which chooses for graphs alone
    replaced: dict[str, Any] = {"experts": ExpertsChooser(experts), **registered()}
    kernels = Kernels(AttentionChooser(options.attention, attention), chosen, **replaced)
    shared = {GraphPool: GraphPool(options.graph_memory_gb), DenoisingLoop: DenoisingLoop()}
    return Context(options, kernels, FallbackLog(), shared=ChainMap({}, shared))


class Plan(Owned):
    """How one model, scheduler or pipeline becomes fast, in stages; once applied also its patches and report.

    Making a plan changes nothing. `stages` run in this order, then the rules are asked. users: what the object was
    optimized through, a pipeline or itself. pace: times a typical call, in seconds fused and stock; None without one.
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
        # Until it is applied.
        self.pending: tuple[tuple[Stage, ...], Context] | None = ((*stages, partial(match, rules=rules)), context)
        self.patches: list[Change] = []
        self.rows: list[Row] = []
        self.weights: list[dict] = []  # what was quantized, as `Report.weights` tells it
        self.warnings: list[str] = []  # requests that cannot be met
        self.prequantized = False  # some of its layers came quantized by another library
        self.users = WeakList()

    @property
    def owner(self) -> Any:
        return self.root

    def between(self, first: Stage, last: Stage) -> "Plan":
        """With two more stages; `last` comes when the rules have been asked."""
        if self.pending is not None:
            self.pending = ((first, *self.pending[0], last), self.pending[1])
        return self

    def apply(self) -> None:
        """Runs the stages, or applies the same patches again later. An error undoes all patches and is raised again."""
        done = []
        try:
            for patches in [self.patches] if self.pending is None else self._staged(*self.pending):
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
        """The models that no other thread may be calling while patches are applied or undone."""
        return (self.root,) if isinstance(self.root, nn.Module) else ()

    def _staged(self, stages: Sequence[Stage], context: Context) -> Iterator[Sequence[Change]]:
        """The patches of each stage in turn, which must be applied before the next is asked for."""
        found = []
        for stage in stages:
            found.append(stage(self.root, context))
            yield found[-1].patches
        told = [staged.report() for staged in reversed(found)]  # what the rules answered comes first
        self.rows = [row for one in told for row in one.rows]
        self.weights = [row for one in told for row in one.weights]
        self.warnings = [warning for one in told for warning in one.warnings]
        self.prequantized = any(one.prequantized for one in told)

    def settle(self) -> None:
        """After all models are optimized: patches free what the options say need not be kept."""
        for patch in self.patches:
            if hasattr(patch, "settle"):
                patch.settle()

    def undo(self) -> None:
        """Makes it exactly the stock object again. Raises PatchConflict where someone patched on top, InUse where a
        call on another thread does not end; then nothing has changed.
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

    def unfused(self) -> AbstractContextManager[None]:
        """Inside, the model is stock but for its quantized linears, which multiply by torch's own products."""
        return self.only(QuantizedModulePatch)

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
            with self.placed(), dequantizing(self.root):
                yield
        finally:
            with alone(*self.models, anyway=True):
                for patch in patches:
                    patch.apply()

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Inside, while patches are undone, a budget holds for the stock object too."""
        asked = [patch.again() for patch in self.patches if hasattr(patch, "again")]
        placed = []
        try:
            with alone(*self.models):
                for patch in filter(None, asked):
                    patch.apply()
                    placed.append(patch)
            yield
        finally:
            with alone(*self.models, anyway=True):
                for patch in reversed(placed):
                    patch.undo()


def plan_of(obj: object) -> Plan | None:
    """The plan of an object; None for a shallow copy, which holds that of the original."""
    plan = vars(obj).get(PLAN)
    return plan if plan is not None and plan.root is obj else None


def leave(patches: Sequence[Change]) -> None:
    """Before they are undone: stops threads of ours that compute with these patches."""
    for patch in patches:
        if hasattr(patch, "leave"):
            patch.leave()
