"""One decoder layer: how it is put together, found by comparing with a record, and a few fused operations for it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from accel_kernels.warmup import warming_up
from torch import nn

from accel.comparison import factor, is_sum, named_factor
from accel.fusion.stacked_linears import can_stack
from accel.llm.parts.linear import weights
from accel.llm.parts.norm import NormSpec, norm_spec, normlike
from accel.llm.parts.part import BoundLinear, BoundNorm, NormedInput
from accel.llm.parts.step import ForwardContext, Step
from accel.llm.recording.record import Call, LayerRecord, NotUnderstood, Record, Value, form, is_absent
from accel.llm.runtime.attention import AttentionSpec, UnderstoodAttention
from accel.llm.runtime.gated_attention import GatedSpec, QueryGatedSpec
from accel.llm.runtime.linear_attention import LinearSpec
from accel.llm.runtime.mixer_pair import understand_pair
from accel.llm.runtime.mlp import BoundMlp, MlpSpec, understand_mlp
from accel.llm.runtime.softmax_attention import SoftmaxSpec
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.guard import LayerGuard, changed_since, plain_settings

# Tried in turn.
ATTENTION_KINDS: tuple[type[AttentionSpec], ...] = (LinearSpec, SoftmaxSpec, GatedSpec, QueryGatedSpec)


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer, on input x:

        a = post_attention(attention(before_attention(x)))       each norm left out where it is None
        s = x + scales[0] * a, through after_attention           s = x where there is no attention
        m = post_mlp(mlp(before_mlp(s, or x where `parallel`)))
        y = s + scales[1] * m, through after_mlp                 y = s where there is no MLP

    shared: attention and MLP get the output of the one norm `before_attention`. returns: how many things the layer's
    forward gives back as a tuple, y first; None for y alone. settings: of the layer itself. given: the
    keywords that carry a value when the model reads plain text, each with the `form` of that value. framed: the layer's
    own code runs, and only attention is known; how many things the module of each returns, 0 for a tensor alone.
    """

    settings: tuple
    attention: AttentionSpec | None
    mlp: MlpSpec | None
    before_attention: NormSpec | None
    post_attention: NormSpec | None
    after_attention: NormSpec | None
    before_mlp: NormSpec | None
    post_mlp: NormSpec | None
    after_mlp: NormSpec | None
    parallel: bool
    shared: bool
    scales: tuple[float, float]
    returns: int | None
    given: frozenset[tuple[str, object]]
    framed: tuple[int, ...] = ()

    @property
    def place(self) -> int | None:
        """In the cache; None for a layer that keeps nothing there."""
        return None if self.attention is None else self.attention.index

    @property
    def places(self) -> tuple[int, ...]:
        """All that it has in a store, see `KeptState`."""
        return () if self.attention is None else tuple(part.index for part in self.attention.mixers)

    @property
    def window(self) -> int | None:
        """How many tokens back it sees; None for all, or where that does not matter."""
        return None if self.attention is None else self.attention.window

    @property
    def has_position_bias(self) -> bool:
        return self.attention is not None and self.attention.has_position_bias

    @property
    def keeps_state(self) -> bool:
        return self.attention is not None and self.attention.keeps_state

    @property
    def norms(self) -> list[NormSpec]:
        """All there are, those inside the attention too."""
        around = (self.before_attention, self.post_attention, self.after_attention)
        mine = (*around, self.before_mlp, self.post_mlp, self.after_mlp)
        inside = () if self.attention is None else self.attention.norms
        return [norm for norm in (*mine, *inside) if norm is not None]

    @property
    def called(self) -> tuple[str, ...]:
        """The names of all linears, and of an MLP that is called as a whole."""
        attention, mlp = self.attention, self.mlp
        mixer = () if attention is None else attention.linears
        if mlp is None:
            return mixer
        return (*mixer, *mlp.first, mlp.down) if mlp.first else (*mixer, mlp.whole)


