"""What a module is made of: exact types, and nothing attached that a fused forward would leave out."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from accel.casting import cast_of, uncast
from accel.libraries.code import KERNEL, comes_from, function_tables
from accel.libraries.hooks import hook_of
from accel.libraries.tensor_parallel import rests_without_gradients
from accel.patching.owner import OWNER, InstanceMethod

# Packages whose modules compute the same for inputs of any size, keep no state, and may be run in a trial.
LIBRARIES = {
    "accel", "bitsandbytes", "diffusers", "gptqmodel", "huggingface_hub", "optimum", "peft", "torch", "torchao",
    "transformers",
}  # fmt: skip
LIBRARIES |= sys.stdlib_module_names  # whose decorators they use

CALLED = ("forward", "__call__")
TRAINING_INSIDE = "training mode inside"


def hooked(module: nn.Module) -> str | None:
    """Why calling the module does more than running its forward."""
    attributes = vars(module)
    if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
        return "forward hooks"
    if hook_of(module) is not None:
        return "an accelerate hook"
    return None


class CallersHook:
    """A hook of ours on a module that is called, not computed by who holds it, so that its hooks run."""


def comes_when_called(module: nn.Module) -> bool:
    """Whether it has such a hook: its weights may be elsewhere until then."""
    return any(isinstance(hook, CallersHook) for hook in vars(module)["_forward_pre_hooks"].values())


def foreign_hooks(module: nn.Module, own: type | tuple = ()) -> bool:
    """Whether it has hooks beside those that collect hidden states for transformers, and those of our own class."""
    hooks = (*vars(module)["_forward_hooks"].values(), *vars(module)["_forward_pre_hooks"].values())
    return not all(isinstance(hook, own) or comes_from(hook, "transformers") for hook in hooks)


def tampered(module: nn.Module, stored: bool = False, known_hooks: bool = False) -> str | None:
    """Why calling the module is not the same as computing from its weights: hooks, or a forward of its own.

    stored: weights that are stored in fewer bits, and cast around its call, are no reason; see `casting.py`.
    known_hooks: the caller does what its hooks do.
    """
    reason = None if known_hooks else hooked(module)
    if reason is not None:
        return reason
    own = uncast(module) if stored else vars(module).get("forward")
    known = stock_method(module, own) or getattr(own, "beneath", False) or rests_without_gradients(module, own)
    if own is not None and not known:
        return f"a replaced forward ({own_forward(module)})"
    name = overridden(module)
    return None if name is None else f"a replaced {name}"


def has_hooks(module: nn.Module, called: bool = False) -> str | None:
    """What a module that is not called would do besides: in training mode, by another forward, by hooks.

    called: it is, so hooks of ours run.
    Hooks of transformers do not count, nor does accelerate's in whose place a fast forward stands.
    """
    if trains(module):
        return TRAINING_INSIDE
    aligned = hook_of(module) is not None and getattr(vars(module).get("forward"), "around", None) is None
    return replaced_forward(module) or (
        hooked(module) if aligned or foreign_hooks(module, CallersHook if called else ()) else None
    )


def replaced_forward(module: nn.Module) -> str | None:
    """That this instance has a forward which is neither its class's nor a fast one."""
    forward = vars(module).get("forward")
    if isinstance(forward, InstanceMethod | None) or stock_method(module, forward):
        return None
    return f"a replaced forward ({own_forward(module)})"


def kernelized(module: nn.Module) -> bool:
    """Whether Hugging Face's package `kernels` put a forward on this instance, by kernelize or use_kernels=True.

    It binds the forward of another class to modules whose class has a name for it.
    """
    forward = vars(module).get("forward")
    bound = isinstance(forward, MethodType) and forward.__self__ is module
    return bound and hasattr(type(module), KERNEL) and not stock_method(module, forward)


def own_forward(module: nn.Module) -> str:
    """What this instance runs in the place of its class's forward, for a reason."""
    forward = vars(module)["forward"]
    if not kernelized(module):
        return type(forward).__name__
    function = forward.__func__
    return f"{function.__module__}.{function.__qualname__}, by the package kernels"


def trains(module: nn.Module) -> bool:
    """Whether it is in training mode and its code asks for that; few have code that does."""
    return module.training and "training" in mentioned([type(module)])


