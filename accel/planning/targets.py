"""Finds the models, schedulers and pipelines in what a user passes to accel.

An object is walked by its attributes, items and child modules, down to models of diffusers and transformers. What
stands around them, such as an adapter's wrapper, torch's data parallelism or a class of the user's, runs as it is.

A pipeline keeps a note of the models that were optimized through it, since it may be given others afterwards. Notes
hold models weakly.
"""

import types
import weakref
from collections import UserDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from accel.libraries.code import comes_from
from accel.libraries.hooks import hook_of
from accel.libraries.models import generates_by_itself, is_causal_lm, is_model, is_pipeline, is_seq2seq
from accel.parallel.sharded_layers import fully_sharded

GIVE = "give a model or pipeline of diffusers or transformers, or an object, module, list or dictionary that holds some"
SCALARS = (str, bytes, bytearray, int, float, complex, type, torch.Tensor, types.FunctionType, types.ModuleType)
OWN = frozenset(vars(nn.Module()))  # what every module has, and a scripted one cannot show
PARTS = "_accel_parts"  # where a pipeline, or whatever else holds models, keeps its `ModelParts`


def parts_in(obj: object) -> dict[str, object]:
    """All of obj that may be patched, each once, by its path from obj: models, then schedulers, then pipelines. A model
    inside another one is left out.
    """
    found: dict[str, object] = {}
    for path, part in _walk(obj):
        while path in found:
            path += "'"
        found[path] = part
    models = {path: part for path, part in found.items() if isinstance(part, nn.Module)}
    inside = {id(one) for model in models.values() for one in model.modules() if one is not model}
    whole = {path: model for path, model in models.items() if id(model) not in inside}
    others = {path: part for path, part in found.items() if path not in models}
    return whole | dict(sorted(others.items(), key=lambda item: is_pipeline(item[1])))


def models_in(obj: object) -> dict[str, nn.Module]:
    """The models in obj, by their paths from it; {"": obj} of a model."""
    return {path: part for path, part in parts_in(obj).items() if isinstance(part, nn.Module)}


def holders_in(obj: object) -> list[Any]:
    """Objects that can keep a note of what was optimized through obj: obj, or the items of a list."""
    found: dict[int, object] = {}
    waiting, seen = [obj], set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, SCALARS) or id(one) in seen:
            continue
        seen.add(id(one))
        if hasattr(one, "__dict__") and hasattr(one, "__weakref__"):
            found[id(one)] = one
        else:
            waiting += [child for _, child in _children(one)]
    return list(found.values())


def nothing_in(obj: object) -> TypeError | ValueError:
    """What to raise for an object without a model."""
    kind = f"{type(obj).__module__}.{type(obj).__name__}".removeprefix("builtins.")
    if isinstance(obj, str) or hasattr(obj, "__fspath__"):
        return TypeError(f"accel cannot optimize a {kind}: load the model from {str(obj)!r}, and give that")
    if isinstance(obj, type):
        return TypeError(f"accel cannot optimize the class {obj.__name__}: give an instance of it")
    if isinstance(obj, types.MethodType):
        return TypeError(f"accel cannot optimize a method: give the {type(obj.__self__).__name__} whose it is")
    if isinstance(obj, torch.jit.ScriptModule):
        return TypeError("accel cannot optimize a scripted module: give the model that it was made from")
    if is_compiled(obj):
        return TypeError("accel cannot optimize what torch.compile returned: give the model it was called with")
    if is_pipeline(obj):
        return ValueError(f"this {kind} holds no model yet: load its components first")
    if isinstance(obj, list | tuple | set | frozenset | dict | UserDict) and not obj:
        return ValueError(f"this {kind} is empty: {GIVE}")
    return TypeError(f"accel cannot optimize a {kind}, which holds no model of diffusers or transformers; {GIVE}")


def stays_stock(model: nn.Module) -> str | None:
    """Why nothing of a model can be replaced; None where some may be."""
    if any(map(fully_sharded, model.modules())):
        return "FSDP divides its weights among processes and puts them together in each call, so nothing is fused"
    hooks = vars(model)["_forward_pre_hooks"].values()
    if not is_causal_lm(model) and any(comes_from(hook, "compressed_tensors") for hook in hooks):
        return "compressed-tensors dequantizes it at its first call: call it, and optimize it again"
    return "its weights are on the meta device, without values" if on_meta(model) else None


def on_meta(model: nn.Module) -> bool:
    """Whether a model has no values, and no hook would bring them."""
    parameters = list(model.parameters())
    empty = bool(parameters) and all(parameter.is_meta for parameter in parameters)
    return empty and not any(hook_of(module) is not None for module in model.modules())


def is_compiled(part: object) -> bool:
    """Whether it is what torch.compile gives."""
    return isinstance(part, nn.Module) and "_orig_mod" in vars(part).get("_modules", ())


def uncompiled(part: Any) -> Any:
    """The module inside what torch.compile returned; any other part as it is."""
    return part._modules["_orig_mod"] if is_compiled(part) else part


def is_scheduler(obj: object) -> bool:
    """Whether obj is made like a scheduler of diffusers: it sets timesteps, steps through them, and has a config."""
    return all(hasattr(obj, name) for name in ("set_timesteps", "step", "timesteps", "config"))


def schedulers_in(pipe: Any) -> dict[str, object]:
    """The schedulers of a diffusers pipeline by component name."""
    return {name: part for name, part in pipe.components.items() if is_scheduler(part)}


