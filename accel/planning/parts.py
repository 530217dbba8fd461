"""Which models were optimized through which pipelines, which may be given others afterwards. All are held weakly."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from accel.planning.targets import holders_in, models_in

PARTS = "_accel_parts"  # where a pipeline, or whatever else holds models, keeps its `ModelParts`


class WeakList:
    """Objects in the order they came, each once, as long as somebody else holds them. Copies and pickles are empty."""

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
        """Puts it last."""
        self._references = [weakref.ref(other) for other in self if other is not one] + [weakref.ref(one)]


class ModelParts:
    """The models optimized through one pipeline. A copy of the pipeline knows those that it holds itself."""

    def __init__(self, owner: object | None, models: Iterable[nn.Module]):
        self.owner, self.models = WeakList([] if owner is None else [owner]), WeakList(models)

    def __getstate__(self) -> dict[str, Any]:
        owner = next(iter(self.owner), None)
        return {"owner": owner, "models": [model for model in self.models if _holds(owner, model)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ModelParts.__init__(self, state["owner"], state["models"])


def remember(obj: object, plans: Iterable[Any]) -> None:
    """The models of these plans were optimized now, through obj."""
    for holder in holders_in(obj):
        held = {id(model) for model in models_in(holder).values()}
        plans = [plan for plan in plans if isinstance(plan.root, nn.Module)]
        own = [plan for plan in plans if id(plan.root) in held]
        for plan in own:
            plan.users.add(holder)
        if own and all(plan.root is not holder for plan in own):  # a model itself has nothing to remember
            vars(holder)[PARTS] = ModelParts(holder, [*_former(holder), *(plan.root for plan in own)])


def forget(obj: object) -> None:
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
    """Why a former model of obj must stay optimized; users: all that it was optimized through, the last one last."""
    users, through = list(users), holders_in(obj)
    others = [user for user in users if all(user is not one for one in through) and PARTS in vars(user)]
    using = next((user for user in others if _holds(user, model)), None)
    if using is not None:
        return f"an optimized {type(using).__name__} uses it"
    if users and all(users[-1] is not one for one in through):
        return "it was optimized again since, and not through this one"
    return None


def _holds(obj: object, model: nn.Module) -> bool:
    return any(model is one for one in models_in(obj).values())
