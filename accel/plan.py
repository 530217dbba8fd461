"""From a model to patches: every site asked of every rule, applied all or nothing, undone last in, first out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.nn.functional as F
from accel_kernels.attention_backends import AttentionChooser
from accel_kernels.linear import LinearChooser
from torch import nn

from accel.forward import Kernels
from accel.graph_pool import GraphPool
from accel.ledger import Ledger
from accel.loop import Loop
from accel.options import Options
from accel.parts import WeakList
from accel.patch import ForwardPatch, foreign_forward
from accel.probe import Probe
from accel.quant.module import dequantising
from accel.quant.swap import Swap
from accel.rule import Match, Rule, Skip
from accel.site import Site

PLAN = "_accel_plan"  # where an object keeps its plan; copies and pickles of the object take it along


@dataclass
class Context:
    """What rules may use: the options, the kernels, the probe, and what the sites of one object share."""

    options: Options
    kernels: Kernels
    ledger: Ledger
    pool: GraphPool
    probe: Probe = field(default_factory=Probe)
    graph_paths: tuple[str, ...] = ()
    loop: Loop = field(default_factory=Loop)
    shared: dict[str, object] = field(default_factory=dict)

    @classmethod
    def create(cls, options: Options, cache: Callable[[str], Path | None] | None) -> "Context":
        attention, linear = (cache(kind) if cache else None for kind in ("attention", "linear"))
        chosen = F.linear if options.graphs is False else LinearChooser(linear)  # which chooses for graphs alone
        kernels = Kernels(AttentionChooser(options.attention, attention), chosen)
        return cls(options, kernels, Ledger(), GraphPool(options.graph_memory_gb))

    def share(self, name: str, make: Callable[[], object]):
        """The one object of this name that the sites of the model being planned share; made when first asked for."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]


@dataclass(frozen=True)
class Row:
    """One line of the report: what became of a site."""

    path: str
    rule: str
    status: str
    reason: str


class Plan:
    """The patches of one model, scheduler or pipeline, and the rows that tell about them.

    arrived: some of its layers came quantised by another library, which `LanguagePlan` knows to repack.
    users: what the object was optimised through, a pipeline or itself.
    pace: times a call on a CPU, in seconds fused and stock; None where there is no typical call.
    """

    arrived = False
    pace: Callable[[], tuple[float, float]] | None = None

    def __init__(self, root: object, rules: Sequence[Rule], context: Context):
        self.root, self.options = root, context.options
        self.ledger, self.pool = context.ledger, context.pool
        self.rows: list[Row] = []
        self.weights: list[dict] = []  # what was quantised, as `Report.weights` tells it
        self.warnings: list[str] = []  # what was asked for and cannot be, once all is optimised
        self.patches: list = []
        self.users = WeakList()
        context.shared = {}
        self._visit(Site("", root), rules, context)

    def _visit(self, site: Site, rules: Sequence[Rule], context: Context) -> None:
        covered: set[str] | None = set()
        for rule in rules:
            answer = rule.answer(site, context)
            if isinstance(answer, Match) and answer.forward is not None:
                reason = foreign_forward(site.module)
                answer = answer if reason is None else Skip(reason)
            if isinstance(answer, Skip):
                self._row(site, rule, "skipped", answer.reason)
            elif isinstance(answer, Match):
                self._row(site, rule, "patched", answer.note)
                self.patches += answer.patches
                if answer.forward is not None:
                    self.patches.append(ForwardPatch(site.module, answer.forward))
                    covered = None if answer.covers is None else {*covered, *answer.covers}
                    break
        if covered is None or not isinstance(site.module, nn.Module):
            return
        for child in site.children():
            if child.path.rpartition(".")[2] not in covered:
                self._visit(child, rules, context)

    def _row(self, site: Site, rule: Rule, status: str, reason: str) -> None:
        if status == "skipped" and self.options.strict:
            raise ValueError(f"strict=True: {site.path or type(site.module).__name__} ({rule.name}): {reason}")
        self.rows.append(Row(site.path, rule.name, status, reason))

    def apply(self) -> None:
        """Applies every patch, or none: an error undoes those before it and is raised again."""
        done = []
        try:
            for patch in self.patches:
                patch.apply()
                done.append(patch)
        except BaseException:
            for patch in reversed(done):
                patch.undo()
            raise

    def settle(self) -> None:
        """All of the object is optimised: patches let go of what the options say need not be kept."""
        for patch in self.patches:
            if hasattr(patch, "settle"):
                patch.settle()

    def undo(self) -> None:
        """Exactly the stock object again. Raises PatchConflict, and changes nothing, where someone patched on top."""
        for patch in self.patches:
            patch.check()
        for patch in reversed(self.patches):
            patch.undo()
        self.pool.clear()

    @contextmanager
    def unfused(self) -> Iterator[None]:
        """Inside, the model is stock but for its quantised linears, which multiply by torch's own products."""
        with self._only(Swap):
            yield

    @contextmanager
    def _only(self, kept: type) -> Iterator[None]:
        patches = [patch for patch in self.patches if not isinstance(patch, kept)]
        for patch in patches:
            patch.check()
        try:
            for patch in reversed(patches):
                patch.undo()
            self.pool.clear()
            with dequantising(self.root):
                yield
        finally:
            for patch in patches:
                patch.apply()
