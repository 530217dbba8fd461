"""A schedule bound to a module: runs on tensors in numbered slots, and lets go of each after its last use."""

from collections.abc import Callable
from typing import Any

import torch

from accel.diffusion.dit.lowering import Input, Output, Pass, Window
from accel.diffusion.dit.products.weight_stacks import WeightStacks
from accel.diffusion.dit.program import Ref, TensorValue, TorchStep, refs, replaced
from accel.diffusion.dit.ranks.exchanges import Exchange
from accel.diffusion.dit.ranks.receive_buffers import BufferSlots, ReceiveBuffers
from accel.diffusion.dit.schedule import Schedule
from accel.diffusion.dit.units import Copy, GeluProduct, StackedProduct, TorchCall, Unit, is_product, run_product
from accel.parallel.ranks import Ranks
from accel.patching.fast_forward import Kernels

Slots = list[torch.Tensor | None]


class ArgumentTemplate:
    """Arguments of a step with places for tensors. Most are a flat list, which is filled without a walk."""

    def __init__(self, tree: tuple | dict):
        members = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
        self.tree, self.kind = tree, type(tree)
        self.flat = [(name, one.number) for name, one in members if isinstance(one, Ref)]
        self.nested = [
            (name, one) for name, one in members if not isinstance(one, Ref) and any(True for _ in refs(one))
        ]

    def filled(self, slots: Slots) -> Any:
        if not self.flat and not self.nested:
            return self.tree
        members: Any = dict(self.tree) if self.kind is dict else list(self.tree)
        for name, number in self.flat:
            members[name] = slots[number]
        for name, one in self.nested:
            members[name] = _filled(one, slots)
        return members


class LinearGroup:
    """The linears of one stacked product: numbers of inputs and outputs, and the paths of weights and biases."""

    def __init__(self, unit: StackedProduct, values: list[TensorValue]):
        self.taken, weights, *biases = zip(*(refs(step.args) for step in unit.steps), strict=True)
        self.made = [next(refs(step.result)) for step in unit.steps]
        self.parts = [weights, *biases]
        self.paths = [tuple(_path(values[number]) for number in numbers) for numbers in self.parts]
        self.widths = [values[number].shape[-1] for number in self.made]
        self.output = unit.output

    @property
    def input(self) -> int:
        return self.taken[0]

    def wholes(self, slots: Slots, stacks: WeightStacks) -> list[torch.Tensor] | None:
        """The stacked weight, and the stacked bias if any; None where they do not lie in one storage."""
        found = [
            stacks.whole(paths, _filled([Ref(number) for number in numbers], slots))
            for paths, numbers in zip(self.paths, self.parts, strict=True)
        ]
        return None if any(one is None for one in found) else [one for one in found if one is not None]


def _path(value: TensorValue) -> str:
    assert value.root is not None
    return value.root[1]