def _walk(obj: object) -> Iterator[tuple[str, object]]:
    """Models, schedulers and pipelines, in the order they are held in."""
    seen: set[int] = set()
    kept = []  # alive, so that no number in `seen` comes to mean another object
    waiting: list[tuple[str, Any, Any]] = [] if is_compiled(obj) else [("", obj, None)]
    while waiting:
        path, one, holder = waiting.pop()
        one = uncompiled(one)
        if one is None or isinstance(one, SCALARS) or id(one) in seen:
            continue
        seen.add(id(one))
        kept.append(one)
        if _is_whole(one):
            yield path, one
            continue
        if is_scheduler(one) and is_pipeline(holder):
            yield path, one
            continue
        if is_pipeline(one):
            yield path, one
        children = [(f"{path}.{name}" if path else name, child, one) for name, child in _children(one)]
        if is_pipeline(holder) and isinstance(one, nn.Module) and not any(True for _ in _walk(one)):
            yield path, one  # a model of no library's, in the place of one
        waiting += reversed(children)


def _is_whole(one: object) -> bool:
    """Whether a model is taken as a whole; a mere wrapper of one with generate(), which it calls, is walked."""
    if not isinstance(one, nn.Module):
        return False
    if not is_model(one):
        return fully_sharded(one)
    encodes = getattr(getattr(one, "config", None), "is_encoder_decoder", False)
    if generates_by_itself(one) or (encodes and not is_seq2seq(one)):
        return True
    return not any(is_causal_lm(module) or is_seq2seq(module) for module in one.modules() if module is not one)


def _children(one: Any) -> Iterator[tuple[str, Any]]:
    if is_pipeline(one):
        yield from one.components.items()
    elif isinstance(one, dict | UserDict):
        yield from ((str(key), value) for key, value in list(one.items()))
    elif isinstance(one, list | tuple | set | frozenset):
        yield from ((str(index), value) for index, value in enumerate(list(one)))
    elif isinstance(one, torch.jit.ScriptModule):
        return
    elif isinstance(one, nn.Module):
        yield from one.named_children()
        yield from ((name, value) for name, value in list(vars(one).items()) if name not in OWN)
    else:
        yield from list(getattr(one, "__dict__", {}).items())
        slots = (name for kind in type(one).__mro__ for name in _slots(kind))
        yield from ((name, getattr(one, name)) for name in slots if hasattr(one, name))


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    named = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in named if name not in ("__dict__", "__weakref__"))


class WeakList:
    """Weak references to objects in the order they were added, each once. Copies and pickles are empty."""

    def __init__(self, objects: Iterable = ()):
        self._references: list[weakref.ref] = []
        for one in objects:
            self.add(one)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        WeakList.__init__(self)

    def __iter__(self) -> Iterator:
        found = (reference() for reference in self._references)
        return (one for one in found if one is not None)

    def add(self, one: object) -> None:
        """Adds it as the last, or moves it there."""
        self._references = [weakref.ref(other) for other in self if other is not one] + [weakref.ref(one)]


class ModelParts:
    """The models optimized through one pipeline. A copy keeps those that it holds itself."""

    def __init__(self, owner: object | None, models: Iterable[nn.Module]):
        self.owner, self.models = WeakList([] if owner is None else [owner]), WeakList(models)

    def __getstate__(self) -> dict[str, Any]:
        owner = next(iter(self.owner), None)
        return {"owner": owner, "models": [model for model in self.models if _holds(owner, model)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ModelParts.__init__(self, state["owner"], state["models"])


def note_optimized(obj: object, plans: Iterable[Any]) -> None:
    """The models of these plans were optimized now, through obj."""
    for holder in holders_in(obj):
        held = {id(model) for model in models_in(holder).values()}
        plans = [plan for plan in plans if isinstance(plan.root, nn.Module)]
        own = [plan for plan in plans if id(plan.root) in held]
        for plan in own:
            plan.users.add(holder)
        if own and all(plan.root is not holder for plan in own):  # a model itself has nothing to remember
            vars(holder)[PARTS] = ModelParts(holder, [*_former(holder), *(plan.root for plan in own)])


def forget_optimized(obj: object) -> None:
    """Takes the note of its plans off it."""
    for holder in holders_in(obj):
        vars(holder).pop(PARTS, None)


def replaced_models(obj: object) -> list[nn.Module]:
    """Models that were optimized through obj, which has others in their places now."""
    return [model for holder in holders_in(obj) for model in _former(holder)]


def _former(holder: object) -> list[nn.Module]:
    known = vars(holder)[PARTS].models if PARTS in vars(holder) else ()
    return [model for model in known if not _holds(holder, model)]


def why_still_optimized(obj: object, model: nn.Module, users: Iterable) -> str | None:
    """Why a former model of obj stays optimized. users: what it was optimized through, the last one last."""
    users, through = list(users), holders_in(obj)
    others = [user for user in users if all(user is not one for one in through) and PARTS in vars(user)]
    if (using := next((user for user in others if _holds(user, model)), None)) is not None:
        return f"an optimized {type(using).__name__} uses it"
    if users and all(users[-1] is not one for one in through):
        return "it was optimized again since, and not through this one"
    return None


def _holds(obj: object, model: nn.Module) -> bool:
    return any(model is one for one in models_in(obj).values())
