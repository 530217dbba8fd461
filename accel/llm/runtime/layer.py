"""One decoder layer: how it is put together, found by comparing with a record, and a few fused operations for it."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from accel.comparison import factor, held_floats, is_plain_sum, is_sum, named_factor
from accel.llm.attention.attention import UnderstoodAttention
from accel.llm.attention.kinds import understand_attention
from accel.llm.attention.mixer_pair import each_alone, joined, understand_pair
from accel.llm.attention.stock.stock_attention import stock_attentions
from accel.llm.parts.norm import NormSpec, norm_spec, normlike
from accel.llm.parts.part import BoundNorm, Branch, NormedInput
from accel.llm.parts.residual import Widths, narrowed_to, reads_wide, rounded
from accel.llm.parts.step import Step
from accel.llm.parts.tail import BoundTail, TailSpec, tails
from accel.llm.recording.record import Call, LayerRecord, NotUnderstood, Record, Value, form, is_absent
from accel.llm.runtime.layer_spec import Behind, LayerSpec
from accel.llm.runtime.mlp import bound_mlp
from accel.llm.runtime.mlp_formula import understand_mlp
from accel.patching.fast_forward import Kernels
from accel.patching.guard import plain_settings

Factors = tuple[float, float]  # of what goes on, and of what is added to it


def understand_layer(layer: LayerRecord, record: Record) -> LayerSpec:
    """The formula of a recorded layer. Raises NotUnderstood."""
    if layer.call.made is None:
        raise NotUnderstood("it did not run")
    found = [understand_attention(one, record) for one in each_alone(layer)]
    reason = ""
    for tail, y, calls in tails(layer):
        try:
            if layer.known is None or (tail == layer.known.tail and not layer.known.around):
                return put_together(layer, found, tail, y, calls)
        except NotUnderstood as error:
            reason = str(error)
    if (spec := own_code_around(layer, found)) is None:
        raise NotUnderstood(reason)
    return spec


def own_code_around(layer: LayerRecord, found: list[UnderstoodAttention]) -> LayerSpec | None:
    """The formula of a layer whose own code runs around these attentions; None where their modules do more."""
    pairs = zip(layer.mixers, found, strict=True)
    around = tuple(one for module, mixer in pairs if (one := _behind(layer, module, mixer)) is not None)
    if not found or len(around) < len(found):
        return None
    return LayerSpec(
        **_own(layer),
        attention=joined([one.spec for one in found]) if len(found) > 1 else found[0].spec,
        widths=Widths(found[-1].last.output.held.dtype, layer.call.output.held.dtype),
        around=around,
    )


def understand_around(layer: LayerRecord, reason: str) -> LayerSpec | None:
    """The formula of a layer around an attention that is not understood for this reason; None where neither is."""
    for alone, attention in stock_attentions(layer, reason):
        inside = set(attention.first.module.modules())
        gated = [call for call in layer.inside(layer.layer) if call.module not in inside and _gated(layer, call)]
        for tail, y, calls in tails(alone):
            if layer.known is None or tail == layer.known.tail:
                with suppress(NotUnderstood):
                    return put_together(alone, [attention], tail, y, calls, gated)
    return None


def _gated(layer: LayerRecord, call: Call) -> bool:
    """Whether a call may be of a norm with a gate of its own, which is called as it is."""
    if not call.alone or call.made is None or call.output.held.shape != call.input.held.shape:
        return False
    return any(normlike(layer, one) and one.input.same(call.input) for one in layer.inside(call.module))


def _own(layer: LayerRecord) -> dict[str, Any]:
    """What a spec says of the layer itself and of its call."""
    result = layer.call.result
    return {
        "settings": plain_settings(layer.layer),
        "returns": len(result) if isinstance(result, tuple) else None,
        "given": frozenset((name, form(value)) for name, value in layer.call.named.items() if not is_absent(value)),
    }


def _behind(layer: LayerRecord, module: nn.Module, mixer: UnderstoodAttention) -> Behind | None:
    """What the module of an attention gives behind its output; None where it does more than the attention."""
    calls, own = [call for call in layer.calls if call.module is module], {**module._parameters, **module._buffers}
    call = calls[0]
    if len(calls) != 1 or call.made is None:
        return None
    if not mixer.first.input.same(call.taken) or not mixer.last.output.same(call.made):
        return None
    if isinstance(call.result, torch.Tensor):
        return Behind(None)
    if not isinstance(call.result, tuple) or call.result[0] is not call.made.tensor:
        return None
    return Behind(tuple(next((n for n, one in own.items() if one is value), "") for value in call.result[1:]))


def put_together(
    layer: LayerRecord,
    found: list[UnderstoodAttention],
    tail: TailSpec | None,
    y: Value,
    tail_calls: list[Call],
    gated: Sequence[Call] = (),
) -> LayerSpec:
    """The formula of a layer with these attentions and tail, y being the sum before the tail. gated: calls that may be
    of norms too. Raises NotUnderstood.
    """
    mixer = understand_pair(layer, found) if len(found) > 1 else next(iter(found), None)
    mlp, mlp_calls = understand_mlp(layer, [*tail_calls, *gated])
    x, known = layer.call.input, layer.known
    mlp_modules = [call.module for call in mlp_calls]
    holders = (layer.layer, *layer.mixers, *mlp_modules)
    within = {one for module in mlp_modules for one in module.modules()} | {call.module for call in tail_calls}
    inside = {one for module in layer.mixers for one in module.modules()}
    others, last_of_mixer = set(map(id, gated)), None if mixer is None else mixer.last
    norms: list[Call] = []
    for call in layer.calls:
        if call is last_of_mixer:
            inside = set()  # ALBERT's attention has the norm of the sum behind it
        if call.module not in within | inside and (normlike(layer, call) or id(call) in others):
            norms.append(call)

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
        if not base.numel() == branch.numel() == total.numel():
            return None
        base, branch = base.reshape(total.shape), branch.reshape(total.shape)
        if known is not None and is_sum(base, branch, known.scales[place], total):
            return known.scales[place]  # of a branch that rounding hides, any number would do
        if is_plain_sum(base, branch, total):
            return 1.0
        size = total.double().norm(dim=-1, keepdim=True).clamp_min(1e-30)  # no token counts more than another
        found = factor(branch / size, (total.double() - base.double()) / size)
        named = named_factor(found, total.dtype, holders)
        if named == 1.0:  # which it is not, though it is as close as numbers of its dtype are
            return next((one for one in held_floats(holders) if is_plain_sum(base, branch * one, total)), None)
        return named if named is not None and is_sum(base, branch, named, total) else None

    def weighed(base: torch.Tensor, branch: torch.Tensor, total: torch.Tensor, place: int) -> Factors | None:
        """The numbers r and s, each as of `scale`, with total = r * base + s * branch, and not without the base."""
        if known is not None:
            found = scale(_times(known.bases[place], base), branch, total, place)
            return None if found is None else (known.bases[place], found)
        for one in (1.0, *held_floats(holders)):
            found = scale(_times(one, base), branch, total, place)
            if found is not None and (one == 1.0 or scale(0.0 * base, branch, total, place) is None):
                return one, found
        return None

    def off(base: Value, branch: torch.Tensor, by: Factors) -> float:
        """How far a sum is from that before the tail."""
        terms = (by[0] * base.held.double(), by[1] * branch.double())
        return float((total.double() - sum(one.reshape(total.shape) for one in terms)).norm())

    def gain(base: Value, branch: torch.Tensor, total: torch.Tensor) -> tuple[NormSpec | None, torch.Tensor]:
        """The parameter of the layer's own that its code multiplies a branch by, and the product; None where it is not.

        It is asked first: one that is ones today may be no more.
        """
        own = [(name, one) for name, one in layer.layer._parameters.items() if one is not None and one.dim() == 1]
        fit = [
            (name, branch * one) for name, one in own
            if one.shape == branch.shape[-1:] and scale(base.held, branch * one, total, 0) == 1.0
        ]  # fmt: skip
        if len(fit) > 1:
            raise NotUnderstood("its layer scales hold the same numbers")
        return (NormSpec("", None, (), fit[0][0]), fit[0][1]) if fit else (None, branch)

    def before(part: Call, name: str) -> Call | None:
        """The norm before the first part, of the layer's input; None where the part is given that itself."""
        made = producer(part.input)
        if made is None and not part.input.same(x):
            raise NotUnderstood(f"the {name}'s input is not the layer's, nor a norm of it")
        if made is not None and not (made.input.same(x) or rounded(made.input, x)):
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

    before_attention = after_attention = post_attention = before_mlp = post_mlp = after_mlp = entering = None
    gains: list[NormSpec | None] = [None, None]
    parallel = shared = False
    first: Factors | None = (1.0, 1.0)
    second: Factors | None = (1.0, 1.0)
    if mixer is None:
        begin, end = mlp_calls[:2]
        before_mlp, (post_mlp, last) = before(begin, "MLP"), after(end)
        after_mlp, total = ending(post_mlp)
        second = weighed(x.held, last, total, 1)
    elif mlp is None:
        before_attention, (post_attention, branch) = before(mixer.first, "attention"), after(mixer.last)
        after_attention, total = ending(post_attention)
        first = weighed(x.held, branch, total, 0)
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
            first = second = None if (one := scale(x.held, both, total, 0)) is None else (1.0, one)
        else:
            # Where numbers are large, rounding may hide what a branch is added to.
            if post_attention is None:
                gains[0], branch = gain(x, branch, start.held)
            if post_mlp is None:
                gains[1], last = gain(start, last, total)
            enters, goes_on = (known is not None and known.entering, known is not None and known.after_attention)
            first = None if enters else weighed(x.held, branch, start.held, 0)
            if first is None and before_attention is not None:  # a norm of the input that goes on as the input
                before_attention, entering = None, before_attention
                first = weighed(mixer.first.input.held, branch, start.held, 0)
            second = None if goes_on else weighed(start.held, last, total, 1)
            other = None if known is not None or before_mlp is None else weighed(begin.input.held, last, total, 1)
            if second is not None and other is not None:  # a norm of what is one already changes little
                second = min((off(begin.input, last, other), None), (off(start, last, second), second))[1]
            if second is None and before_mlp is not None:  # a norm of the sum that the sum goes on as
                before_mlp, after_attention = None, before_mlp
                second = weighed(begin.input.held, last, total, 1)
    if first is None:
        raise NotUnderstood("what follows the attention is not the sum of it and the layer's input")
    if second is None:
        parts = "an MLP, and it stores no keys and values" if mixer is None else "attention and MLP"
        raise NotUnderstood(f"its output is not the sum of its input, {parts}")
    return LayerSpec(
        **_own(layer),
        attention=None if mixer is None else mixer.spec,
        mlp=mlp,
        entering=norm(entering),
        before_attention=norm(before_attention),
        post_attention=norm(post_attention) or gains[0],
        after_attention=norm(after_attention),
        before_mlp=norm(before_mlp),
        post_mlp=norm(post_mlp) or gains[1],
        after_mlp=norm(after_mlp),
        tail=tail,
        parallel=parallel,
        shared=shared,
        scales=(first[1], second[1]),
        bases=(first[0], second[0]),
        widths=Widths((mixer.last if mixer is not None else mlp_calls[1]).output.held.dtype, y.held.dtype),
    )


