"""Records which experts the routers of a model choose in one run, and repeats these choices in another.

Where two experts are nearly equal to a router, rounding decides, and the outputs of such a token in two runs have
little in common. So formulas are compared with the routing fixed: the second run takes the experts and weights of the
first.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from accel.in_flight import Here, listening
from accel.llm.attention.stock.indexed_attention import IndexedSpec
from accel.llm.generation.decoder import DecoderForward
from accel.llm.recording.record import NotUnderstood

CHOSEN = 4  # tokens that an index chooses in a trial


class Choices:
    """Choices of one run of so many rows; tokens of a row follow each other.

    notes: by the module that was given choices, the index and weights, (T, k), of each of its calls.
    """

    def __init__(self, rows: int):
        self.rows = rows
        self.notes: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def cover(self, wholes: Iterable[nn.Module]) -> bool:
        """Whether each of these modules contains one that was given choices."""
        return all(any(module in self.notes for module in whole.modules()) for whole in wholes)

    def shared(self, other: "Choices") -> float:
        """The share of the experts of these tokens that another run with the same tokens has chosen too."""
        found = []
        for module, notes in self.notes.items():
            for (index, _), (others, _) in zip(notes, other.notes[module], strict=True):
                found.append((index.unsqueeze(-1) == others.unsqueeze(-2)).any(-1).flatten().cpu())  # of any device
        return float(torch.cat(found).float().mean())

    def carried(self, root: nn.Module, twin: nn.Module) -> "Choices":
        """The same for the modules of a twin of the model, whose paths are those in root."""
        if twin is root:
            return self
        paths = {module: path for path, module in root.named_modules()}
        found = Choices(self.rows)
        found.notes = {twin.get_submodule(paths[module]): notes for module, notes in self.notes.items()}
        return found


def routed_modules(forward: DecoderForward) -> list[nn.Module]:
    """The mixtures of experts in layers that are understood, called as a whole."""
    mlps = [(layer.module, layer.spec.mlp) for layer in forward.layers if layer.spec.mlp is not None]
    return [module.get_submodule(name) for module, mlp in mlps for name in mlp.wholes]


def routing_modules(forward: DecoderForward) -> list[nn.Module]:
    """Modules that no fused forward stands for and that may be given choices: with weights of experts, or unknown."""
    mine = {layer.module for layer in forward.layers if not layer.inner or not _stacks(layer.module)}
    done = {module for one in forward.routers for module in one.module.modules()}
    done |= {module for one in forward.experts for module in one.module.modules() if module is not one.module}
    inner = {module for layer in forward.layers for one in layer.inner for module in one.module.modules()}
    others = [layer for layer in forward.module.get_submodule(forward.stack).children() if layer not in mine]
    wholes = (*routed_modules(forward), *others)
    inside = (module for whole in wholes for module in whole.modules() if module is not whole)
    holding = (module for module in inside if any(True for _ in chain(module.parameters(), module.buffers())))
    return [module for module in holding if module not in done and inner.isdisjoint(module.modules())]


def _stacks(module: nn.Module) -> bool:
    """Whether there are stacks of matrices in it, as of experts."""
    holding = (one for one in module.modules() if not isinstance(one, nn.Conv1d))
    return any(parameter.dim() == 3 for one in holding for parameter in one.parameters(recurse=False))


@contextmanager
def noting(rows: int, modules: Iterable[nn.Module]) -> Iterator[Choices]:
    """Inside, the choices that these modules are given are noted."""
    choices = Choices(rows)
    hook = RoutingHook(partial(_note, choices))
    with listening(((module, hook) for module in modules), before=True):
        yield choices


def repeating(choices: Choices) -> AbstractContextManager[None]:
    """Inside, the same modules are given these choices, call by call.

    Rows may have more tokens than before: the choices of those stay. Raises NotUnderstood where a row has fewer, or
    there are more calls.
    """
    waiting = {module: iter(notes) for module, notes in choices.notes.items()}
    hook = RoutingHook(partial(_repeat, choices.rows, waiting))
    return listening(((module, hook) for module in waiting), before=True)


class RoutingHook(Here):
    """A forward pre-hook, equal to all others, so that a `Fingerprint` holds from one trial of a model to the next."""

    def __eq__(self, other: object) -> bool:
        return type(other) is RoutingHook

    __hash__ = None  # type: ignore[assignment]


def _note(choices: Choices, module: nn.Module, args: tuple, kwargs: dict) -> None:
    found = _chosen(args, kwargs)
    if found is not None:
        index, weights = ((*args, *kwargs.values())[place] for place in found)
        choices.notes.setdefault(module, []).append((index.clone(), weights.clone()))


def _repeat(rows: int, waiting: dict, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    found, note = _chosen(args, kwargs), next(waiting[module], None)
    if found is None or note is None:
        raise NotUnderstood("experts are chosen otherwise in another run")
    given = [*args, *kwargs.values()]
    for place, before in zip(found, note, strict=True):
        given[place] = _replaced(given[place], before, rows)
    return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))


def _replaced(now: torch.Tensor, before: torch.Tensor, rows: int) -> torch.Tensor:
    """`before` in the place of the first tokens of each row of `now`; both (rows * tokens, k)."""
    before = before.to(now.dtype)  # weights, of a run in another precision
    if now.shape == before.shape:
        return before
    if now.shape[1] != before.shape[1] or len(now) < len(before) or len(now) % rows or len(before) % rows:
        raise NotUnderstood("experts are chosen for other tokens in another run")
    result, first = now.clone().view(rows, -1, now.shape[1]), before.view(rows, -1, now.shape[1])
    result[:, : first.shape[1]] = first
    return result.view(now.shape)


def _chosen(args: tuple, kwargs: dict) -> tuple[int, int] | None:
    """The places among the arguments of choices and their weights, both (T, k); None where there are none."""
    given: list[Any] = [*args, *kwargs.values()]
    tensors = [(place, one) for place, one in enumerate(given) if isinstance(one, torch.Tensor) and one.dim() == 2]
    for place, index in tensors:
        if index.dtype in (torch.int64, torch.int32):
            same = [other for other, one in tensors if one.shape == index.shape and one.is_floating_point()]
            if len(same) == 1:
                return place, same[0]
    return None


def indexers(forward: DecoderForward) -> list[nn.Module]:
    """Modules that choose the tokens which layers see."""
    attentions = ((layer.module, layer.spec.attention) for layer in forward.layers)
    named = ((layer, one.indexer) for layer, one in attentions if isinstance(one, IndexedSpec))
    return [layer.get_submodule(name) for layer, name in named if name]


def few_chosen(forward: DecoderForward) -> AbstractContextManager[None]:
    """Inside, they choose few tokens, the best first, so that a short text shows what becomes of the others."""
    return listening((module, lambda *given: given[-1][..., :CHOSEN]) for module in indexers(forward))
