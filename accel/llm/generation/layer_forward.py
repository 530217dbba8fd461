"""The fused forward of one decoder layer, which runs while a step of the whole model is under way."""

from collections.abc import Sequence
from typing import Any

import torch
from accel_kernels.warmup import warming_up
from torch import nn

from accel.fusion.stacked_linears import can_stack
from accel.libraries.adapters import base
from accel.libraries.cache import Cache
from accel.llm.attention.attention import AttentionSpec, BoundAttention
from accel.llm.parts.linear import weights
from accel.llm.parts.part import NormedInput
from accel.llm.parts.step import ForwardContext, Step
from accel.llm.parts.written_weight import WrittenWeight
from accel.llm.recording.record import NotUnderstood
from accel.llm.runtime.layer import BoundLayer
from accel.llm.runtime.layer_spec import LayerSpec
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.guard import LayerGuard, changed_since
from accel.quantization.module import QuantizedLinear


class LayerForward(FastForward):
    """Computes its layer while a step is under way on this thread; outside of one the stock forward runs.

    Whether it may is asked for all layers before a forward, in `obstacle`: half a forward cannot fall back.
    """

    bound: Any  # a BoundLayer
    repeats = False  # another layer launches the same kernels, so that a dry run skips this one
    made_up = True  # masks that it is given; else its own code may look at them
    written: Sequence[WrittenWeight] = ()  # of its attentions, once they are bound

    def __init__(self, module: nn.Module, *place: Any, spec: LayerSpec, steps: ForwardContext) -> None:
        super().__init__(module, *place)
        self.spec, self.steps = spec, steps
        acting = [] if spec.mlp is None else [pair for one in spec.mlp.blocks for pair in one.settings]
        acting += [] if spec.tail is None else spec.tail.settings
        looked_at = (*(norm.name for norm in spec.norms), *(name for name, _ in acting))
        live = spec.called
        parts = zip(spec.attention.mixers, spec.around, strict=True) if spec.attention and spec.around else ()
        self.inner = [
            InnerAttention(
                module.get_submodule(one.name),
                f"{self.path}.{one.name}",
                self.kernels,
                self.log,
                spec=one,
                rest=behind.rest,
                steps=steps,
            )
            for one, behind in parts
        ]
        if self.inner:
            names = [one.spec.name for one in self.inner]
            every = (name for name, _ in module.named_modules() if name)
            live = (*live, *(one for one in every if not any(_within(one, n) or _within(n, one) for n in names)))
        self.layer_guard = LayerGuard(module, live, looked_at)

    def own_modules(self) -> list[tuple[str, nn.Module]]:
        """The modules inside by name, but for those of an attention that runs stock."""
        attention = self.spec.attention.name if self.spec.attention and self.spec.runs_stock else None
        every = ((name, one) for name, one in self.module.named_modules() if name)
        return [(name, one) for name, one in every if attention is None or not _within(name, attention)]

    def answered_layers(self) -> tuple:
        """Its linears that run their own forward."""
        linears = map(self.module.get_submodule, self.spec.called)
        return tuple(one for one in linears if isinstance(base(one), nn.Linear) and weights(one) is None)

    def stacks(self, names: Sequence[str] | None = None) -> list[nn.Linear]:
        """The projections of queries, keys and values whose weights one product takes, under adapters: all or none.

        names: of others.
        """
        if names is None:
            names = self.spec.attention.projections if self.spec.attention else ()
        modules = [base(self.module.get_submodule(name)) for name in names]
        known = [(module, weights(module)) for module in modules if type(module) in (nn.Linear, QuantizedLinear)]
        linears = [module for module, found in known if found is not None and not found.in_blocks]
        if not len(linears) == len(modules) > 1:
            return []
        alike = linears[0].bias is None  # else zeros stand for a missing one
        return linears if all(can_stack(linears[0], one, biases=alike) for one in linears) else []

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("bound", "written")}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        step = None if torch.compiler.is_compiling() else self.steps.current
        if step is None:
            return self.stock(*args, **kwargs)
        named = dict(zip(self.names[1:], args[1:], strict=False)) | kwargs
        if step.runs_stock(self, args[:1], named):
            return self.stock(*args, **kwargs)
        return self.fast(step, *args[:1], **named)

    def bind(self, stack: bool) -> str | None:
        """Takes the weights as they lie now, or says why the layer is no longer what was understood.

        stack: those of queries, keys and values may be moved into one storage, should they not be there.
        """
        reason = self._changed()
        if reason is None:
            try:
                for one in self.inner:
                    one.bind(self.module, stack)
                self.bound = self._own_code if self.inner else BoundLayer(self.kernels, self.module, self.spec, stack)
                self._follow()
            except (NotUnderstood, AttributeError) as error:  # or a module is gone
                reason = str(error)
        return None if reason is None else f"{self.path}: {reason}"

    def _follow(self) -> None:
        """Finds the weights that its attentions have written out; each lies where it lay before."""
        bound = [one.bound for one in self.inner] or [self.bound.attention]
        mixers = (mixer for one in bound for mixer in getattr(one, "both", (one,)))
        before = self.written
        held = (getattr(one, "written", None) for one in mixers)
        self.written = [one for one in held if one is not None]
        for one, other in zip(self.written, before, strict=False):
            one.follow(other)

    def renew(self) -> None:
        """What is written out holds what was changed in place since."""
        for one in self.written:
            one.renew()

    def _changed(self) -> str | None:
        if vars(self.module).get("forward") is not self:
            return changed_since("its forward")
        if any(vars(one.module).get("forward") is not one for one in self.inner):
            return changed_since("the forward of its attention")
        return self.layer_guard.changed(self.module)

    def fast(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.pop("hidden_states")
        y = step.of_layer(self, x, kwargs)
        if self.spec.returns is None:
            return y
        behind, step.behind = step.behind, None
        return (y, *(behind or (None,) * (self.spec.returns - 1)))

    def computed(self, step: Step, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """What it gives, (rows, new, C), in this step."""
        return x if self.repeats and warming_up() else self.bound(self.kernels, step, x.contiguous(), kwargs)

    def _own_code(self, kernels: Kernels, step: Step, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """What the layer's own code makes of its input, around fused attention."""
        masks = {name for name, one in kwargs.items() if self.made_up and "mask" in name and one is not None}
        hidden = [name for name, one in kwargs.items() if isinstance(one, Cache) or name in masks]
        step.around = kwargs
        try:
            y = self.stock(x, **kwargs | dict.fromkeys(hidden, Unseen()))
        finally:
            step.around = None
        return y[0] if isinstance(y, tuple) else y


class Unseen:
    """Stands for a cache or mask in a layer's own code, where both are made up: NotUnderstood if looked at."""

    def _refuse(self, *args: Any) -> Any:
        raise NotUnderstood("its layers look at the cache or a mask beside their attention")

    __getattr__ = __getitem__ = __len__ = __bool__ = __iter__ = _refuse


class InnerAttention(FastForward):
    """Of an attention of a layer whose own code runs around it: does its work while that layer runs in a step.

    rest: what its module gives behind its output, as of `Behind`.
    """

    spec: AttentionSpec
    rest: tuple[str, ...] | None
    steps: ForwardContext
    bound: BoundAttention
    out: Any

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("bound", "out")}

    def bind(self, layer: nn.Module, stack: bool) -> None:
        """Takes the weights as they lie now. stack: as of `LayerForward`."""
        self.bound, self.out = self.spec.bind(self.kernels, layer, stack), self.spec.bind_out(layer)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        step = None if torch.compiler.is_compiling() else self.steps.current
        if step is None or step.around is None:
            return self.stock(*args, **kwargs)
        x = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)).contiguous()
        attended = self.bound(self.kernels, step, NormedInput(step.to_tokens(x)), step.around)
        y = step.to_rows(self.out(self.kernels, NormedInput(attended)))
        if self.rest is None:
            return y
        return (y, *(getattr(self.module, name) if name else None for name in self.rest))

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        """Not asked: see `call`."""
        return self.call(*args, **kwargs)


def _within(name: str, other: str) -> bool:
    """Whether a module's name is another's, or of one inside of it."""
    return f"{name}.".startswith(f"{other}.")