def overridden(part: object) -> str | None:
    """The first method of its class, except the forward, that this object overrides by one that computes otherwise."""
    attributes = getattr(part, "__dict__", {})
    for base in own_classes(type(part)):
        for name, value in vars(base).items():
            if name in attributes and name not in ("forward", OWNER, "extra_repr") and callable(value):
                own = attributes[name]
                if not stock_method(part, own, name) and getattr(own, "computes", True):
                    return name
    return None


def own_classes(kind: type) -> list[type]:
    """The class and its bases, except nn.Module and object."""
    return [base for base in kind.__mro__ if base not in (nn.Module, object)]


def methods(kind: type) -> dict[str, object]:
    """Methods and class attributes of a class and its bases, except nn.Module."""
    return {name: value for base in reversed(own_classes(kind)) for name, value in written_in(vars(base)).items()}


def written_in(attributes: Mapping[str, object]) -> dict[str, object]:
    """Attributes of one class without special names, except `__call__`."""
    return {name: value for name, value in attributes.items() if name == "__call__" or not name.startswith("__")}


def foreign(part: object) -> str | None:
    """Why this is not the library's own: code of its class comes from elsewhere, and may do what no probe shows."""
    kind: type = type(part)
    places = ((name, vars(module).get(name)) for module, name in torch_functions(kind))
    for name, value in (*methods(kind).items(), *places):
        for function in _functions(value):
            if function.__globals__.get("__name__", "").partition(".")[0] not in LIBRARIES:
                return f"{type(part).__name__}.{name} is not the library's own"
    return None


@lru_cache(maxsize=256)  # a model has a few dozen classes, and hundreds of blocks of them
def torch_functions(kind: type) -> tuple[tuple[ModuleType, str], ...]:
    """Functions of torch that the code of this class names, as it was at the first call: (module, name)."""
    found: dict[tuple[ModuleType, str], None] = {}
    for function in chain.from_iterable(map(_functions, methods(kind).values())):
        names = set(function.__code__.co_names)
        modules = [function.__globals__[name] for name in names & function.__globals__.keys()]
        for module in modules:
            if isinstance(module, ModuleType) and module.__name__.partition(".")[0] == "torch":
                found |= dict.fromkeys((module, name) for name in sorted(names & vars(module).keys()))
    return tuple(found)


def mentioned(kinds: Iterable[type]) -> set[str]:
    """Names that calling objects of these classes may read: those in the code that runs.

    It is followed to methods of the classes, also by `super()`, and to functions of their files.
    """
    kinds = tuple(kinds)
    found = [methods(kind) for kind in kinds]
    written = [vars(base) for kind in kinds for base in own_classes(kind)]
    names: set[str] = set()
    followed = set()
    waiting = [function for of_one in found for name in CALLED for function in _functions(of_one.get(name))]
    while waiting:
        function = waiting.pop()
        if function in followed:
            continue
        followed.add(function)
        used = _names(function.__code__)
        waiting += chain.from_iterable(map(_functions, enclosed(function)))  # what a decorator goes around
        if "super" in used:
            waiting += chain.from_iterable(_functions(one[name]) for one in written for name in used & one.keys())
        for name in used - names:
            names.add(name)
            values = [of_one[name] for of_one in found if name in of_one] + [function.__globals__.get(name)]
            waiting += chain.from_iterable(map(_functions, values))
    return names


def _names(code: CodeType) -> set[str]:
    """Attributes, variables and strings, also of functions written inside."""
    names = {name for name in (*code.co_names, *code.co_consts) if isinstance(name, str)}
    return names.union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _functions(value: object) -> Iterator:
    """The Python functions in a class attribute, inside what wraps them, or in a registry."""
    for table in function_tables(value):
        yield from table.values()
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    while inspect.isfunction(value):
        yield value
        value = getattr(value, "__wrapped__", None)


def enclosed(function: FunctionType) -> list[object]:
    """The contents of a function's closure."""
    cells = function.__closure__ or ()
    return [cell.cell_contents for cell in cells if cell != type(cell)()]


def stock_method(part: object, value: object, name: str = "forward") -> bool:
    """Whether value is the class's own method bound to the object, as hooks leave it when they are removed."""
    if getattr(value, "__self__", None) is not part:
        return False
    return getattr(value, "__func__", value) is getattr(type(part), name, None)


def another_kind(found: type, *expected: type) -> str:
    """That an object is of another class than one of these; of classes of one name, whose it is tells them apart."""
    names = [kind.__name__ for kind in expected]
    owner = f"{found.__module__.partition('.')[0]}'s " if found.__name__ in names else ""
    return f"{owner}{found.__name__} where {' or '.join(names)} is expected"


