"""How one decoder layer is put together: norms, residuals and their order, found by comparing with a recorded run."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from accel.comparison import factor, is_sum, named_factor
from accel.llm.analysis.attention_kind import AttentionKind, AttentionSpec, understand_attention
from accel.llm.analysis.mlp import MlpCalls, MlpSpec, understand_mlp
from accel.llm.analysis.norm import NormSpec, norm_spec
from accel.llm.recording.record import Call, LayerRecord, NotUnderstood, Record, Value, says_nothing
from accel.patching.guard import plain_settings
from accel.quantization.experts import holds_numbers


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer, on input x:

        a = post_attention(attention(before_attention(x)))       each norm left out where it is None
        s = x + scales[0] * a, through after_attention
        m = post_mlp(mlp(before_mlp(s, or x where `parallel`)))
        y = s + scales[1] * m, through after_mlp

    shared: attention and MLP get the output of the one norm `before_attention`. returns: how many things the layer's
    forward gives back as a tuple, y first; None for y alone. settings: of the layer itself, see `settings`. given: by
    which keywords it is told something in a text, and in what form.
    """

    settings: tuple
    attention: AttentionSpec
    mlp: MlpSpec
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

    @property
    def norms(self) -> list[NormSpec]:
        """All there are, those inside the attention too."""
        around = (self.before_attention, self.post_attention, self.after_attention)
        mine = (*around, self.before_mlp, self.post_mlp, self.after_mlp)
        return [norm for norm in (*mine, *self.attention.norms) if norm is not None]

    @property
    def linears(self) -> tuple[str, ...]:
        """The names of all."""
        down = (self.mlp.down,) if self.mlp.down else ()
        return (*self.attention.projections, self.attention.out, *self.mlp.first, *down)


def understand_layer(layer: LayerRecord, record: Record, kinds: Sequence[AttentionKind]) -> LayerSpec:
    """The formula of a recorded layer; its attention is one of these kinds. Raises NotUnderstood."""
    if layer.call.made is None:
        raise NotUnderstood("it did not run")
    attention, first, out = understand_attention(layer, record, kinds)
    mlp, ends = understand_mlp(layer)
    return _Skeleton(layer, attention, mlp, ends).solve(first.input, out.output, ends.first, ends.last.output)


class _Skeleton:
    def __init__(self, layer: LayerRecord, attention: AttentionSpec, mlp: MlpSpec, ends: MlpCalls):
        self.layer, self.attention, self.mlp = layer, attention, mlp
        calls = (call for call in layer.inside(layer.layer) if call.module not in ends.modules)
        self.norms = [call for call in calls if _normlike(call)]
        self.holders = (layer.layer, layer.attention, *ends.modules)

    def solve(self, h: Value, a: Value, mlp_first: Call, m: Value) -> LayerSpec:
        x, y = self.layer.call.input, self.layer.call.output
        before_attention = self._producer(h)
        if before_attention is None and not h.same(x):
            raise NotUnderstood("the attention's input is not the layer's, nor a norm of it")
        if before_attention is not None and not before_attention.input.same(x):
            raise NotUnderstood("the norm before the attention is not of the layer's input")
        post_attention = self._consumer(a)
        branch = a.held if post_attention is None else post_attention.output.held

        post_mlp = self._consumer(m)
        last = m.held if post_mlp is None else post_mlp.output.held
        after_mlp = self._producer(y)
        after_mlp = None if after_mlp is post_mlp else after_mlp
        total = y.held if after_mlp is None else after_mlp.input.held
        shared = mlp_first.input.same(h)
        before_mlp = None if shared else self._producer(mlp_first.input)
        after_attention = None
        start = mlp_first.input if before_mlp is None else before_mlp.input
        parallel = shared or start.same(x)
        if parallel:
            both = branch.reshape(x.held.shape).double() + last.reshape(x.held.shape)
            first = second = self._scale(x.held, both, total, 0)
        else:
            first = self._scale(x.held, branch, start.held, 0)
            second = self._scale(start.held, last, total, 1)
            if second is None and before_mlp is not None:  # a norm of the sum that the sum goes on as
                before_mlp, after_attention = None, before_mlp
                second = self._scale(mlp_first.input.held, last, total, 1)
        if first is None:
            raise NotUnderstood("what follows the attention is not the sum of it and the layer's input")
        if second is None:
            raise NotUnderstood("its output is not the sum of its input, attention and MLP")
        result = self.layer.call.result
        returns = len(result) if isinstance(result, tuple) else None
        return LayerSpec(
            plain_settings(self.layer.layer),
            self.attention,
            self.mlp,
            before_attention=self._norm(before_attention),
            post_attention=self._norm(post_attention),
            after_attention=self._norm(after_attention),
            before_mlp=self._norm(before_mlp),
            post_mlp=self._norm(post_mlp),
            after_mlp=self._norm(after_mlp),
            parallel=parallel,
            shared=shared,
            scales=(first, second),
            returns=returns,
            given=frozenset((n, form(v)) for n, v in self.layer.call.kwargs.items() if not says_nothing(v)),
        )

    def _norm(self, call: Call | None) -> NormSpec | None:
        return None if call is None else norm_spec(self.layer, call)

    def _producer(self, value: Value) -> Call | None:
        """The last norm that made this."""
        made = [call for call in self.norms if call.made is not None and call.made.same(value)]
        return made[-1] if made else None

    def _consumer(self, value: Value) -> Call | None:
        """The norm that was given this."""
        return next((call for call in self.norms if call.input.same(value)), None)

    def _scale(self, base: torch.Tensor, branch: torch.Tensor, total: torch.Tensor, place: int) -> float | None:
        """The number s, held by the layer or 1, with total = base + s * branch; `place`: of s among the scales."""
        base, branch = base.reshape(total.shape), branch.reshape(total.shape)
        known = self.layer.known
        if known is not None and is_sum(base, branch, known.scales[place], total):
            return known.scales[place]  # of a branch that rounding hides, any number would do
        if is_sum(base, branch, 1.0, total):
            return 1.0
        size = total.double().norm(dim=-1, keepdim=True).clamp_min(1e-30)  # no token counts more than another
        found = factor(branch / size, (total.double() - base.double()) / size)
        scale = named_factor(found, total.dtype, self.holders)
        return scale if scale is not None and is_sum(base, branch, scale, total) else None


def form(value: object) -> object:
    """Of what an argument is: of tensors, how many dimensions and whether of numbers that count something."""
    if isinstance(value, tuple | list):
        return tuple(map(form, value))
    return (value.dim(), value.is_floating_point()) if isinstance(value, torch.Tensor) else type(value)


def _normlike(call: Call) -> bool:
    """Whether a call may be a norm's: one tensor to another of its shape, without matrices; no dropout at rest."""
    if not call.alone or call.made is None or call.output.held.shape != call.input.held.shape:
        return False
    if holds_numbers(call.module):
        return False
    parameters = list(call.module.parameters())
    return all(p.dim() == 1 for p in parameters) and not torch.equal(call.output.held, call.input.held)