def understand_layer(layer: LayerRecord, record: Record) -> LayerSpec:
    """The formula of a recorded layer. Raises NotUnderstood."""
    if layer.call.made is None:
        raise NotUnderstood("it did not run")
    mixer = understand_attention(layer, record) if layer.mixes else None
    mlp, mlp_calls = understand_mlp(layer)
    x, y = layer.call.input, layer.call.output
    mlp_modules = [call.module for call in mlp_calls]
    holders = (layer.layer, *layer.mixers, *mlp_modules)
    norms = [call for call in layer.inside(layer.layer) if call.module not in mlp_modules and normlike(call)]

    def producer(value: Value) -> Call | None:
        """The last norm that made this."""
        return next((call for call in reversed(norms) if call.output.same(value)), None)

    def consumer(value: Value) -> Call | None:
        """The norm that was given this."""
        return next((call for call in norms if call.input.same(value)), None)

    def norm(call: Call | None) -> NormSpec | None:
        return None if call is None else norm_spec(layer, call)

    def scale(base: torch.Tensor, branch: torch.Tensor, total: torch.Tensor, place: int) -> float | None:
        """The number s, held by the layer or 1, with total = base + s * branch; `place`: of s among the scales."""
        base, branch = base.reshape(total.shape), branch.reshape(total.shape)
        known = layer.known
        if known is not None and is_sum(base, branch, known.scales[place], total):
            return known.scales[place]  # of a branch that rounding hides, any number would do
        if is_sum(base, branch, 1.0, total):
            return 1.0
        size = total.double().norm(dim=-1, keepdim=True).clamp_min(1e-30)  # no token counts more than another
        found = factor(branch / size, (total.double() - base.double()) / size)
        named = named_factor(found, total.dtype, holders)
        return named if named is not None and is_sum(base, branch, named, total) else None

    def before(part: Call, name: str) -> Call | None:
        """The norm before the first part, of the layer's input; None where the part is given that itself."""
        made = producer(part.input)
        if made is None and not part.input.same(x):
            raise NotUnderstood(f"the {name}'s input is not the layer's, nor a norm of it")
        if made is not None and not made.input.same(x):
            raise NotUnderstood(f"the norm before the {name} is not of the layer's input")
        return made

    def after(part: Call) -> tuple[Call | None, torch.Tensor]:
        """The norm of a part's output, and what is added."""
        made = consumer(part.output)
        return made, (part if made is None else made).output.held

    def ending(post: Call | None) -> tuple[Call | None, torch.Tensor]:
        """The norm of the last sum, and that sum. post: the norm of what was added to it."""
        made = producer(y)
        return (None, y.held) if made is None or made is post else (made, made.input.held)

    before_attention = after_attention = post_attention = before_mlp = post_mlp = after_mlp = None
    parallel = shared = False
    first_scale: float | None = 1.0
    second_scale: float | None = 1.0
    if mixer is None:
        begin, end = mlp_calls[:2]
        before_mlp, (post_mlp, last) = before(begin, "MLP"), after(end)
        after_mlp, total = ending(post_mlp)
        second_scale = scale(x.held, last, total, 1)
    elif mlp is None:
        before_attention, (post_attention, branch) = before(mixer.first, "attention"), after(mixer.last)
        after_attention, total = ending(post_attention)
        first_scale = scale(x.held, branch, total, 0)
    else:
        begin, end = mlp_calls[:2]
        before_attention, (post_attention, branch) = before(mixer.first, "attention"), after(mixer.last)
        post_mlp, last = after(end)
        after_mlp, total = ending(post_mlp)
        shared = begin.input.same(mixer.first.input)
        before_mlp = None if shared else producer(begin.input)
        start = begin.input if before_mlp is None else before_mlp.input
        parallel = shared or start.same(x)
        if parallel:
            both = branch.reshape(x.held.shape).double() + last.reshape(x.held.shape)
            first_scale = second_scale = scale(x.held, both, total, 0)
        else:
            first_scale = scale(x.held, branch, start.held, 0)
            second_scale = scale(start.held, last, total, 1)
            if second_scale is None and before_mlp is not None:  # a norm of the sum that the sum goes on as
                before_mlp, after_attention = None, before_mlp
                second_scale = scale(begin.input.held, last, total, 1)
    if first_scale is None:
        raise NotUnderstood("what follows the attention is not the sum of it and the layer's input")
    if second_scale is None:
        parts = "an MLP, and it stores no keys and values" if mixer is None else "attention and MLP"
        raise NotUnderstood(f"its output is not the sum of its input, {parts}")
    result = layer.call.result
    return LayerSpec(
        plain_settings(layer.layer),
        None if mixer is None else mixer.spec,
        mlp,
        before_attention=norm(before_attention),
        post_attention=norm(post_attention),
        after_attention=norm(after_attention),
        before_mlp=norm(before_mlp),
        post_mlp=norm(post_mlp),
        after_mlp=norm(after_mlp),
        parallel=parallel,
        shared=shared,
        scales=(first_scale, second_scale),
        returns=len(result) if isinstance(result, tuple) else None,
        given=frozenset((name, form(v)) for name, v in layer.call.kwargs.items() if not is_absent(v)),
    )