class Executable:
    """Called with the tensors of the arguments, in order, a function that gives the weight of a path, and what stacks
    weights, if anything may.

    buffers: receive buffers of its exchanges with other ranks; None before all have agreed on them.
    """

    buffers: ReceiveBuffers | None = None

    def __init__(self, schedule: Schedule, kernels: Kernels):
        self.values, self.kernels = schedule.program.values, kernels
        self.result, self.units, self.layouts = schedule.program.result, schedule.units, schedule.layouts
        roots = [(value.number, value.root) for value in self.values if value.root is not None]
        taken = {number for unit in self.units for number in unit.takes} | set(refs(self.result))
        self.inputs = [(number, place) for number, (kind, place) in roots if kind == "input" and number in taken]
        self.weights = [(number, path) for number, (kind, path) in roots if kind == "weight" and number in taken]
        calls = (TorchCall, GeluProduct)
        self.given = [
            (ArgumentTemplate(u.step.args), ArgumentTemplate(u.step.kwargs)) if isinstance(u, calls) else ()
            for u in self.units
        ]
        self.linears = [LinearGroup(u, self.values) if isinstance(u, StackedProduct) else None for u in self.units]
        self.slots = BufferSlots.of(self.units, self.values)
        kept = set(refs(self.result))
        last: dict[int, int] = {number: at for at, unit in enumerate(self.units) for number in unit.takes | unit.makes}
        self.ends = [[n for n, at in last.items() if at == place and n not in kept] for place in range(len(self.units))]

    @property
    def groups(self) -> dict[str, Ranks]:
        """The process groups of its exchanges, by name."""
        steps = [unit.step.function for unit in self.units if isinstance(unit, TorchCall)]
        return {one.group: one.ranks for one in steps if isinstance(one, Exchange)}

    @property
    def passes(self) -> int:
        """How many units fuse several steps."""
        return sum(isinstance(unit, Pass) for unit in self.units)

    def __call__(
        self, inputs: list[torch.Tensor], weight: Callable[[str], torch.Tensor], stacks: WeightStacks | None = None
    ) -> Any:
        slots: Slots = [None] * len(self.values)
        for number, place in self.inputs:
            slots[number] = inputs[place]
        for number, path in self.weights:
            slots[number] = weight(path)
        stacks = stacks or WeightStacks()
        for unit, given, linears, ends in zip(self.units, self.given, self.linears, self.ends, strict=True):
            if linears is None:
                self._run(unit, given, slots)
            else:
                self._multiply(linears, slots, stacks)
            for number in ends:
                slots[number] = None
        return _filled(self.result, slots)

    def _run(self, unit: Unit, given: tuple[ArgumentTemplate, ...], slots: Slots) -> None:
        if isinstance(unit, Pass):
            tensors = [_read(one, slots) for one in unit.inputs]
            outputs = tuple(self._place(one, slots, tensors[0].device) for one in unit.outputs)
            self.kernels.rowwise(*tensors, program=unit.program, shape=unit.shape, outputs=outputs)
        elif isinstance(unit, Copy):
            source = _read(unit.source, slots)
            self._place(unit.output, slots, source.device).copy_(source)
        elif isinstance(unit, GeluProduct):
            self._activate(unit, given[0].filled(slots), slots)
        elif isinstance(unit, TorchCall):
            args, kwargs = (tree.filled(slots) for tree in given)
            function = unit.step.function
            if isinstance(function, Exchange):
                buffer = None if self.buffers is None else self.buffers.get(self.slots, function.group)
                made: Any = function(args[0], buffer, *self.slots.found[unit.place])
            else:
                made = self._function(unit.step, args, kwargs)
            _store(unit.step.result, made, slots)

    def _multiply(self, linears: LinearGroup, slots: Slots, stacks: WeightStacks) -> None:
        x, wholes = slots[linears.input], linears.wholes(slots, stacks)
        assert x is not None
        into = None if linears.output is None else self._place(linears.output, slots, x.device)
        if wholes is not None:
            stacked = self._product(x, *wholes, out=into)
            columns = stacked.split(linears.widths, -1)
        else:
            places = [None] * len(linears.made) if into is None else into.split(linears.widths, -1)
            parts = [[slots[number] for number in numbers] for numbers in zip(*linears.parts, strict=True)]
            columns = [self._product(x, *one, out=place) for one, place in zip(parts, places, strict=True)]
        for number, result in zip(linears.made, columns, strict=True):
            slots[number] = result

    def _product(self, *given: Any, out: torch.Tensor | None) -> torch.Tensor:
        return self.kernels.linear(*given) if out is None else self.kernels.linear(*given, out=out)

    def _activate(self, unit: GeluProduct, args: list[torch.Tensor], slots: Slots) -> None:
        out = None if unit.output.window is None else self._place(unit.output, slots, args[0].device)
        result = run_product(unit.step.function, args, self.kernels.linear, gelu=True, out=out)
        if out is None:
            slots[unit.output.number] = result

    def _function(self, step: TorchStep, args: list | tuple, kwargs: dict) -> Any:
        name, function = step.name, step.function
        if is_product(step):
            return run_product(function, list(args), self.kernels.linear)
        if name == "scaled_dot_product_attention":
            given = dict(
                zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"), args, strict=False)
            )
            given |= kwargs
            if isinstance(given.get("attn_mask"), torch.Tensor):
                return function(*args, **kwargs)
            q, k, v = (given.pop(one) for one in ("query", "key", "value"))
            scale = given.pop("scale", None)
            if (
                all(one is None or one is False or one == 0.0 for one in given.values())
                and q.dim() == 4
                and q.shape[1] == k.shape[1]
                and q.dtype == k.dtype == v.dtype
            ):
                return self.kernels.attention(q, k, v, scale)
        return function(*args, **kwargs)

    def _place(self, output: Output, slots: Slots, device: torch.device) -> torch.Tensor:
        """Memory for a result, as torch would have laid it out."""
        whole = slots[output.number]
        if whole is None:
            value = self.values[output.number]
            stride = self.layouts.get(output.number)
            whole = _empty(value, device) if stride is None else _strided(value, stride, device)
            slots[output.number] = whole
        if output.flat:
            return whole.flatten(-2)
        return whole if output.window is None else _windowed(whole, output.window)


def _filled(tree: Any, slots: Slots) -> Any:
    return replaced(tree, lambda one: slots[one.number] if isinstance(one, Ref) else one)


def _strided(value: TensorValue, stride: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=device)


def _empty(value: TensorValue, device: torch.device) -> torch.Tensor:
    if value.dense and value.base == value.number and value.stride[-1] == 1:
        return _strided(value, value.stride, device)
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def _read(one: Input, slots: Slots) -> torch.Tensor:
    tensor = slots[one.number]
    assert tensor is not None
    if one.part is not None:
        tensor = getattr(tensor, one.part)
    if one.flat:
        return tensor.flatten(-2)
    return tensor if one.window is None else _windowed(tensor, one.window)


def _windowed(tensor: torch.Tensor, window: Window) -> torch.Tensor:
    return tensor.narrow(window.dim, window.start, window.size)


def _store(tree: Any, result: Any, slots: Slots) -> None:
    if isinstance(tree, Ref):
        slots[tree.number] = result
    elif isinstance(tree, tuple | list):
        for one, part in zip(tree, result, strict=True):
            _store(one, part, slots)
