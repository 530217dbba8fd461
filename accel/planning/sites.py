"""Which lone sites are faster fused: forwards between stock code, such as a norm in a model without a graph.

Each kind is timed once beside stock, with few rows and with many. It stays if it takes the host less time for few rows,
as in a decode step, and the GPU no longer for many. Otherwise, or if it cannot be timed, stock's forward stays.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from accel.cuda_graphs.pays import Cost, clearly_faster, in_turns, not_slower
from accel.errors import reason_of
from accel.libraries.experts import in_steps
from accel.options import Options
from accel.parallel.agreement import gather_from_all
from accel.parallel.sharded_layers import ranks_of
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import FastForward
from accel.patching.structure import placement

WOULD_NOT = "would not pay"
MOVED = f"{WOULD_NOT} as far as is known: it is timed on a GPU alone, so optimize the model again once it is there"


class LoneSites:
    """The lone sites of one model, by kind: everything that decides how long a call takes."""

    def __init__(self, root: Any, options: Options):
        self.root, self.options = root, options
        self.like: torch.Tensor | None = None  # of the model's device and dtype
        if isinstance(root, nn.Module):
            device, dtype = placement(root)
            self.like = torch.empty(0, dtype=dtype, device=device)
        self.kinds: dict[tuple, FastForward] = {}

    def kind_of(self, forward: Any) -> tuple | None:
        """The kind of a forward that is to be timed; None for one that stays in any case."""
        timed = isinstance(forward, FastForward) and type(forward).example is not FastForward.example
        if not timed or forward.pays or self.like is None or not self._asked():
            return None
        tensors = (*forward.module.parameters(), *forward.module.buffers())
        held = tuple((tuple(one.shape), one.dtype, one.device) for one in tensors)
        kind = type(forward), type(forward.module), held
        self.kinds.setdefault(kind, forward)
        return kind

    def _asked(self) -> bool:
        """Whether sites are timed: not under strict, nor on a CPU, where `whole_models` decides if it stays there."""
        if self.options.strict or self.like is None:
            return False
        return not self.like.is_cpu or (self.options.cpu == "auto" and torch.cuda.is_available())

    def _elsewhere(self) -> bool:
        """Whether the model is on the CPU still, and timed on a GPU."""
        return self.like is not None and self.like.is_cpu

    def reasons(self) -> dict[tuple, str]:
        """Why sites of a kind stay stock, by kind; equal on all ranks that share the model."""
        found = {kind: self._reason(forward) for kind, forward in self.kinds.items()}
        ranks = ranks_of(self.root) if isinstance(self.root, nn.Module) else None
        if ranks is not None and self._asked():
            names = {kind: f"{number} {kind[0].__name__}" for number, kind in enumerate(found)}
            mine = {names[kind]: reason is None for kind, reason in found.items()}
            said = gather_from_all(ranks, "which sites pay", mine)
            for kind, name in names.items():
                if found[kind] is None and any(values.get(name) != "True" for values in said.values()):
                    found[kind] = f"{WOULD_NOT} on another rank that shares the model"
        return {kind: reason for kind, reason in found.items() if reason is not None}

    def _reason(self, forward: FastForward) -> str | None:
        assert self.like is not None
        if self._elsewhere():
            return MOVED
        try:
            few, many = forward.example_rows
            reason = too_slow(costs(forward, few, self.like), few, host=True)
            return reason or too_slow(costs(forward, many, self.like), many, host=False)
        except Exception as error:  # whatever a module may raise that is called alone
            return f"{WOULD_NOT} as far as is known: not timed, {reason_of(error)}"


def too_slow(measured: tuple[Cost, Cost], rows: int, host: bool) -> str | None:
    """Why a forward does not pay by these costs, fused and stock, of calls of so many rows. host: its time counts."""
    fused, stock = measured
    of = f"of {rows} row{'s' * (rows > 1)}"
    if host and not clearly_faster(fused.host, stock.host):
        return f"{WOULD_NOT}: {1e6 * fused.host:.1f} us of the host fused, {1e6 * stock.host:.1f} stock, {of}"
    if not not_slower(fused.wall, stock.wall):
        return f"{WOULD_NOT}: {1e6 * fused.wall:.1f} us fused, {1e6 * stock.wall:.1f} stock, {of}"
    return None


def costs(forward: FastForward, rows: int, like: torch.Tensor) -> tuple[Cost, Cost]:
    """Of calls of so many rows, fused and stock; raises what they raise, and ValueError if it does not run fused.

    A twin with the same weights is called, so that hooks do not see it.
    """
    twin, fast = copy.copy(forward.module), copy.copy(forward)
    vars(twin).pop("forward", None)
    vars(twin)["training"] = False
    fast.module, fast.log = twin, FallbackLog()
    fast.remember()
    with torch.no_grad(), torch.autocast(like.device.type, enabled=False):
        args = fast.example(rows, like)
        if args is None:
            raise ValueError("no call of it is known")
        fast(*args)
        if fast.log.rows():
            raise ValueError(fast.log.rows()[0][1])
        stocks = [twin.forward, *(one.forward for one in (in_steps(twin),) if one is not None)]
        fused, *costs = in_turns([partial(run, *args) for run in (fast, *stocks)], args[0].device)
    return fused, Cost(*map(min, zip(*costs, strict=True)))