def understand_attention(layer: LayerRecord, record: Record) -> UnderstoodAttention:
    """By the first kind that knows it. Raises NotUnderstood, with the reason of the first kind that has one."""
    if len(layer.mixers) > 1:
        return understand_pair(layer, record, understand_attention)
    reasons = []
    for kind in ATTENTION_KINDS if layer.known is None else (type(layer.known.attention),):
        try:
            found = kind.understand(layer, record)
        except NotUnderstood as reason:
            reasons.append(str(reason))  # an error kept here would keep this frame, and with it the model
        else:
            if found is not None:
                return found
    raise NotUnderstood(reasons[0] if reasons else "its attention is of no kind that is known")


class LayerForward(FastForward):
    """Computes its layer while a step is under way on this thread; outside of one the stock forward runs.

    Whether it may is asked for all layers before a forward, in `obstacle`: half a forward cannot fall back.
    """

    bound: Callable[..., torch.Tensor]  # a BoundLayer
    repeats = False  # another layer launches the same kernels, so that a dry run skips this one

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
        of_mlp = () if spec.mlp is None else spec.mlp.settings
        looked_at = (*(norm.name for norm in spec.norms), *(name for name, _ in of_mlp))
        self.layer_guard = LayerGuard(module, spec.called, looked_at)

    def stacks(self) -> list[nn.Linear]:
        """The projections of queries, keys and values whose weights one product can take: all plain, or none."""
        attention = self.spec.attention
        modules = [self.module.get_submodule(name) for name in (attention.projections if attention else ())]
        linears = [module for module in modules if type(module) is nn.Linear and weights(module) is not None]
        together = len(linears) == len(modules) > 1 and all(can_stack(linears[0], linear) for linear in linears)
        return linears if together else []

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "bound"}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        step = None if torch.compiler.is_compiling() else self.steps.current
        if step is None or step.runs_stock(self, args, kwargs):
            return self.stock(*args, **kwargs)
        return self.fast(step, *args, **kwargs)

    def bind(self, stack: bool) -> str | None:
        """Takes the weights as they lie now, or says why the layer is no longer what was understood.

        stack: those of queries, keys and values may be moved into one storage, should they not be there.
        """
        reason = self._changed()
        if reason is None:
            try:
                self.take(stack)
            except (NotUnderstood, AttributeError) as error:  # or a module is gone
                reason = str(error)
        return None if reason is None else f"{self.path}: {reason}"

    @property
    def inner(self) -> Iterable[FastForward]:
        """Forwards of modules inside, which are patched with it."""
        return ()

    def take(self, stack: bool) -> None:
        """As `bind`, of a layer that is as it was."""
        self.bound = BoundLayer(self.kernels, self.module, self.spec, stack)

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
        self.attention = None if spec.attention is None else spec.attention.bind(kernels, layer, stack)
        self.out = None if spec.attention is None else spec.attention.bind_out(layer)
        self.mlp = None if spec.mlp is None else BoundMlp(layer, spec.mlp)

    def __call__(self, kernels: Kernels, step: Step, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """x: (rows, new, C). kwargs: what the layer was called with."""
        spec, (first, second), middle, h = self.spec, self.spec.scales, x, None
        if self.attention is not None and self.out is not None:
            h = NormedInput(x, self.before_attention, len(self.attention.projections) + spec.shared)
            attended = NormedInput(self.attention(kernels, step, h, kwargs))
            middle = _added(kernels, self.out, attended, x, first, self.post_attention)
            if self.after_attention is not None:
                middle = self.after_attention(middle)
        if self.mlp is None:
            return middle
        if h is None or not spec.shared:
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
