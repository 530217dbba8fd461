"""A layer of a decoder, seen once in a small stock run: attention to its own tokens, to the encoder's, and an MLP.

It is two layers as `LayerSpec` knows them, of which the first one has no MLP.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from accel_kernels.attention.math_attention import math_attention
from torch import nn

from accel.encoders.bidirectional_attention import EncoderRecord
from accel.encoders.position_bias import PositionBias, learned, listening_to_biases
from accel.encoders.recording import EncoderRecorder, clamps
from accel.errors import reason_of
from accel.libraries.cache import ENCODED, TOKENS, encoded
from accel.llm.generation.layer_forward import LayerForward
from accel.llm.parts.norm import normlike
from accel.llm.parts.step import ForwardContext
from accel.llm.recording.implementation import foreign_attention
from accel.llm.recording.record import Call, LayerRecord, NotUnderstood, Record, Value
from accel.llm.recording.recorder import LINEARS
from accel.llm.recording.resting import resting
from accel.llm.runtime.kv_quantization import choose_kv_dtypes
from accel.llm.runtime.layer import BoundLayer, put_together
from accel.llm.runtime.layer_spec import LayerSpec
from accel.patching.structure import placement
from accel.seq2seq.fixed_memory import CROSS, OWN
from accel.seq2seq.memory_attention import MemorySpec

Halves = tuple[LayerSpec, LayerSpec]


class DecoderLayerForward(LayerForward):
    """Computes its layer, of which `spec` is the first half and `second` the rest, while a step is under way."""

    def __init__(self, *place: Any, halves: Halves, steps: ForwardContext) -> None:
        super().__init__(*place, spec=halves[0], steps=steps)
        self.second = LayerForward(*place, spec=halves[1], steps=steps)
        self.layer_guard.join(self.second.layer_guard)

    @property
    def attentions(self) -> tuple[Any, Any]:
        """To its own tokens, and to the encoder's."""
        return self.spec.attention, self.second.spec.attention

    @property
    def biases(self) -> list[PositionBias]:
        """Of scores."""
        return [one.position_bias for one in self.attentions if one.position_bias is not None]

    def all_stacks(self) -> list[list[nn.Linear]]:
        """See `stacks`."""
        return [linears for linears in (self.stacks(), self.second.stacks(self.attentions[CROSS].sources)) if linears]

    def sources_of(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `BoundMemoryAttention`."""
        return self.second.bound.attention.sources_of(self.kernels, hidden)

    def bind(self, stack: bool) -> str | None:
        reason = super().bind(stack)
        if reason is None:
            try:
                self.second.bound = BoundLayer(self.kernels, self.module, self.second.spec, stack)
            except (NotUnderstood, AttributeError) as error:  # or a module is gone
                reason = str(error)
        return reason

    def fast(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.pop("hidden_states")
        for half in (self.bound, self.second.bound):
            x = half(self.kernels, step, x.contiguous(), kwargs)
        return x if self.second.spec.returns is None else (x, *(None,) * (self.second.spec.returns - 1))


class DecoderRecorder(EncoderRecorder):
    """Gathers what layers do that attend twice."""

    def __init__(self, record: EncoderRecord, device: torch.device, kv_cache: str | None):
        super().__init__(record)
        self.halves: list[Halves] = []
        self.device, self.kv_cache, self.left = device, kv_cache, list[str]()

    def look(self, layer: LayerRecord, record: Record) -> None:
        if layer is not record.layers[len(self.halves)]:
            raise NotUnderstood("its layers are called in another order")
        if layer.attended is None:
            self._by_own_code(layer, record.layers.index(layer))
        self.own.forget()
        self.halves.append(_halves(layer, record))
        if self.kv_cache is not None:
            crossing: Any = self.halves[-1][1].attention
            self.left += choose_kv_dtypes(self.kv_cache, self.device, [(layer, crossing)])[1]

    def _by_own_code(self, layer: LayerRecord, index: int) -> None:
        """Notes attentions that do not go by transformers' interface."""
        found = [own.attention(layer, index, self.record.biases) for own in self.own.by_module()]
        if len(found) == 2 and found[0] is not None and found[1] is not None:
            (attended, stored), (layer.attended, layer.stored) = found[0], found[1]
            layer.earlier.append((stored, attended))

    def _attend(self, module: nn.Module, query: Any, key: Any, value: Any, *given: Any, **options: Any) -> tuple:
        if not self._elsewhere() and (before := self.current.stored) is not None:
            self.current.earlier.append((before, self.current.attended))
            self.current.stored = None
        return super()._attend(module, query, key, value, *given, **options)


def _halves(layer: LayerRecord, record: Record) -> Halves:
    if len(layer.earlier) != 1 or layer.stored is None:
        raise NotUnderstood("its layers do not attend twice")
    ((stored, attended),), reason = layer.earlier, ""
    for middle, before, after in _middles(layer):
        first, second = (replace(layer, ran=call, calls=calls, earlier=[]) for call, calls in (before, after))
        first.stored, first.attended = stored, attended
        try:
            found = [MemorySpec.understand(one, record) for one in (first, second)]
            for part, one in enumerate(found):
                _check(one.spec, part)
            return (
                put_together(first, found[:1], None, middle, []),
                put_together(second, found[1:], None, layer.call.output, []),
            )
        except NotUnderstood as error:
            reason = str(error)
    raise NotUnderstood(reason or "what stands between its attentions is not known")


def _check(spec: Any, part: int) -> None:
    """Raises NotUnderstood for an attention that computes what those of a step do not."""
    if spec.part != part or spec.reach != ((None, 0) if part == OWN else None):
        raise NotUnderstood("its attentions are not one to all tokens before, and one to what the encoder gave")
    turned = spec.rotary is not None or spec.q_norm is not None or spec.k_norm is not None
    if spec.norms_after or spec.key_scale != 1.0 or (part == CROSS and (spec.position_bias or turned)):
        raise NotUnderstood("its queries or keys are changed behind the projections")


def _middles(layer: LayerRecord) -> Iterator[tuple[Value, tuple[Call, list[Call]], tuple[Call, list[Call]]]]:
    """What may be the sum of the first attention: the value, and call and calls inside of each half."""
    crossing, whole = layer.attention, layer.call
    inside = {id(one) for one in crossing.modules()}
    at = next(n for n, call in enumerate(layer.calls) if id(call.module) in inside)
    start = next((one.input for one in layer.calls[at:] if one.module is crossing), None)
    given = layer.calls[at].input if start is None else start
    norms = [n for n, one in enumerate(layer.calls[:at]) if normlike(layer, one) and one.output.same(given)]
    for value, end in ((given, at), *((layer.calls[n].input, n) for n in norms[-1:])):
        first = replace(whole, made=value, result=value.tensor)
        second = replace(whole, args=(value.tensor, *whole.args[1:]), taken=value)
        yield value, (first, layer.calls[:end]), (second, layer.calls[end:])


def understand_decoder(
    model: Any, call: dict[str, Any], kv_cache: str | None = None
) -> tuple[str, list[Halves], list[str]]:
    """The path of the stack of a decoder, what each of its layers computes in a call of the model, and what stays.

    The last names layers whose keys of what an encoder gave would lose too much as `Options.kv_cache` says.
    call: keywords, among them what an encoder gave, and no cache. Raises NotUnderstood.
    """
    decoder = model.get_decoder()
    while hasattr(decoder, "get_decoder") and decoder.get_decoder() not in (None, decoder):  # as of a part of pictures
        decoder = decoder.get_decoder()
    lists = [one for one in decoder.modules() if type(one) is nn.ModuleList and len(one)]
    lists = [one for one in lists if any(isinstance(inner, LINEARS) for inner in one.modules())]  # not of biases
    inner = {id(one) for other in lists for one in other.modules() if one is not other}
    lists = [one for one in lists if id(one) not in inner]
    stack = next((path for path, one in model.named_modules() if lists and one is lists[0]), None)
    if len(lists) != 1 or stack is None:
        raise NotUnderstood("its decoder has no list of layers, or several")
    modules = lists[0]
    if (foreign := foreign_attention([model, *modules.modules()])) is not None:
        raise NotUnderstood(foreign)
    if placement(model)[1] == torch.float16 and any(map(clamps, modules)):
        raise NotUnderstood("in float16 its layers clamp what overflows")
    kinds: dict = {}
    seen = EncoderRecord([LayerRecord(layer, f"{stack}.{number}", kinds) for number, layer in enumerate(modules)])
    recorder = DecoderRecorder(seen, placement(model)[0], kv_cache)
    try:
        listening = listening_to_biases(model, seen.biases)
        with resting(model), math_attention(), recorder.attached(model), recorder.until_shown, listening:
            type(model).forward(model, **call)
    except NotUnderstood:
        raise
    except Exception as error:  # whatever a forward may raise
        raise NotUnderstood(f"could not be examined: {reason_of(error)}") from error
    if len(recorder.halves) < len(modules):
        raise NotUnderstood("not all of its layers run")
    return stack, _with_long_texts(model, call, recorder.halves), recorder.left


def _with_long_texts(model: Any, call: dict[str, Any], halves: list[Halves]) -> list[Halves]:
    """The same with biases as of long texts."""
    attentions: list[Any] = [first.attention for first, _ in halves]
    paths = {one.position_bias.path for one in attentions if one.position_bias is not None}
    if not paths:
        return halves
    given = encoded(call[ENCODED].last_hidden_state[:1])
    biases = learned(model, paths, lambda ids: call | {TOKENS: ids, ENCODED: given})
    found = [replace(one, position_bias=one.position_bias and biases[one.position_bias.path]) for one in attentions]
    return [(replace(first, attention=one), second) for (first, second), one in zip(halves, found, strict=True)]
