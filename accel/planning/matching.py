"""The stage that asks every rule about every site, from the model down."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from accel.errors import SkippedSite
from accel.patching.context import Context
from accel.patching.patch import Change, ForwardPatch, foreign_forward
from accel.patching.rule import Match, Rule, Skip
from accel.patching.site import Site
from accel.patching.structure import kernelized, own_forward
from accel.patching.user_ops import UserOp
from accel.planning.sites import LoneSites
from accel.planning.stages import Row, StageReport, StageResult

KERNELIZED = Rule("kernels", lambda site, context: None)  # for rows about what no rule may touch


def match(root: Any, rules: Sequence[Rule], context: Context) -> StageResult:
    """Which rule takes which site, and its patches. Raises SkippedSite for one that strict=True may not leave out."""
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

    def visit(self, site: Site, captured: bool = False) -> None:
        """Asks about the site, then about those of its children that no rule covers. captured: what calls the site is
        replayed from CUDA graphs.
        """
        covered: set[str] | None = set()
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
            if child.path.rpartition(".")[2] not in covered:
                self.visit(child, captured)

    def leave_out_what_would_not_pay(self) -> None:
        """Stock's own forwards stay there, with nothing in front of them."""
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
        """Modules that run a forward of the package kernels, and go on doing so, inside of fused blocks too."""
        told = {row.path for row in self.rows}
        modules = root.named_modules() if isinstance(root, nn.Module) else ()
        for path, module in modules:
            if path not in told and kernelized(module):
                self._row(Site(path, module), KERNELIZED, "skipped", f"runs {own_forward(module)}")
