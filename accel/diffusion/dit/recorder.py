"""Watches a forward run: every call of a function of torch becomes a step of a program.

Functions are seen where torch hands them to a `TorchFunctionMode`: products, norms and attention as the one call that a
model's code makes, views and sums likewise. What Python decides by shapes and settings is decided once; a program holds
for arguments of the same shapes and the same other values. What Python decides by what a tensor holds is refused.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from accel.casting import uncast
from accel.diffusion.dit.program import Program, Ref, TensorValue, TorchStep, replaced
from accel.diffusion.dit.ranks.collectives import HiddenCollectives, functional, unwrapped
from accel.libraries.adapters import base
from accel.patching.structure import stock_method
from accel.quantization.adapters import adapts_plain
from accel.quantization.module import row_tensors

# Attributes and methods of a tensor that do not depend on its values.
METADATA = frozenset(
    "shape dtype device ndim layout is_cuda is_cpu is_meta is_quantized is_sparse requires_grad itemsize nbytes size"
    " dim stride numel element_size storage_offset is_contiguous is_floating_point is_complex __len__ nelement"
    " is_inference is_nested is_mps is_xpu names is_leaf grad_fn grad get_device __hash__ __repr__ is_conj is_neg"
    " is_mkldnn".split()
)
# Functions whose results have a shape that depends on values.
DATA_DEPENDENT = frozenset(
    "nonzero argwhere masked_select unique unique_consecutive unique_dim bincount combinations equal allclose"
    " is_nonzero tolist item numpy cpu data_ptr".split()
)
# Functions whose results have such a shape where an argument is a tensor: any, or any after the first.
FACTORIES = frozenset("arange range zeros ones empty full eye rand randn".split())
SIZED_BY_ARGUMENTS = frozenset(
    "view reshape expand repeat tile unflatten split split_with_sizes chunk tensor_split broadcast_to new_zeros"
    " new_ones new_empty".split()
)
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))


META = torch.device("meta")


class NotRecordable(Exception):
    """Says why a forward cannot be written down as steps."""


def call_layer(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A layer that runs its own forward, as one step."""
    return layer(x)


