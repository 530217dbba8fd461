"""Layers with two attentions whose own code runs around them: what they do else is of no form that is known.

As in Zamba2 (Zyphra, 2024), where a shared block with softmax attention gives the linear one another input. Whether
such code looks at the cache or a mask cannot be seen, and would matter: in a forward of fused layers both are made up.
So it is given objects that refuse to be looked at.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from accel_kernels.warmup import warming_up
from torch import nn

from accel.libraries.cache import Cache
from accel.llm.parts.part import NormedInput
from accel.llm.parts.step import ForwardContext, Step
from accel.llm.recording.record import LayerRecord, NotUnderstood, Record, form, is_absent
from accel.llm.runtime.attention import AttentionSpec, BoundAttention
from accel.llm.runtime.layer import LayerForward, LayerSpec, understand_attention
from accel.llm.runtime.mixer_pair import each_alone, joined
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.guard import LayerGuard, plain_settings


def understand_framed(layer: LayerRecord, record: Record) -> LayerSpec | None:
    """What is known of a layer of which both attentions are; None where they are not, or no modules of their own."""
    known = layer.known
    if len(layer.mixers) < 2 or (known is not None and not known.framed):
        return None
    if layer.call.args[len(_names(layer.layer)) :]:
        return None
    parts: list[AttentionSpec] = []
    returns: list[int] = []
    for view in each_alone(layer):
        calls = [call for call in layer.calls if call.module is view.attention]
        try:
            found = understand_attention(view, record)
        except NotUnderstood:
            return None
        if len(calls) != 1 or not found.last.output.same(calls[0].made) or not found.first.input.same(calls[0].taken):
            return None
        result = calls[0].result
        if isinstance(result, tuple) and not all(map(is_absent, result[1:])):
            return None
        parts.append(found.spec)
        returns.append(len(result) if isinstance(result, tuple) else 0)
    result, nothing = layer.call.result, dict.fromkeys(("mlp", *NORMS))
    return LayerSpec(
        plain_settings(layer.layer), joined(parts), **nothing, parallel=False, shared=False, scales=(1.0, 1.0),
        returns=len(result) if isinstance(result, tuple) else None,
        given=frozenset((name, form(v)) for name, v in layer.call.kwargs.items() if not is_absent(v)),
        framed=tuple(returns),
    )  # fmt: skip


MASK = "mask"  # in the names of arguments
NORMS = ("before_attention", "post_attention", "after_attention", "before_mlp", "post_mlp", "after_mlp")


def _names(layer: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = inspect.signature(type(layer).forward).parameters.values()
    return [one.name for one in given if one.kind in kinds][1:]


def _related(name: str, other: str) -> bool:
    """Whether one module is in the other, of names that end with a dot; all are in the layer."""
    return name == "." or name.startswith(other) or other.startswith(name)


class Unseen:
    """Stands for a cache or a mask. Raises NotUnderstood where it is looked at."""

    def _refuse(self, *args: Any) -> Any:
        raise NotUnderstood("its layers look at the cache or a mask beside their attention")

    __getattr__ = __getitem__ = __len__ = __bool__ = __iter__ = _refuse


class MixerForward(FastForward):
    """Computes attention while the layer around it runs in a step; else the stock forward runs."""

    bound: BoundAttention
    out: Any

    def __init__(
        self,
        module: nn.Module,
        path: str,
        kernels: Kernels,
        log: FallbackLog,
        spec: AttentionSpec,
        returns: int,
        steps: ForwardContext,
    ) -> None:
        super().__init__(module, path, kernels, log)
        self.spec, self.returns, self.steps = spec, returns, steps

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("bound", "out")}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        step = None if torch.compiler.is_compiling() else self.steps.current
        if step is None or step.frame is None:
            return self.stock(*args, **kwargs)
        return self.fast(step, *args, **kwargs)

    def fast(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        assert step.frame is not None
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        y = self.bound(self.kernels, step, NormedInput(x.contiguous()), step.frame)
        y = self.out(self.kernels, NormedInput(y))
        return (y, *(None,) * (self.returns - 1)) if self.returns else y


class FramedForward(LayerForward):
    """Runs its layer's own code; attention in it, by `mixers`, over the store of the step."""

    def __init__(self, module: nn.Module, path: str, *parts: Any) -> None:
        super().__init__(module, path, *parts)
        kernels, log, spec, steps = parts
        self.parameters = tuple(_names(module))
        mine = [f"{one.name}." for one in spec.attention.mixers]
        apart = [name for name, _ in module.named_modules() if not any(_related(f"{name}.", one) for one in mine)]
        self.layer_guard = LayerGuard(module, (*spec.called, *apart), ())
        self.mixers = [
            MixerForward(module.get_submodule(one.name), f"{path}.{one.name}", kernels, log, one, returns, steps)
            for one, returns in zip(spec.attention.mixers, spec.framed, strict=True)
        ]

    @property
    def inner(self) -> Iterable[FastForward]:
        return self.mixers

    def take(self, stack: bool) -> None:
        for one in self.mixers:
            one.bound = one.spec.bind(self.kernels, self.module, stack)
            one.out = one.spec.bind_out(self.module)
        self.bound = self.framed

    def fast(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(self.parameters, args, strict=False)) | kwargs
        x = named.pop(self.parameters[0])
        y = x if self.repeats and warming_up() else self.bound(self.kernels, step, x, named)
        return y if self.spec.returns is None else (y, *(None,) * (self.spec.returns - 1))

    def framed(self, kernels: Kernels, step: Step, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """As `BoundLayer`."""
        before, step.frame = step.frame, kwargs
        hidden = [name for name, one in kwargs.items() if isinstance(one, Cache) or (MASK in name and one is not None)]
        try:
            y = self.stock(x, **kwargs | dict.fromkeys(hidden, Unseen()))
        finally:
            step.frame = before
        return y[0] if isinstance(y, tuple) else y
