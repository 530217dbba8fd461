"""A block of a diffusion transformer: recorded at its first call, run as passes and products from then on.

Such blocks differ in many details, but all consist of products, attention, and norms, modulations, rotations and gates
between them. So a block is not recognized by its class. The calls of torch in its forward are recorded. What lies
between two products becomes one pass over memory. The result is compared with stock's before it is used.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from accel_kernels.warmup import warming_up
from torch import nn

from accel.cuda_graphs.rule import CAPTURED_SOON
from accel.diffusion.dit.assignments import without_assignments
from accel.diffusion.dit.calls import (
    BlockCode,
    BlockPlan,
    BlockPlans,
    attributes_of,
    attributes_replaced,
    block_signature,
    call_signature,
    called_layers,
    weight_forms,
    weight_of,
    weights_of,
)
from accel.diffusion.dit.executable import Executable
from accel.diffusion.dit.products.rounded_rows import with_rounded_rows
from accel.diffusion.dit.products.weight_stacks import UnstackPatch, WeightStacks
from accel.diffusion.dit.program import Program
from accel.diffusion.dit.ranks.exchanges import with_exchanges
from accel.diffusion.dit.ranks.receive_buffers import BufferSlots
from accel.diffusion.dit.recorder import recorded, tensors_in
from accel.diffusion.dit.schedule import Schedule
from accel.errors import reason_of
from accel.fusion.norms import match_layer_norm
from accel.libraries.adapters import BASE, own_parts
from accel.libraries.code import comes_from
from accel.libraries.diffusion import active_backend, context_parallel
from accel.parallel.ranks import Ranks
from accel.parallel.sequences import sequence_ranks
from accel.patching.fast_forward import FastForward, as_written
from accel.patching.guard import Parts, Snapshot
from accel.patching.rule import Context, ForwardPatch, Match, Rule, Site, Skip, foreign_forward
from accel.patching.structure import meta_weights, side_effects
from accel.tolerances import BLOCK, bound

LEAST_LINEARS = 4  # that a block has at least: queries, keys, values, and what becomes of them
LAYER_NORM = Rule("layer norm", match_layer_norm)
LEAST_WITH_ATTENTION = 2  # where an attention has one product for several of these
COMPARED_AT_ONCE = 1 << 22  # numbers that are compared at a time
DIVIDED_WITHOUT_GRAPH = (
    "divided among ranks, in no CUDA graph: launched one by one, its passes would wait longer for the host than stock"
)


class BlockForward(FastForward):
    """Arguments and result are those of the stock forward."""

    code = BlockCode
    renewed = ("known", "held", "forms", "backend", "ranks", "on_gpu", "refused", "examined")
    known: dict[tuple, BlockPlan] | None  # plans for blocks of its sort, by kind of call
    held: list[dict[str, torch.Tensor | None]]  # the weights of each module inside
    forms: list
    backend: object
    ranks: Ranks | None  # that compute its attention together
    on_gpu: bool | None
    refused: str | None  # why the block, as it was changed, is not recorded anew
    examined: Snapshot | None  # of the block when that was found, so that it is found once

    def __init__(self, module: nn.Module, path: str, context: Context):
        super().__init__(module, path, context.kernels, context.log)
        self.plans, self.stacks = context.of(BlockPlans), WeightStacks()

    def renew(self) -> None:
        vars(self).update(dict.fromkeys(self.renewed))

    def parts(self) -> Parts:
        return Parts(tuple(_parts(self.module)))

    def changed(self) -> str | None:
        """As of every forward; but a changed block is recorded anew, unless it contains code of the user's."""
        reason = super().changed()
        if reason is None or self.stale is not None or self._another_class() is not None:
            return reason
        if self.guard is None or self.guard.code.changed() is not None:
            return reason
        if self.examined is not None and self.examined is self.guard.snapshot:
            return self.refused
        reason = side_effects(self.module)
        if reason is None:
            self.known = None
            reason = self.remember() or super().changed()
        self.refused, self.examined = reason, self.guard.snapshot
        return reason

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        call = call_signature(args, kwargs)
        if call is None:
            return "an argument that is neither a tensor nor a plain value"
        plan = self._known().get(call)
        return plan.reason if plan is not None and plan.reason else None

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().stock(*args, **kwargs)
        with self.stacks:
            return super().stock(*args, **kwargs)

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        with self.stacks:
            return self._fast(*args, **kwargs)

    def _fast(self, *args: Any, **kwargs: Any) -> Any:
        call = call_signature(args, kwargs)
        assert call is not None
        known = self.known or self._known()  # unfit has seen to it that it holds
        if self.ranks is not None and self.on_gpu and not CAPTURED_SOON.get() and not _capturing():
            self.log.fell_back(self.path, DIVIDED_WITHOUT_GRAPH)
            with as_written():
                return self.stock(*args, **kwargs)
        plan = known.get(call)
        if plan is None:
            return self._record(call, args, kwargs)
        if plan.executable is None:
            return self.stock(*args, **kwargs)
        if not plan.compared and not warming_up():
            return self._compare(plan, args, kwargs)
        run = partial(plan.executable, list(tensors_in((args, kwargs))), partial(weight_of, self.module), self.stacks)
        return plan.dry_run(run) if warming_up() else run()

    def _known(self) -> dict[tuple, BlockPlan]:
        """The plans for blocks like this one; looked up anew where shapes or dtypes of weights have changed."""
        if self.known is not None and self.forms == weight_forms(self.held) and self.backend == active_backend():
            return self.known
        self.held = [held for part in self.module.modules() for held in (part._parameters, part._buffers)]
        self.forms, self.backend = weight_forms(self.held), active_backend()
        configs = filter(None, map(context_parallel, _parts(self.module)))
        self.ranks = next(map(sequence_ranks, configs), None)
        self.on_gpu = _on_gpu(self.held)
        self.known = self.plans.of((self.backend, *block_signature(self.module)))
        return self.known

    def _record(self, call: tuple, args: tuple, kwargs: dict) -> Any:
        """What stock gives; its calls of torch become a plan."""
        if _capturing():
            return self.stock(*args, **kwargs)
        known, sort, given = self._known(), block_signature(self.module), list(tensors_in((args, kwargs)))
        attributes = list(attributes_of(self.module))
        with as_written():
            weights, layers = dict(weights_of(self.module)), called_layers(self.module)
            output, program = recorded(self.stock, weights, layers, args, kwargs)
        if call_signature(args, kwargs) != call:
            program = "it changes its arguments"
        elif block_signature(self.module) != sort or attributes_replaced(attributes, list(attributes_of(self.module))):
            program = "it changes its own settings"
        plan = self._plan(program)
        if self.ranks is not None:
            self._allocate_buffers(plan, self.ranks, given[0].device)
        if plan.executable is not None:
            self._try(plan, given, output)
        self.plans.keep(known, call, plan)
        if plan.reason:
            self.log.fell_back(self.path, plan.reason)
        return output

    def _plan(self, program: Program | str) -> BlockPlan:
        if isinstance(program, str):
            return BlockPlan(reason=f"cannot be recorded: {program}")
        try:
            executable = Executable(
                Schedule(with_rounded_rows(with_exchanges(without_assignments(program)))), self.kernels
            )
        except Exception as error:  # the plan is an optimization: what cannot be planned runs stock
            return BlockPlan(reason=f"cannot be planned: {reason_of(error)}")
        if not executable.passes:
            return BlockPlan(reason="nothing in it can be done in one pass")
        return BlockPlan(executable)

    def _allocate_buffers(self, plan: BlockPlan, ranks: Ranks, device: torch.device) -> None:
        """Called on all ranks at once, also on those without a plan."""
        executable = plan.executable
        slots, groups = (BufferSlots(), {}) if executable is None else (executable.slots, executable.groups)
        if self.plans.buffers.open(slots, groups, ranks, device) and executable is not None:
            executable.buffers = self.plans.buffers

    def _compare(self, plan: BlockPlan, args: tuple, kwargs: dict) -> Any:
        """What stock gives, compared with a plan that was made in a dry run, or of whose numbers none was finite."""
        if _capturing():
            return self.stock(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        output = self.stock(*args, **kwargs)
        self._try(plan, given, output)
        if plan.reason:
            self.log.fell_back(self.path, plan.reason)
        return output

    def _try(self, plan: BlockPlan, given: list[torch.Tensor], wanted: Any) -> None:
        """Compares a plan with what stock gave; one that raises or differs is given up.

        If one rank gives it up, all do: ranks wait for each other inside, so each must run the block equally often.
        """
        assert plan.executable is not None
        reason, compared = self._tried(plan.executable, given, wanted)
        if self.ranks is not None:
            device = given[0].device
            if self.ranks.any(reason is not None, device):
                reason = reason or "given up on another rank"
            compared = not self.ranks.any(not compared, device)
        plan.compared = compared
        if reason is not None:
            plan.executable, plan.reason = None, reason

    def _tried(self, executable: Executable, given: list[torch.Tensor], wanted: Any) -> tuple[str | None, bool]:
        """Why the plan does not give what stock gave, and whether the comparison was able to show it."""
        try:
            got = executable(given, partial(weight_of, self.module), self.stacks)
        except Exception as error:  # stock may have room for its own result, but not for a second one
            return f"its passes raised {reason_of(error, memory=True)}", False
        if warming_up():  # nothing was computed
            return None, False
        return difference(wanted, got), has_finite_numbers(wanted)


def match_block(site: Site, context: Context) -> Match | Skip | None:
    """An entry of a list, with linears for attention and no such block inside; not of a UNet, with a group norm."""
    module = site.module
    if not _is_block(site.path, module) or comes_from(type(module), "transformers"):
        return None
    if any(_is_block(path, child) for path, child in module.named_modules() if path):
        return None
    if meta_weights(module):
        return Skip("weights not loaded")
    reason = foreign_forward(module) or side_effects(module)
    if reason is not None:
        return Skip(reason)
    forward = BlockForward(module, site.path, context)
    norms = list(_norms(site, context))
    patches = (UnstackPatch(module, forward.stacks), *(ForwardPatch(norm.module, norm) for norm in norms))
    inside = tuple((norm.path, LAYER_NORM.name) for norm in norms)
    return Match(forward, patches, note="recorded at its first call", inside=inside)


def _norms(site: Site, context: Context) -> Iterator[FastForward]:
    """Fast forwards for the norms inside, for calls in which the block runs stock."""
    for path, module in site.module.named_modules():
        place = Site(f"{site.path}.{path}", module)
        answer = LAYER_NORM.answer(place, context) if path and foreign_forward(module) is None else None
        if isinstance(answer, Match) and answer.forward is not None:
            answer.forward.beneath = True
            yield answer.forward


def innermost_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """By path, the modules built like a block that contain no other block."""
    found = {path: module for path, module in model.named_modules() if _is_block(path, module)}
    for path, module in found.items():
        if not any(other.startswith(f"{path}.") for other in found):
            yield path, module


def _is_block(path: str, module: nn.Module) -> bool:
    if not path.rpartition(".")[2].isdigit():
        return False
    parts = list(module.modules())
    attends = any("processor" in vars(part) for part in parts)
    adapters = {id(one) for part in parts if BASE in part._modules for one in own_parts(part)}
    linears = sum(isinstance(part, nn.Linear) and id(part) not in adapters for part in parts)
    return linears >= (LEAST_WITH_ATTENTION if attends else LEAST_LINEARS) and not any(
        type(part) is nn.GroupNorm for part in parts
    )


def difference(wanted: Any, got: Any) -> str | None:
    """Why what was computed is not what stock gave."""
    for theirs, ours in zip(tensors_in(wanted), tensors_in(got), strict=True):
        if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
            return f"gives {tuple(ours.shape)} {ours.dtype}, not {tuple(theirs.shape)} {theirs.dtype}"
        if not theirs.is_floating_point():
            if not torch.equal(theirs, ours):
                return "computes something else: whole numbers differ"
            continue
        largest, off = _extremes(theirs, ours) if theirs.numel() else (None, 0.0)
        if largest is None:
            continue
        if not off <= bound(BLOCK, theirs.dtype):
            return f"computes something else: off by {off:.1e} of the largest output"
    return None


def _extremes(theirs: torch.Tensor, ours: torch.Tensor) -> tuple[float | None, float]:
    """The largest finite value of theirs, None where there is none; and the largest difference, relative to it.

    Computed in pieces, since a comparison should not take more memory than the model itself.
    """
    zero = torch.zeros((), device=theirs.device)
    largest = off = zero
    some = torch.zeros((), dtype=torch.bool, device=theirs.device)
    for a, b in zip(theirs.flatten().split(COMPARED_AT_ONCE), ours.flatten().split(COMPARED_AT_ONCE), strict=True):
        finite = a.isfinite()
        apart = (a.float() - b.float()).abs_().nan_to_num_(torch.inf)
        off = torch.maximum(off, torch.where(finite, apart, zero).max())
        largest = torch.maximum(largest, torch.where(finite, a.float().abs(), zero).max())
        some = some | finite.any()
    largest = largest.clamp_min(1e-6)
    return (float(largest), float(off / largest)) if bool(some) else (None, 0.0)


def has_finite_numbers(output: Any) -> bool:
    """Whether each tensor of an output has finite elements, by which another result could be told from it."""
    return all(bool(one.isfinite().any()) for one in tensors_in(output) if one.numel())


def _parts(module: nn.Module) -> Iterator[object]:
    for part in module.modules():
        yield part
        processor = vars(part).get("processor")
        if processor is not None:
            yield processor


def _on_gpu(held: list[dict[str, torch.Tensor | None]]) -> bool:
    return any(tensor.is_cuda for one in held for tensor in one.values() if tensor is not None)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
