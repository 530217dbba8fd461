"""Names for what a forward is doing, which the profiler shows: the part of the model each piece of work belongs to."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from accel_kernels import Op
from torch import nn
from torch.overrides import TorchFunctionMode

from accel.bench.llm.traffic import ROLES
from accel.patching.fast_forward import FastForward

PREFIX = "accel: "
MARK = "spin_kernel"  # the kernel of torch.cuda._sleep
REST = ROLES[-1]
ATTENTION = {"paged_attention", "scaled_dot_product_attention"}


class Ranges(TorchFunctionMode):
    """While entered, opens a profiler range around whatever multiplies by a weight of known role, or attends.

    weights: parameters and the roles of the modules they are in. They are known by address, so that a fused operation
    counts with the first weight it reads. On a GPU a tiny kernel is launched before and after each range, which shows
    in the order of launches what lies between; `order` has the roles. The fast forwards of the model keep the wrapped
    operations afterwards: optimize it anew.
    """

    def __init__(self, model: nn.Module, weights: list[tuple[nn.Parameter, str]]):
        super().__init__()
        self.model, self.weights, self.inside = model, weights, False
        self.roles: dict[int, str] = {}
        self.order: list[str] = []
        self.marked = next(model.parameters()).device.type == "cuda"

    def __enter__(self) -> "Ranges":
        for module in self.model.modules():
            forward = vars(module).get("forward")
            if isinstance(forward, FastForward):
                ops = {f.name: getattr(forward.kernels, f.name) for f in dataclasses.fields(forward.kernels)}
                wrapped: dict[str, Any] = {name: Ranged(op, self) for name, op in ops.items() if isinstance(op, Op)}
                forward.kernels = dataclasses.replace(forward.kernels, **wrapped)
        return super().__enter__()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        role = None if self.inside else self.role(getattr(function, "__name__", ""), args)
        return self.run(role, function, args, kwargs or {})

    def run(self, role: str | None, function: Callable, args: tuple, kwargs: dict) -> Any:
        if role is None or self.inside:
            return function(*args, **kwargs)
        self.inside = True
        self.order.append(role)
        try:
            self._mark()
            with torch.profiler.record_function(PREFIX + role):
                return function(*args, **kwargs)
        finally:
            self._mark()
            self.inside = False

    def _mark(self) -> None:
        if self.marked:
            torch.cuda._sleep(1)

    def role(self, name: str, args: tuple) -> str | None:
        if name in ATTENTION:
            return "attention"
        if name not in ("linear", "addmm", "fused_linear", "matmul"):
            return None
        return next(filter(None, map(self._by_address, args[1:])), None)

    def _by_address(self, value: object) -> str | None:
        if not isinstance(value, torch.Tensor) or value.dim() != 2:
            return None
        address = value.data_ptr()
        if address not in self.roles:  # weights may have been put elsewhere since
            self.roles = {parameter.data_ptr(): role for parameter, role in self.weights}
        return self.roles.get(address)


class Ranged:
    """An operation inside its range."""

    def __init__(self, op: Op, ranges: Ranges):
        self.op, self.ranges = op, ranges

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.ranges.run(self.ranges.role(self.op.name, args) or REST, self.op, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.op, name)
