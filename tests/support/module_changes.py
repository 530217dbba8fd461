"""What can be changed in one module, each change a context in which it holds."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from accel.patching.fast_forward import FastForward

REFUSALS = (
    UnboundLocalError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)  # of stock
WORDS = {"none": "tanh", "tanh": "none", "zeros": "circular", "default": "scale_shift"}  # that stock's code knows
Changes = Iterable[AbstractContextManager]


def more(output):
    """Half as much again of each tensor of numbers."""
    if isinstance(output, tuple | list):
        return type(output)(map(more, output))
    return 1.5 * output if isinstance(output, torch.Tensor) and output.is_floating_point() else output


@contextmanager
def other(target: object, name: str, value: object) -> Iterator[None]:
    before = getattr(target, name)
    own = name in vars(target)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before) if own or name != "forward" else delattr(target, name)


@contextmanager
def item(held: dict, name: str, value: object) -> Iterator[None]:
    before, held[name] = held[name], value
    try:
        yield
    finally:
        held[name] = before


@contextmanager
def in_place(tensor: torch.Tensor) -> Iterator[None]:
    before = tensor.clone()
    with torch.no_grad():
        tensor.copy_(tensor.logical_not() if tensor.dtype is torch.bool else more(tensor))
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.copy_(before)


@contextmanager
def hooked(module: nn.Module) -> Iterator[None]:
    with module.register_forward_hook(lambda module, args, output: more(output)):
        yield


def as_class(module: nn.Module) -> Changes:
    kind = type(module)
    forward = lambda self, *args, **kwargs: more(kind.forward(self, *args, **kwargs))  # noqa: E731
    yield other(module, "__class__", type("Sub", (kind,), {"forward": forward}))


def as_forward(module: nn.Module) -> Changes:
    inner = module.forward
    yield other(module, "forward", lambda *args, **kwargs: more(inner(*args, **kwargs)))


def settings(module: nn.Module) -> Changes:
    """Each number, switch, word and size that it, or its attention processor, holds."""
    for holder in filter(None, (module, vars(module).get("processor"))):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if name == "training" or name.startswith("_"):
                continue
            if isinstance(value, int | float):
                yield other(holder, name, not value if isinstance(value, bool) else 2 * value or type(value)(1))
            elif isinstance(value, str):
                yield other(holder, name, WORDS.get(value, f"other {value}"))
            elif isinstance(value, tuple) and all(type(one) is int for one in value):
                yield other(holder, name, tuple(one + 1 for one in value))


def contents(module: nn.Module) -> Changes:
    """Other modules and weights in the place of its own, and its own weights and buffers changed in place."""
    for name, child in list(module._modules.items()):
        if child is not None:
            yield item(module._modules, name, _larger(child))
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            yield item(module._parameters, name, nn.Parameter(more(parameter.detach())))
            yield in_place(parameter)
    yield from buffers(module)


def buffers(module: nn.Module) -> Changes:
    yield from (in_place(buffer) for buffer in module._buffers.values() if buffer is not None)


def _larger(child: nn.Module) -> nn.Module:
    """A copy without anything of ours, with larger weights."""
    found = copy.deepcopy(child)
    for part in found.modules():
        if isinstance(vars(part).get("forward"), FastForward):
            del part.forward
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(1.5)
    return found


# In training, dropouts drop all, see `dropping`.
CHANGES: dict[str, Callable[[nn.Module], Changes]] = {
    "class": as_class,
    "forward": as_forward,
    "hook": lambda module: [hooked(module)],
    "training": lambda module: [other(module, "training", True)],
    "setting": settings,
    "contents": contents,
}


def dropping(model: nn.Module) -> nn.Module:
    """The model, whose dropouts drop everything where they work."""
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is float and "drop" in name:
                setattr(module, name, 1.0)
        if isinstance(module, nn.Dropout):
            module.p = 1.0
    return model


def answers(pairs: Iterable[tuple[nn.Module, nn.Module]], change: str, ours: Callable, stock: Callable) -> Iterator:
    """(ours, stock) of a call under every change of this kind to each pair of modules, ours and stock's, where stock
    gives an answer.
    """
    for module, twin in pairs:
        for mine, its in zip(CHANGES[change](module), CHANGES[change](twin), strict=True):
            with its:
                try:
                    wanted = stock()
                except REFUSALS:
                    continue
                with mine:
                    yield ours(), wanted
            ours()  # as it was, or what is put back would show the next change, too