def plain(module: nn.Module | None, *kinds: type, stored: bool = False) -> str | None:
    """None where the module is exactly of one of the kinds and untampered, else the reason.

    By exact type: a LoRA layer is a Linear to isinstance, and its `.weight` lacks the adapter.
    """
    if module is None or type(module) not in kinds:
        return another_kind(type(module), *kinds)
    return tampered(module, stored)


def all_plain(*modules_and_kinds: tuple[nn.Module | None, type]) -> str | None:
    """The first reason of `plain` over (module, kind) pairs; missing modules (None) are no obstacle."""
    for module, kind in modules_and_kinds:
        if module is not None:
            if (reason := plain(module, kind, stored=True)) is not None:
                return reason
    return None


def untouched(*modules: nn.Module | None) -> str | None:
    """The first reason of `tampered` over modules whose work a fused forward does without calling them."""
    return next(filter(None, (tampered(module, stored=True) for module in modules if module is not None)), None)


def holds(module: nn.Module, *names: str) -> bool:
    """Whether the module has all these children."""
    children = vars(module)["_modules"]
    return all(children.get(name) is not None for name in names)


def pointwise(conv: nn.Conv2d) -> bool:
    """Whether a convolution is a matrix product over channels."""
    return (
        conv.kernel_size == (1, 1) and conv.stride == (1, 1) and conv.padding in ((0, 0), "valid") and conv.groups == 1
    )


def foreign_processor(module: nn.Module) -> str | None:
    """Why an attention's processor must be called: one from outside diffusers may store what it sees."""
    processor = vars(module).get("processor")
    if processor is None or (comes_from(type(processor), "diffusers") and foreign(processor) is None):
        return None
    return f"the attention processor {getattr(processor, '__name__', type(processor).__name__)} may keep state"


def side_effects(module: nn.Module) -> str | None:
    """Why a user would notice a trial run of the module: their code inside it."""
    for one_of_a_kind in {type(child): child for child in module.modules()}.values():
        if (reason := foreign(one_of_a_kind)) is not None:
            return reason
    for child in module.modules():
        if child is not module and foreign_hooks(child):
            return "forward hooks inside, which examining it would call"
        if (reason := foreign_processor(child)) is not None:
            return reason
    return None


def no_tensor(x: object) -> str | None:
    """Why an input is no plain tensor."""
    return None if type(x) in (torch.Tensor, nn.Parameter) else f"input of type {type(x).__name__}"


def meta_weights(module: nn.Module) -> bool:
    """Whether some weights are not loaded, as under sequential offload."""
    return any(tensor.is_meta for tensor in module.parameters())


def placement(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the first floating parameter, else buffer, such as scales of quantized linears.

    The dtype it is computed in, if it is stored in another. CPU and float32 for a module without any.
    """
    parameters = ((part, one) for part in module.modules() for one in part._parameters.values())
    buffers = ((part, one) for part in module.modules() for one in part._buffers.values())
    for part, tensor in chain[tuple[nn.Module, torch.Tensor | None]](parameters, buffers):
        if tensor is not None and tensor.is_floating_point():
            cast = cast_of(part) if tensor.itemsize == 1 else None
            return tensor.device, tensor.dtype if cast is None else cast.compute
    return torch.device("cpu"), torch.float32


def twin(module: nn.Module, tensor_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A module of the same classes and settings, which holds other tensors and runs the code of its classes. The module
    is only read. tensor_of: a parameter or buffer -> what the twin holds in its place; asked once for a tied one.
    """
    made: dict[int, Any] = {}

    def tensor_twin(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is not None and id(tensor) not in made:
            other = tensor_of(tensor)
            parameter = isinstance(tensor, nn.Parameter) and other is not tensor
            made[id(tensor)] = nn.Parameter(other, requires_grad=False) if parameter else other
        return None if tensor is None else made[id(tensor)]

    def module_twin(one: nn.Module | None) -> Any:
        if one is not None and id(one) not in made:
            made[id(one)] = other = type(one).__new__(type(one))
            own = vars(other)
            own.update(vars(one))
            own.pop("forward", None)
            for kind in ("_parameters", "_buffers"):
                own[kind] = {name: tensor_twin(tensor) for name, tensor in own[kind].items()}
            own["_modules"] = {name: module_twin(child) for name, child in own["_modules"].items()}
        return None if one is None else made[id(one)]

    return module_twin(module)
