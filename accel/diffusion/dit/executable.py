"""A schedule bound to a module: runs on tensors in numbered slots, and lets go of each after its last use."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from accel.diffusion.dit.lowering import Operand, Pass
from accel.diffusion.dit.products.weight_stacks import WeightStacks
from accel.diffusion.dit.program import Ref, TensorValue, TorchStep, refs, replaced
from accel.diffusion.dit.ranks.exchanges import Exchange
from accel.diffusion.dit.ranks.receive_buffers import BufferSlots, ReceiveBuffers
from accel.diffusion.dit.recorder import call_layer
from accel.diffusion.dit.schedule import Schedule
from accel.diffusion.dit.units import Copy, GeluProduct, StackedProduct, TorchCall, Unit, is_product, run_product
from accel.libraries.adapters import BASE
from accel.parallel.ranks import Ranks
from accel.patching.fast_forward import Kernels
from accel.quantization.product import adapted_linears, product

Slots = list[torch.Tensor | None]
ADAPTED = f".{BASE}.weight"  # ends the path of a weight with adapters
ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


class LinearGroup:
    """The linears of one stacked product: numbers of inputs and outputs, and the paths of weights and biases."""

    def __init__(self, unit: StackedProduct, values: list[TensorValue]):
        (self.input, *_), weights, *biases = zip(*(refs(step.args) for step in unit.steps), strict=True)
        self.made = [next(refs(step.result)) for step in unit.steps]
        self.parts = [weights, *biases]
        self.paths = [tuple(_path(values[number]) for number in numbers) for numbers in self.parts]
        self.widths = [values[number].shape[-1] for number in self.made]
        self.output = unit.output

    def wholes(self, slots: Slots, stacks: WeightStacks) -> list[torch.Tensor] | None:
        """The stacked weight, and the stacked bias if any; None where they do not lie in one storage."""
        held: Any = [[slots[number] for number in numbers] for numbers in self.parts]
        found = [stacks.whole(paths, tensors) for paths, tensors in zip(self.paths, held, strict=True)]
        return None if any(one is None for one in found) else [one for one in found if one is not None]


def _path(value: TensorValue) -> str:
    assert value.root is not None
    return value.root[1]


class Executable:
    """Called with the tensors of the arguments, in order, a function that gives the weight of a path, and what stacks
    weights, if anything may.

    passes: how many units fuse several steps. buffers: receive buffers of its exchanges with other ranks; None before
    all have agreed on them.
    """

    buffers: ReceiveBuffers | None = None

    def __init__(self, schedule: Schedule, kernels: Kernels):
        self.values, self.kernels = schedule.program.values, kernels
        self.result, self.units, self.layouts = schedule.program.result, schedule.units, schedule.layouts
        roots = [(value.number, value.root) for value in self.values if value.root is not None]
        kept = set(refs(self.result))
        taken = {number for unit in self.units for number in unit.takes} | kept
        self.inputs = [(number, place) for number, (kind, place) in roots if kind == "input" and number in taken]
        self.weights = [(number, path) for number, (kind, path) in roots if kind == "weight" and number in taken]
        # Behind the values lie the layers of weights with adapters, and of those stacked with them, by these numbers.
        self.layers = self._adapted()
        self.slots = BufferSlots.of(self.units, self.values)
        self.passes = sum(isinstance(unit, Pass) for unit in self.units)
        last: dict[int, int] = {number: at for at, unit in enumerate(self.units) for number in unit.takes | unit.makes}
        ends = [[n for n, at in last.items() if at == place and n not in kept] for place in range(len(self.units))]
        self.runs = list(zip(map(self._bound, self.units), ends, strict=True))

    @property
    def groups(self) -> dict[str, Ranks]:
        """The process groups of its exchanges, by name."""
        steps = [unit.step.function for unit in self.units if isinstance(unit, TorchCall)]
        return {one.group: one.ranks for one in steps if isinstance(one, Exchange)}

    def __call__(
        self, inputs: list[torch.Tensor], weight: Callable[[str], torch.Tensor], stacks: WeightStacks | None = None
    ) -> Any:
        slots: Slots = [None] * len(self.values)
        for number, place in self.inputs:
            slots[number] = inputs[place]
        for number, path in self.weights:
            slots[number] = weight(path)
        slots += [weight(path) for path in self.layers]
        stacks = stacks or WeightStacks()
        for run, ends in self.runs:
            run(slots, stacks)
            for number in ends:
                slots[number] = None
        return _filled(self.result, slots)

    def _adapted(self) -> list[str]:
        """Paths of layers."""
        found: list[str] = []
        self.layer_of: dict[int, int] = {}
        for unit in self.units:
            steps = unit.steps if isinstance(unit, StackedProduct) else [getattr(unit, "step", None)]
            products = [step for step in steps if step is not None and is_product(step)]
            numbers = [number for step in products for number in _weights(step) if self.values[number].root is not None]
            paths = {number: _path(self.values[number]) for number in numbers}
            if any(path.endswith(ADAPTED) for path in paths.values()):
                for number, path in paths.items():
                    self.layer_of[number] = len(self.values) + len(found)
                    found.append(path.removesuffix(ADAPTED).removesuffix(".weight"))
        return found

    def _linear(self, weights: Sequence[int], slots: Slots) -> Callable:
        """What multiplies by these weights, as `torch_linear`."""
        if not weights or weights[0] not in self.layer_of:
            return self.kernels.linear
        return partial(adapted_linears, [slots[self.layer_of[number]] for number in weights], self.kernels.linear)

    def _bound(self, unit: Unit) -> Callable[[Slots, WeightStacks], None]:
        """What runs a unit."""
        if isinstance(unit, Pass):
            return partial(self._pass, unit)
        if isinstance(unit, Copy):
            return partial(self._copy, unit)
        if isinstance(unit, StackedProduct):
            return partial(self._multiply, LinearGroup(unit, self.values))
        args, kwargs = _template(unit.step.args), _template(unit.step.kwargs)
        if isinstance(unit, GeluProduct):
            return partial(self._activate, unit, args)
        if is_product(unit.step):
            return partial(self._single, unit.step, args)
        return partial(self._call, unit.step.result, self._function(unit), args, kwargs)

    def _pass(self, unit: Pass, slots: Slots, stacks: WeightStacks) -> None:
        tensors = [_view(slots[one.number], one) for one in unit.inputs]
        outputs = tuple(self._place(one, slots, tensors[0].device) for one in unit.outputs)
        self.kernels.rowwise(*tensors, program=unit.program, shape=unit.shape, outputs=outputs)

    def _copy(self, unit: Copy, slots: Slots, stacks: WeightStacks) -> None:
        source = _view(slots[unit.source.number], unit.source)
        self._place(unit.output, slots, source.device).copy_(source)

    def _call(
        self, result: Any, function: Callable, args: Callable, kwargs: Callable, slots: Slots, stacks: WeightStacks
    ) -> None:
        _store(result, function(*args(slots), **kwargs(slots)), slots)

    def _multiply(self, linears: LinearGroup, slots: Slots, stacks: WeightStacks) -> None:
        x, wholes = slots[linears.input], linears.wholes(slots, stacks)
        assert x is not None
        into = None if linears.output is None else self._place(linears.output, slots, x.device)
        linear = self._linear(linears.parts[0], slots)
        if wholes is not None:
            stacked = _product(linear, x, *wholes, out=into)
            columns = stacked.split(linears.widths, -1)
        else:
            places = [None] * len(linears.made) if into is None else into.split(linears.widths, -1)
            parts = [[slots[number] for number in numbers] for numbers in zip(*linears.parts, strict=True)]
            each = [self._linear((number,), slots) for number in linears.parts[0]]
            columns = [
                _product(linear, x, *one, out=place) for linear, one, place in zip(each, parts, places, strict=True)
            ]
        for number, result in zip(linears.made, columns, strict=True):
            slots[number] = result

    def _activate(self, unit: GeluProduct, args: Callable, slots: Slots, stacks: WeightStacks) -> None:
        given = args(slots)
        out = None if unit.output.window is None else self._place(unit.output, slots, given[0].device)
        linear = self._linear(_weights(unit.step), slots)
        result = run_product(unit.step.function, given, linear, gelu=True, out=out)
        if out is None:
            slots[unit.output.number] = result

    def _single(self, step: TorchStep, args: Callable, slots: Slots, stacks: WeightStacks) -> None:
        linear = self._linear(_weights(step), slots)
        _store(step.result, run_product(step.function, list(args(slots)), linear), slots)

    def _function(self, unit: TorchCall) -> Callable:
        """What computes a recorded step: the step's own function, or a kernel in its place."""
        step = unit.step
        if isinstance(step.function, Exchange):
            return partial(self._exchange, step.function, unit.place)
        if step.function is call_layer:
            return partial(product, multiply=self.kernels.linear)
        if step.name == "scaled_dot_product_attention":
            return partial(self._attend, step.function)
        return step.function

    def _exchange(self, exchange: Exchange, place: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        buffer = None if self.buffers is None else self.buffers.get(self.slots, exchange.group)
        return exchange(tensors, buffer, *self.slots.found[place])

    def _attend(self, function: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = dict(zip(ATTENTION, args, strict=False)) | kwargs
        q, k, v = (given.pop(one) for one in ATTENTION[:3])
        scale = given.pop("scale", None)
        masked = isinstance(given.get("attn_mask"), torch.Tensor)
        if (
            not masked
            and all(one is None or one is False or one == 0.0 for one in given.values())
            and q.dim() == 4
            and q.shape[1] == k.shape[1]
            and q.dtype == k.dtype == v.dtype
        ):
            return self.kernels.attention(q, k, v, scale)
        return function(*args, **kwargs)

    def _place(self, output: Operand, slots: Slots, device: torch.device) -> torch.Tensor:
        """Memory for a result, as torch would have laid it out."""
        whole = slots[output.number]
        if whole is None:
            value = self.values[output.number]
            stride = self.layouts.get(output.number)
            if stride is None and value.dense and value.base == value.number and value.stride[-1] == 1:
                stride = value.stride
            if stride is None:
                whole = torch.empty(value.shape, dtype=value.dtype, device=device)
            else:
                whole = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=device)
            slots[output.number] = whole
        return _view(whole, output)


def _product(linear: Callable, *given: Any, out: torch.Tensor | None) -> torch.Tensor:
    return linear(*given) if out is None else linear(*given, out=out)


def _weights(step: TorchStep) -> tuple[int, ...]:
    """The number of the weight of a product, where that is a tensor in full."""
    return (step.args[1].number,) if step.name == "linear" and isinstance(step.args[1], Ref) else ()


def _template(tree: tuple | dict) -> Callable[[Slots], Any]:
    """What puts tensors into the arguments of a step. Most are a flat list, which is filled without a walk."""
    members = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
    flat = [(name, one.number) for name, one in members if isinstance(one, Ref)]
    nested = [(name, one) for name, one in members if not isinstance(one, Ref) and any(True for _ in refs(one))]

    def fill(slots: Slots) -> Any:
        if not flat and not nested:
            return tree
        found: Any = dict(tree) if isinstance(tree, dict) else list(tree)
        for name, number in flat:
            found[name] = slots[number]
        for name, one in nested:
            found[name] = _filled(one, slots)
        return found

    return fill


def _filled(tree: Any, slots: Slots) -> Any:
    return replaced(tree, lambda one: slots[one.number] if isinstance(one, Ref) else one)


def _view(tensor: Any, one: Operand) -> torch.Tensor:
    """Of the whole tensor, what a pass reads or writes."""
    tensor = tensor if one.part is None else getattr(tensor, one.part)
    if one.flat:
        return tensor.flatten(-2)
    return tensor if one.window is None else tensor.narrow(*one.window)


def _store(tree: Any, result: Any, slots: Slots) -> None:
    if isinstance(tree, Ref):
        slots[tree.number] = result
    elif isinstance(tree, tuple | list):
        for one, part in zip(tree, result, strict=True):
            _store(one, part, slots)
