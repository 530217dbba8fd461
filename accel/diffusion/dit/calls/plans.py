"""What runs for each kind of call, for all blocks of a kind."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from accel.diffusion.dit.calls.kinds import without_strides
from accel.diffusion.dit.executable import Executable
from accel.diffusion.dit.ranks.rooms import Rooms

MOST_CALLS = 64  # kinds of calls that are remembered of one kind of block
MOST_KINDS = 64  # of blocks, as many settings of an adapter make


@dataclass
class BlockPlan:
    """What runs for one kind of call; or why stock does.

    compared: with what stock gives. strided: it holds for tensors that lie as those it was recorded with. lender: whose
    executable it took over, for tensors that lie in another way. outcome: what a dry run gave, without its numbers.
    """

    executable: Executable | None = None
    reason: str = ""
    compared: bool = False
    strided: bool = False
    lender: "BlockPlan | None" = None
    outcome: Any = None

    def dry_run(self, run: Callable[[], Any]) -> Any:
        """run(), in which launches only compile: run for one block, since all that share the plan launch the same."""
        if self.outcome is None:
            made = run()
            self.outcome = pytree.tree_map_only(torch.Tensor, lambda one: (one.device, one.to("meta")), made)
            return made
        return pytree.tree_map(_unfilled, self.outcome, is_leaf=_is_outcome)


def _is_outcome(one: object) -> bool:
    return isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], torch.device)


def _unfilled(one: Any) -> Any:
    return torch.empty_like(one[1], device=one[0]) if _is_outcome(one) else one


@dataclass
class BlockPlans:
    """By kind of block and of call, for all blocks of a model, and the rooms of their exchanges. Copies and pickles
    record anew.
    """

    found: dict[tuple, dict[tuple, BlockPlan]] = field(default_factory=dict)
    rooms: Rooms = field(default_factory=Rooms)
    lock: Any = field(default_factory=threading.RLock)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        BlockPlans.__init__(self)

    def of(self, kind: tuple) -> dict[tuple, BlockPlan]:
        """By kind of call. A block holds on to it: a kind is too long to be looked up at every call."""
        with self.lock:
            if kind not in self.found and len(self.found) >= MOST_KINDS:
                del self.found[next(iter(self.found))]
            return self.found.setdefault(kind, {})

    def borrow(self, plans: dict[tuple, BlockPlan], call: tuple) -> BlockPlan | None:
        """That of a call with tensors that lie in another way, to be compared before it runs."""
        wanted = without_strides(call)
        with self.lock:
            for other, plan in plans.items():
                if plan.executable is not None and not plan.strided and without_strides(other) == wanted:
                    found = BlockPlan(plan.executable, lender=plan)
                    self.keep(plans, call, found)
                    return found
        return None

    def keep(self, plans: dict[tuple, BlockPlan], call: tuple, plan: BlockPlan) -> None:
        with self.lock:
            if len(plans) >= MOST_CALLS:
                del plans[next(iter(plans))]
            plans[call] = plan

    def forget(self, plans: dict[tuple, BlockPlan], plan: BlockPlan) -> None:
        with self.lock:
            for call in [call for call, other in plans.items() if other is plan]:
                del plans[call]
