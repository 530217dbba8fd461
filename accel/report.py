"""What was patched, what was skipped and why, which graphs exist, which calls fell back."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_kernels import OPS
from torch import nn

from accel.libraries.versions import newer_than_tested
from accel.parallel.sharded_layers import ranks_of
from accel.patching.fast_forward import FastForward
from accel.planning.memory import RULE as MEMORY
from accel.planning.plan import Plan, Row
from accel.planning.targets import stays_stock
from accel.planning.whole_models import ON_CPU
from accel.quantization.product import own_forwards

if TYPE_CHECKING:
    from rich.table import Table

FALLBACK_LINES = 12
GONE = (AttributeError, IndexError, KeyError, TypeError)  # a part of what was patched; its calls fall back
WHOLE = "(whole model)"


@dataclass(frozen=True)
class Report:
    """Prints as a table. `sites`: (path, rule, status "patched" | "skipped", reason) tuples; `graphs`: one dict a
    captured shape; `fallbacks`: (path, reason, calls); `weights`: one dict a quantized weight, with its path, scheme,
    signal to noise ratio sqnr_db, bytes_before, bytes_after, and whether `restore` gives back the original.
    `batching`: one dict a model whose requests were batched, with how many run at a time, in how many groups, one for
    each stretch of layers on a device. It has the tokens of each, and pages and memory_mb of the cache made last.
    graph_memory: one dict a GPU with graphs, with what all of them take there, used_mb, and may take, limit_mb.
    optimized: False for an object that is not. rank, ranks: which of the processes this is that share a model, and how
    many there are; the first prints the table for all, the others a line. None where the process has it for itself.
    kernels: (operation, what) of kernels of this process that this GPU refused, or that checked themselves on it."""

    sites: list[tuple[str, str, str, str]]
    graphs: list[dict]
    fallbacks: list[tuple[str, str, int]]
    weights: list[dict] = field(default_factory=list)
    optimized: bool = True
    batching: list[dict] = field(default_factory=list)
    rank: int | None = None
    ranks: int | None = None
    graph_memory: list[dict] = field(default_factory=list)
    kernels: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, plans: dict[str, Plan]) -> "Report":
        """plans: by component name, "" for a single model."""
        sites: list[tuple[str, str, str, str]] = []
        graphs: list[dict] = []
        fallbacks: list[tuple[str, str, int]] = []
        weights: list[dict] = []
        batching: list[dict] = []
        for name, plan in plans.items():

            def full(path: str, name: str = name) -> str:
                return ".".join(filter(None, (name, path)))

            sites += [(full(row.path), row.rule, row.status, _reason(plan, row)) for row in plan.rows]
            weights += [row | {"path": full(row["path"])} for row in plan.weights]
            fallbacks += [(full(path), reason, calls) for path, reason, calls in plan.log.rows()]
            told = (getattr(getattr(patch, "value", None), "report_row", None) for patch in plan.patches)
            made = (tell() for tell in told if tell is not None)
            batching += [row | {"path": full(row["path"])} for row in made if row is not None]
            own = {id(module) for module in plan.root.modules()} if isinstance(plan.root, nn.Module) else set()
            for runner in plan.pool.runners:
                if any(id(module) in own for module in runner.module.modules()):  # or of layers put together
                    graphs += [row | {"path": full(row["path"])} for row in runner.rows()]
        whole = (plan.root for plan in plans.values() if isinstance(plan.root, nn.Module))
        shared = [ranks_of(model) for model in whole if stays_stock(model) is None]
        ranks = next(filter(None, shared), None)
        rank, size = (None, None) if ranks is None else (ranks.rank, ranks.size)
        pools = {id(plan.pool): plan.pool for plan in plans.values()}.values()
        memory = [row for pool in pools for row in pool.rows()]
        calls = sorted(fallbacks, key=lambda row: -row[2])
        kernels = [(op.name, told) for op in OPS if plans for told in op.outcomes.rows()]
        return cls(sites, graphs, calls, weights, bool(plans), batching, rank, size, memory, kernels)

    def to_dict(self) -> dict:
        """Plain lists and dicts, for JSON."""
        sites = [dict(zip(("path", "rule", "status", "reason"), site, strict=True)) for site in self.sites]
        fallbacks = [dict(zip(("path", "reason", "calls"), row, strict=True)) for row in self.fallbacks]
        lists = {"graphs": list(self.graphs), "weights": list(self.weights), "batching": list(self.batching)}
        lists["graph_memory"] = list(self.graph_memory)
        lists["kernels"] = [{"op": op, "outcome": told} for op, told in self.kernels]
        shared = {} if self.rank is None else {"rank": self.rank, "ranks": self.ranks}
        return {"sites": sites, "fallbacks": fallbacks} | lists | shared

    @property
    def stock_on_cpu(self) -> bool:
        """Whether calls on a CPU run stock's own code, since fused ones are no faster there."""
        return any(rule == ON_CPU and status == "skipped" for _, rule, status, _ in self.sites)

    def summary(self) -> str:
        """One line: sites patched and skipped, graphs, fallbacks; or that there is nothing to tell."""
        if not self.optimized:
            return "not optimized"
        count = Counter(status for _, _, status, _ in self.sites)
        captured = [row for row in self.graphs if row["status"] == "graph"]
        used = sum(row["memory_mb"] for row in captured)
        bounds = (f"{row['used_mb']:.0f} of at most {row['limit_mb']:.0f} MB" for row in self.graph_memory)
        memory = ", ".join(bounds) or f"{used:.0f} MB"
        calls = sum(calls for _, _, calls in self.fallbacks)
        return (
            f"{count['patched']} sites patched, {count['skipped']} skipped, {len(captured)} graphs "
            f"({memory}), {calls} calls fell back to stock"
            f"{'; what is patched is for a GPU, on this CPU it runs stock' if self.stock_on_cpu else ''}"
        )

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table

        who = "accel" if self.rank is None else f"accel, rank {self.rank} of {self.ranks}"
        if not self.optimized or self.rank:
            yield f"{who}: {self.summary()}"
            return
        table = Table(title=f"{who}: {self.summary()}", title_justify="left")
        for heading in ("where", "rule", "sites", "status", "reason"):
            table.add_column(heading, overflow="fold")
        for (where, rule, status, reason), count in _grouped(self.sites).items():
            table.add_row(where, rule, str(count), status, reason)
        yield table
        yield from newer_than_tested()
        if self.weights:
            yield weights_table(self.weights)
        if self.graphs:
            table = Table("graph of", "inputs", "status", "eager ms", "graph ms", "MB", "reason")
            for row in self.graphs:
                times = (f"{row['eager_ms']:.2f}", f"{row['graph_ms']:.2f}", f"{row['memory_mb']:.0f}")
                table.add_row(row["path"] or WHOLE, row["inputs"], row["status"], *times, row["reason"])
            yield table
        if self.batching:
            table = Table("batched", "requests at a time", "groups", "tokens each", "pages", "MiB of keys and values")
            for row in self.batching:
                numbers = (f"{row[name]:,}" for name in ("requests", "groups", "tokens", "pages"))
                table.add_row(row["path"] or WHOLE, *numbers, f"{row['memory_mb']:,.0f}")
            yield table
        if self.fallbacks:
            table = Table("ran stock", "calls", "reason")
            for path, reason, calls in self.fallbacks[:FALLBACK_LINES]:
                table.add_row(path or WHOLE, str(calls), reason)
            if len(self.fallbacks) > FALLBACK_LINES:
                table.add_row(f"and {len(self.fallbacks) - FALLBACK_LINES} more in .fallbacks", "", "")
            yield table
        if self.kernels:
            table = Table("kernels of", "on this GPU")
            for told in self.kernels:
                table.add_row(*told)
            yield table

    def __str__(self) -> str:
        from accel.progress import as_text

        return as_text(self)