class BoundLayer:
    """A layer's operations with the tensors they read."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: LayerSpec, stack: bool) -> None:
        self.spec = spec

        def norm(one: NormSpec | None) -> BoundNorm | None:
            return None if one is None else BoundNorm(kernels, layer, one)

        self.entering = norm(spec.entering)
        self.before_attention, self.before_mlp = norm(spec.before_attention), norm(spec.before_mlp)
        self.post_attention, self.post_mlp = norm(spec.post_attention), norm(spec.post_mlp)
        self.after_attention, self.after_mlp = norm(spec.after_attention), norm(spec.after_mlp)
        self.attention = None if spec.attention is None else spec.attention.bind(kernels, layer, stack)
        self.out = None if spec.attention is None else spec.attention.bind_out(layer)
        self.mlp = None if spec.mlp is None else bound_mlp(kernels, layer, spec.mlp)
        one_branch = self.attention is None or self.mlp is None
        self.narrow = narrowed_to(spec.widths, layer, spec.before_attention or spec.before_mlp, one_branch)
        self.reads_wide = reads_wide(kernels, self.before_attention, self.attention)
        tail = None if spec.tail is None else BoundTail(kernels, layer, spec.tail)
        in_sum = tail is not None and not tail.linears and self.mlp is not None and self.after_mlp is None
        self.tail = None if in_sum else tail
        self.factor = tail.factor if in_sum and tail is not None else None  # of the last sum

    def __call__(self, kernels: Kernels, step: Step, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """x: (rows, new, C). kwargs: what the layer was called with."""
        y = self._sum(kernels, step, x, kwargs)
        return y if self.tail is None else self.tail(kernels, y, kwargs)

    def _sum(self, kernels: Kernels, step: Step, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        spec, (first, second), h, normed = self.spec, self.spec.scales, None, None
        x = x if self.entering is None else self.entering(x)
        middle = x
        if self.narrow is not None:
            middle = x.to(spec.widths.total)
            x = x if self.reads_wide and x.shape[:2].numel() == 1 else x.to(self.narrow)
        if self.attention is not None and self.out is not None:
            h = NormedInput(x, self.before_attention, len(self.attention.projections) + spec.shared)
            attended = NormedInput(self.attention(kernels, step, h, kwargs))
            branch = Branch(self.out, attended, _times(spec.bases[0], middle), first, self.post_attention)
            if self.after_attention is not None:
                middle = branch.normed(kernels, self.after_attention)
            else:
                apart = spec.parallel or spec.shared or self.mlp is None
                middle, normed = branch.summed(kernels, None if apart else self.before_mlp)
        if self.mlp is None:
            return middle
        if h is None or not spec.shared:
            x = x if spec.parallel or spec.attention is None else middle
            h = NormedInput(x, self.before_mlp, self.mlp.times) if normed is None else NormedInput(normed)
        made = normed is not None  # the sum is this layer's own
        last = Branch(self.mlp, h, _times(spec.bases[1], middle), second, self.post_mlp, made)
        return last.added(kernels, self.factor) if self.after_mlp is None else last.normed(kernels, self.after_mlp)


def _times(base: float, x: torch.Tensor) -> torch.Tensor:
    return x if base == 1.0 else base * x
