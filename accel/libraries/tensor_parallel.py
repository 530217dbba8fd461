"""How transformers divides layers among ranks: by closures in place of a forward, and styles.

A divided layer keeps its class. Its weights become DTensors, of which each rank holds a part, and a closure in
`vars(module)["forward"]` works before and after its forward. The closure's cells hold the style, a TensorParallelLayer,
the mesh of ranks, and the forward beneath, from 5.17 on. Nothing is imported: no layer is divided before that library
is.
"""

import inspect
import sys
from typing import Any, NamedTuple

from torch import nn

from accel.libraries.hooks import hook_of

DISTRIBUTED = "transformers.distributed."
MATRICES = "MoeExpertsParallel"  # the style that gives each rank a part of every expert's matrices
WITH_GRADIENTS = "_hf_quantized_needs_local_tp"  # on a quantized linear: a style takes its own part of it with them too
STYLES = f"{DISTRIBUTED}tensor_parallel"


class Style(NamedTuple):
    """How a layer is divided. dim: of its weight, 0 for outputs or 1 for inputs; of a table, words or channels.

    gathers: each rank gets all outputs. splits: each rank takes its part of whole inputs.
    """

    dim: int
    gathers: bool
    splits: bool


def closure_of(module: nn.Module) -> tuple[Any, Any] | None:
    """(style, mesh) by which a module is divided, where nothing else hangs on it; None for any other."""
    held = _cells(vars(module).get("forward"), STYLES)
    if not {"self", "mesh", "module", "original_forward"} <= held.keys() or held["module"] is not module:
        return None
    beneath = held["original_forward"]
    stock = getattr(beneath, "__self__", None) is module and beneath.__func__ is type(module).forward
    return (held["self"], held["mesh"]) if stock and not _hooked(module) else None


def dispatch_of(module: nn.Module) -> tuple[Any, Any] | None:
    """(way, mesh) of the closure by which whole experts are divided, from 5.23 on; None for any other."""
    held = _cells(vars(module).get("forward"), DISTRIBUTED)
    fits = {"implementation", "module", "ep_mesh"} <= held.keys() and held["module"] is module
    return (held["implementation"], held["ep_mesh"]) if fits and not _hooked(module) else None


def by_transformers(forward: object) -> bool:
    """Whether this forward is one of the closures by which transformers divides layers; they keep no state."""
    return inspect.isfunction(forward) and forward.__module__.startswith(DISTRIBUTED)


def rests_without_gradients(module: nn.Module, forward: object) -> bool:
    """Whether this forward, put there by transformers, only sums the gradients of weights that all ranks hold."""
    held = _cells(forward, STYLES)
    return (
        bool(held)
        and forward.__qualname__.startswith("ReplicatedWithGradAllReduce.")  # type: ignore[attr-defined]
        and held.get("module") is module
        and getattr(held.get("original_forward"), "__func__", None) is type(module).forward
    )


def pipeline_stage(module: nn.Module) -> Any:
    """Which layers this process has, where each holds some of a model's; None where it holds all."""
    return vars(module).get("_pp_stage")


def style_of(style: Any, table: bool) -> Style | None:
    """What a style does; None for one that is not known. table: it divides an embedding."""
    styles, kind = sys.modules[STYLES], type(style)
    if not getattr(style, "use_local_output", False):
        return None
    if kind is getattr(styles, "EmbeddingParallel", None):
        return Style(style.shard_dim, style.shard_dim == 1, False)
    if kind not in (styles.ColwiseParallel, styles.RowwiseParallel):
        return None
    takes_part, gives_part = style.input_layouts.is_shard(-1), style.output_layouts.is_shard(-1)
    whole, columns = style.output_layouts.is_replicate(), kind is styles.ColwiseParallel
    if table:  # 5.17 has no style of their own for them
        return None if takes_part or not whole else Style(int(columns), columns, False)
    if columns:
        return None if takes_part or not (gives_part or whole) else Style(0, whole, False)
    return Style(1, False, not takes_part) if whole else None


def experts_here(way: Any) -> int | None:
    """How many whole experts each rank has, if all ranks compute one batch and sum their outputs; else None."""
    if getattr(way, "megamoe", None) is not None:
        return None
    way = getattr(way, "all_reduce", None) or way  # what it takes without gradients
    if not getattr(way, "needs_shared_batch", False) or not getattr(way, "shares_batch", False):
        return None
    return way.num_local_experts


def _hooked(module: nn.Module) -> bool:
    attributes = vars(module)
    return bool(attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] or hook_of(module) is not None)


def _cells(forward: Any, where: str) -> dict[str, Any]:
    """What is in the cells of a function that is written in this module, or in one whose name begins so."""
    if not inspect.isfunction(forward) or not forward.__module__.startswith(where):
        return {}
    names, cells = forward.__code__.co_freevars, forward.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