def _grouped(sites: list[tuple[str, str, str, str]]) -> dict[tuple[str, str, str, str], int]:
    """What was patched by its part of the model; what was skipped by its path, numbers left out, to be found again."""
    groups: Counter[tuple[str, str, str, str]] = Counter()
    for path, rule, status, reason in sites:
        parts = _unnumbered(path).split(".")
        where = ".".join(parts if status == "skipped" else parts[:1]) or WHOLE
        groups[where, rule, status, reason] += 1
    return groups


def weights_table(weights: list[dict]) -> "Table":
    """Rows as of `Report.weights` as a table, one line for all of a place and scheme."""
    from rich.table import Table

    table = Table("weights of", "count", "stored as", "SQNR dB", "MB before", "MB after")
    for (where, scheme), rows in _alike(weights).items():
        found = sorted(row["sqnr_db"] for row in rows if row["sqnr_db"] is not None)
        ratio = "-" if not found else f"{found[0]:.1f}" if len(found) == 1 else f"{found[0]:.1f} to {found[-1]:.1f}"
        sizes = (f"{sum(row[name] for row in rows) / 1e6:.1f}" for name in ("bytes_before", "bytes_after"))
        table.add_row(where, str(len(rows)), scheme, ratio, *sizes)
    return table


def _alike(weights: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Rows of weights by place, numbers left out, and scheme."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in weights:
        groups.setdefault((_unnumbered(row["path"]), row["scheme"]), []).append(row)
    return groups


def _unnumbered(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _reason(plan: Plan, row: Row) -> str:
    """Its own; where there is none, which layers inside run their own forward now, as with adapters that came later."""
    if row.status != "patched" or not isinstance(plan.root, nn.Module):
        return row.reason
    try:
        forward: Any = vars(plan.root.get_submodule(row.path)).get("forward")
        if row.reason:
            held = getattr(forward, "held", None) if row.rule == MEMORY else None
            if held is not None:
                return f"{row.reason}; {held.told()}"
            kept = getattr(forward, "kept_bytes", 0)
            return f"{row.reason}; its keys and values keep {kept / 2**20:,.1f} MB" if kept else row.reason
        return own_forwards(forward.answered_layers()) if isinstance(forward, FastForward) else ""
    except GONE:
        return row.reason
