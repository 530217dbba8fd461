"""One decoder layer as a few fused operations over the store of the forward it is part of."""

from collections.abc import Callable
from typing import Any

import torch
from accel_kernels.warmup import warming_up
from torch import nn

from accel.fusion.stacked_linears import can_stack
from accel.llm.analysis.layer import LayerSpec
from accel.llm.analysis.norm import NormSpec
from accel.llm.runtime.attention_kinds import attention_kind_of
from accel.llm.runtime.linear import weights
from accel.llm.runtime.mlp import BoundMlp, Changed
from accel.llm.runtime.part import BoundLinear, BoundNorm, NormedInput
from accel.llm.runtime.step import ForwardContext, Step
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.guard import LayerGuard, changed_since


class LayerForward(FastForward):
    """Computes its layer while a step is under way on this thread; outside of one the stock forward runs.

    Whether it may is asked for all layers before a forward, in `obstacle`: half a forward cannot fall back.
    """

    bound: Callable[..., torch.Tensor]  # a BoundLayer
    repeats = False  # another layer launches the same kernels: a dry run leaves this one out

    def __init__(
        self,
        module: nn.Module,
        path: str,
        kernels: Kernels,
        log: FallbackLog,
        spec: LayerSpec,
        steps: ForwardContext,
    ) -> None:
        super().__init__(module, path, kernels, log)
        self.spec, self.steps = spec, steps
        called = spec.linears if spec.mlp.first else (*spec.linears, spec.mlp.whole)
        looked_at = (*(norm.name for norm in spec.norms), *(name for name, _ in spec.mlp.settings))
        self.layer_guard = LayerGuard(module, called, looked_at)

    def stacks(self) -> list[nn.Linear]:
        """The projections of queries, keys and values whose weights one product can take: all plain, or none."""
        modules = [self.module.get_submodule(name) for name in self.spec.attention.projections]
        linears = [module for module in modules if type(module) is nn.Linear and weights(module) is not None]
        together = len(linears) == len(modules) > 1 and all(can_stack(linears[0], linear) for linear in linears)
        return linears if together else []

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "bound"}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        step = None if torch.compiler.is_compiling() else self.steps.current
        if step is None or step.leaves(self, args, kwargs):
            return self.stock(*args, **kwargs)
        return self.fast(step, *args, **kwargs)

    def bind(self, stack: bool) -> str | None:
        """Takes the weights as they lie now, or says why the layer is no longer what was understood.

        stack: those of queries, keys and values may be moved into one storage, should they not be there.
        """
        reason = self._changed()
        if reason is None:
            try:
                self.bound = BoundLayer(self.kernels, self.module, self.spec, stack)
            except (Changed, AttributeError) as error:  # or a module is gone
                reason = str(error)
        return None if reason is None else f"{self.path}: {reason}"

    def _changed(self) -> str | None:
        if vars(self.module).get("forward") is not self:
            return changed_since("its forward")
        return self.layer_guard.changed(self.module)

    def fast(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        y = x if self.repeats and warming_up() else self.bound(self.kernels, step, x.contiguous(), kwargs)
        return y if self.spec.returns is None else (y, *(None,) * (self.spec.returns - 1))


class BoundLayer:
    """A layer's operations with the tensors they read."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: LayerSpec, stack: bool) -> None:
        self.spec = spec

        def norm(one: NormSpec | None) -> BoundNorm | None:
            return None if one is None else BoundNorm(kernels, layer, one)

        self.before_attention, self.before_mlp = norm(spec.before_attention), norm(spec.before_mlp)
        self.post_attention, self.post_mlp = norm(spec.post_attention), norm(spec.post_mlp)
        self.after_attention, self.after_mlp = norm(spec.after_attention), norm(spec.after_mlp)
        self.attention = attention_kind_of(spec.attention).bind(kernels, layer, spec.attention, stack)
        self.out = BoundLinear(layer.get_submodule(spec.attention.out))
        self.mlp = BoundMlp(layer, spec.mlp)

    def __call__(self, kernels: Kernels, step: Step, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """x: (rows, new, C). kwargs: what the layer was called with."""
        spec, (first, second) = self.spec, self.spec.scales
        h = NormedInput(x, self.before_attention, len(self.attention.projections) + spec.shared)
        attended = NormedInput(self.attention(kernels, step, h, kwargs))
        middle = _added(kernels, self.out, attended, x, first, self.post_attention)
        if self.after_attention is not None:
            middle = self.after_attention(middle)
        if not spec.shared:
            h = NormedInput(x if spec.parallel else middle, self.before_mlp, self.mlp.times)
        y = _added(kernels, self.mlp, h, middle, second, self.post_mlp)
        return y if self.after_mlp is None else self.after_mlp(y)


def _added(
    kernels: Kernels,
    part: BoundLinear | BoundMlp,
    h: NormedInput,
    residual: torch.Tensor,
    scale: float,
    post: BoundNorm | None,
) -> torch.Tensor:
    """residual + scale * post(part(h))."""
    if post is None:
        return part(kernels, h, residual=residual, scale=scale)
    return torch.add(residual, post(part(kernels, h)), alpha=scale)