def call_adapted(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A linear with adapters of low rank, noted as the product alone: whoever runs it adds what they are by then."""
    return type(layer).forward(layer, x)


@contextmanager
def seen_as_steps(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, a call of one of these layers is one call of `call_layer` for whoever watches, whatever it computes; of
    one with adapters of low rank on a plain linear, of `call_adapted`.
    """
    watched = [layer for layer in layers if (own := uncast(layer)) is None or stock_method(layer, own)]
    casting = [(vars(layer), vars(layer)["forward"]) for layer in watched if "forward" in vars(layer)]
    for layer in watched:
        vars(layer)["forward"] = partial(_call_watched, call_adapted if adapts_plain(layer) else call_layer, layer)
    try:
        yield
    finally:
        for layer in watched:
            del vars(layer)["forward"]
        for attributes, forward in casting:
            attributes["forward"] = forward


def _call_watched(step: Callable, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if has_torch_function_unary(x):
        return handle_torch_function(step, (x,), layer, x)
    return type(layer).forward(layer, x)


class StepRecorder(TorchFunctionMode):
    """Notes what runs inside. By path, weights: tensors read where they lie; layers: modules that are called."""

    def __init__(self, weights: dict[str, torch.Tensor], layers: dict[str, nn.Module]):
        super().__init__()
        self.program, self.error = Program(), ""
        self.numbers: dict[int, int] = {}  # by id of a living tensor
        self.living: dict[int, weakref.ref] = {}
        self.weights = {id(tensor): path for path, tensor in weights.items()}
        self.tied = {path for path, tensor in weights.items() if self.weights[id(tensor)] != path}
        self.tied |= {self.weights[id(weights[path])] for path in self.tied}
        self.layers = {id(layer): path for path, layer in layers.items()}
        self.held = list(weights.values())

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.error:
            return func(*args, **kwargs)
        func, (args, kwargs) = functional(func), unwrapped((args, kwargs))
        name = name_of(func)
        if name in METADATA:
            return func(*args, **kwargs)
        run = partial(func, *args, **kwargs)
        if func is call_adapted:
            func, name, (args, kwargs) = F.linear, "linear", ((args[1], *row_tensors(base(args[0]))), {})
        try:
            given = self._refs((args, kwargs))
        except NotRecordable as error:
            self.error = f"{name}: {error}"
            return run()
        result = run()
        try:
            self._note(func, name, given, (args, kwargs), result)
        except NotRecordable as error:
            self.error = f"{name}: {error}"
        return result

    def input(self, tensor: torch.Tensor, place: int) -> Ref:
        """A tensor that the forward is given."""
        if id(tensor) in self.weights:  # another call may be given another one in its place
            self.error = f"it is given its own weight ({self.weights[id(tensor)]})"
        known = self.numbers.get(id(tensor))
        return Ref(self._add(tensor, None, ("input", place)) if known is None else known)

    def finish(self, result: Any) -> Program:
        """The program, once the forward has returned. Raises NotRecordable."""
        if self.error:
            raise NotRecordable(self.error)
        self.program.result = self._refs(_checked(result))
        for value in self.program.values:
            if value.pinned and value.root is not None:
                raise NotRecordable("it writes into its arguments or weights")
        return self.program

    def _note(self, func: Callable, name: str, given: tuple, live: tuple, result: Any) -> None:
        tensors = list(tensors_in(result))
        writes = writes_in_place(name, live[1])
        if name in DATA_DEPENDENT or _data_dependent(name, live):
            raise NotRecordable("goes by what a tensor holds")
        if not tensors and not writes:
            if isinstance(result, PLAIN) and not any(True for _ in tensors_in(live)):
                return  # a question about torch itself
            raise NotRecordable("reads what a tensor holds")
        if any(type(one) not in (torch.Tensor, torch.nn.Parameter) for one in tensors):
            raise NotRecordable(f"makes a {type(tensors[0]).__name__}")
        if any(one.layout is not torch.strided for one in tensors):
            raise NotRecordable("makes a sparse tensor")
        if writes:
            self._pin(next(tensors_in(live)))
        sources = {_memory(one): one for one in tensors_in(live) if not one.is_sparse}

        def number(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                if isinstance(leaf, PLAIN):
                    return leaf
                raise NotRecordable(f"gives a {type(leaf).__name__}")
            if (known := self.numbers.get(id(leaf))) is not None:
                return Ref(known)
            base = sources.get(_memory(leaf))
            return Ref(self._add(leaf, base))

        before = len(self.program.values)
        made = replaced(result, number)
        if len(self.program.values) == before and not writes:
            return  # what was asked for is what was given
        self.program.steps.append(TorchStep(func, name, given[0], given[1], made, writes))

    def _refs(self, tree: Any) -> Any:
        def leaf(one: Any) -> Any:
            if isinstance(one, torch.Tensor):
                return self._ref(one)
            if id(one) in self.layers:
                return self._layer(one)
            if isinstance(one, PLAIN) or callable(one):
                return one
            raise NotRecordable(f"is given a {type(one).__name__}")

        return replaced(tree, leaf)

    def _ref(self, tensor: torch.Tensor) -> Ref:
        number = self.numbers.get(id(tensor))
        if number is None:
            path = self.weights.get(id(tensor))
            if path is None:
                raise NotRecordable("takes a tensor that is neither an argument nor a weight, nor made by torch")
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise NotRecordable(f"takes a weight that is a {type(tensor).__name__} ({path})")
            if path in self.tied:  # one of its places may be given another tensor
                raise NotRecordable(f"takes a weight that stands in several places ({path})")
            number = self._add(tensor, None, ("weight", path))
        return Ref(number)

    def _layer(self, layer: nn.Module) -> Ref:
        """It stands among the weights: another block of the same program has its own in that place."""
        number = self.numbers.get(id(layer))
        if number is None:
            number = self.numbers[id(layer)] = len(self.program.values)
            root = ("weight", self.layers[id(layer)])
            self.program.values.append(TensorValue(number, (), (), 0, torch.uint8, META, number, root))
        return Ref(number)

    def _add(self, tensor: torch.Tensor, base: torch.Tensor | None, root: tuple[str, Any] | None = None) -> int:
        number = len(self.program.values)
        of = number if base is None else self.program.values[self._ref(base).number].base
        shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
        value = TensorValue(number, shape, tensor.stride(), offset, tensor.dtype, tensor.device, of, root)
        value.pinned = self.program.values[of].pinned if of != number else False
        self.program.values.append(value)
        key = id(tensor)
        self.numbers[key] = number
        self.living[key] = weakref.ref(tensor, lambda _: (self.numbers.pop(key, None), self.living.pop(key, None)))
        return number

    def _pin(self, tensor: torch.Tensor) -> None:
        base = self.program.values[self._ref(tensor).number].base
        for value in self.program.values:
            if value.base == base:
                value.pinned = True


def recorded(
    forward: Callable, weights: dict[str, torch.Tensor], layers: dict[str, nn.Module], args: tuple, kwargs: dict
) -> tuple[Any, Program | str]:
    """What forward(*args, **kwargs) gives, and its program or why there is none; see `StepRecorder`."""
    given = list(tensors_in((args, kwargs)))
    recorder = StepRecorder(weights, layers)
    for place, tensor in enumerate(given):
        recorder.input(tensor, place)
    counted = [tensor for tensor in (*given, *weights.values()) if not tensor.is_inference()]
    versions, drawn = [tensor._version for tensor in counted], _random_state(given)
    hidden = HiddenCollectives()
    try:
        with seen_as_steps(layers.values()), recorder, hidden.looking():
            output = forward(*args, **kwargs)
        if hidden.found:
            raise NotRecordable("ranks write into tensors of each other")
        program = recorder.finish(output)
    except NotRecordable as error:
        return output, str(error)
    finally:
        recorder.living.clear()  # weights are not converted while something watches them; callbacks hold the recorder
    if versions != [tensor._version for tensor in counted]:
        return output, "it writes into its arguments or weights"
    if not all(map(torch.equal, drawn, _random_state(given))):
        return output, "it draws random numbers"
    return output, program


def _checked(result: Any) -> Any:
    """What a forward returned; raises NotRecordable for a container that a plan would not make of the same kind."""
    if isinstance(result, tuple | list | dict):
        if type(result) not in (tuple, list, dict) and not hasattr(result, "_fields"):
            raise NotRecordable(f"it returns a {type(result).__name__}")
        for one in result.values() if isinstance(result, dict) else result:
            _checked(one)
    return result


def _memory(tensor: torch.Tensor) -> int:
    """The same for views of one memory; tensors of no bytes, and of none that can be read, have no address."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata


def _random_state(given: list[torch.Tensor]) -> list[torch.Tensor]:
    devices = {tensor.device for tensor in given if tensor.is_cuda}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def name_of(func: Callable) -> str:
    """As a model's code has it; of a property its own."""
    name = getattr(func, "__name__", type(func).__name__)
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def writes_in_place(name: str, kwargs: dict) -> bool:
    """Whether a function of this name writes into what it is given."""
    if kwargs.get("out") is not None or kwargs.get("inplace") or name == "__setitem__":
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_") and not name.startswith("_")


def _data_dependent(name: str, live: tuple) -> bool:
    """Whether the shape of the result depends on values, by how the function is called."""
    args, kwargs = live
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        repeats = [*args[1:2], *(kwargs[name] for name in ("repeats",) if name in kwargs)]
        return any(isinstance(one, torch.Tensor) for one in repeats) or (len(args) == 1 and not kwargs)
    if name in ("__getitem__", "__setitem__", "index_put", "index_put_"):
        masks = any(one.dtype in (torch.bool, torch.uint8) for one in tensors_in(args[1:2]))
        return masks or any(True for _ in _slice_ends(args[1:2]))
    if name in FACTORIES:
        return any(True for _ in tensors_in(args[:1] if name == "full" else args))
    return name in SIZED_BY_ARGUMENTS and any(True for _ in tensors_in(args[1:]))


def _slice_ends(index: Any) -> Iterator[torch.Tensor]:
    """The tensors that say where a slice begins or ends."""
    if isinstance(index, slice):
        yield from tensors_in((index.start, index.stop, index.step))
    elif isinstance(index, tuple | list):
        for one in index:
            yield from _slice_ends(one)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors of nested arguments or outputs, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for one in tree:
            yield from tensors_in(one)
    elif isinstance(tree, dict):
        for one in tree.values():
            yield from tensors_in(one)
