"""What the layers of an encoder do, seen once in a small stock run."""

import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from accel_kernels.attention.math_attention import math_attention
from torch import nn

from accel.encoders.bidirectional_attention import OWN_MASK, BidirectionalSpec, EncoderRecord
from accel.encoders.inputs import PLACES
from accel.encoders.own_code import OwnCode
from accel.encoders.position_bias import SeenBias, learned, listening_to_biases, long_text
from accel.encoders.windows import Moved, added_by, one_window
from accel.errors import reason_of
from accel.in_flight import listening
from accel.llm.parts.linear import only_linear
from accel.llm.recording.implementation import foreign_attention
from accel.llm.recording.record import Attended, LayerRecord, NotUnderstood, Record, Stored, Value
from accel.llm.recording.recorder import NAME, Recorder, decoder_layers
from accel.llm.recording.resting import Unwritten, resting
from accel.llm.runtime.layer import own_code_around, put_together
from accel.llm.runtime.layer_spec import LayerSpec
from accel.patching.structure import placement


class EncoderRecorder(Recorder):
    """Gathers keys and values that layers attend with; there is no cache that they would be stored in.

    before: what the last attention was given, with all before it of this layer. made: what the last layer gave. stops:
    behind how many layers that is looked at. pairs: layers whose own code adds to scores, what they were told, and what
    was added.
    """

    before: Attended
    record: EncoderRecord
    made: Any

    def __init__(self, record: EncoderRecord):
        self.record, self.scores, self.amplified, self.looking, self.lent = record, False, 1.0, False, {}
        self.open, self.until_shown = [], ExitStack()
        self.thread, self.name = threading.get_ident(), f"{NAME}_{id(self):x}"
        self.specs: dict[int, LayerSpec] = {}
        self.order: list[int] = []
        self.stops: set[int] = set()
        self.flat, self.made = False, None
        self.pairs: list[tuple] = []
        self.linears: dict[nn.Module, nn.Module] = {}
        me = weakref.proxy(self)  # else both would keep the weights of layers until they are collected
        self.own = OwnCode(lambda: me.open[-1].module if me.open and not me.looking else None)

    def note(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Called with what a module outside of the layers is given."""
        if self.made is not None and any(one is self.made for one in args):
            self.stops.add(len(self.order))

    def value(self, tensor: torch.Tensor) -> Value:
        """In a layer that is given tokens without rows, (tokens, channels), all are noted as those of one row; what is
        (tokens, rows, channels), as PyTorch's own attention has it, is noted turned. Windows are copies of what
        they are of.
        """
        if self.record.in_windows:
            return Moved(tensor)
        self.flat = self.flat if self.open else tensor.dim() == 2
        if self.flat:
            return Value(tensor[None])
        shape = self.open[0].input.held.shape[:2] if self.open and self.open[0].taken is not None else ()
        if tensor.dim() == 2 and shape == (1, len(tensor)):  # its attention alone is given tokens without rows
            return Value(tensor[None])
        turned = tensor.dim() == 3 and tensor.shape[:2] == shape[::-1] != shape
        return Value(tensor.transpose(0, 1) if turned else tensor)

    def heard(self, layer: nn.Module) -> Iterator[nn.Module]:
        """What is no more than a linear is noted as this."""
        found = {one: linear for one in layer.modules() if (linear := only_linear(one)) is not None}
        self.linears |= found
        inside = {part for linear in found.values() for part in linear.modules()}
        return (one for one in super().heard(layer) if one not in inside)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        super()._enter(module, args, kwargs)
        if not self.looking:
            self.open[-1].module = self.linears.get(module, module)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        with super().attached(model), self.own:
            yield

    def look(self, layer: LayerRecord, record: Record) -> None:
        if layer.attended is None:
            biases = None if self.record.in_windows else self.record.biases
            own = self.own.attention(layer, record.layers.index(layer), biases)
            layer.attended, layer.stored = (None, None) if own is None else own
        self.own.forget()
        found, at = BidirectionalSpec.understand(layer, record), record.layers.index(layer)
        try:
            spec = put_together(layer, [found], None, layer.call.output, [])
        except NotUnderstood:
            mixed = self.record.padded or cast(BidirectionalSpec, found.spec).pairs
            around = None if mixed else own_code_around(layer, [found])
            if around is None:
                raise
            spec = around
        if self.specs.setdefault(at, spec) != spec:
            raise NotUnderstood("a layer that is called several times computes something else each time")
        self.order.append(at)
        if cast(BidirectionalSpec, found.spec).pairs:
            self.pairs.append((layer.layer, dict(layer.call.named), cast(Attended, layer.attended).mask))
        self.made = result[0] if isinstance(result := layer.call.result, tuple) else result

    def _mask(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        # A mask that hides nothing of so few tokens would be left out, and windows could not be told from none.
        return super()._mask(*args, **kwargs | {"allow_is_bidirectional_skip": False})

    def _attend(self, module: nn.Module, query: Any, key: Any, value: Any, *given: Any, **options: Any) -> tuple:
        result = super()._attend(module, query, key, value, *given, **options)
        if not self._elsewhere():
            layer, now = self.current, self.current.attended
            held, before = Stored(module, self.record.layers.index(layer), key.clone(), value.clone()), layer.stored
            assert now is not None
            if before is not None:  # parts of one row, each by itself
                masked = self.before.mask is not None or now.mask is not None
                if masked or len(query) > 1 or before.attention is not module:
                    raise NotUnderstood("a layer attends twice")
                keys, values = (torch.cat(pair, dim=2) for pair in zip(before[2:], held[2:], strict=True))
                held = held._replace(keys=keys, values=values)
                now.query = torch.cat([self.before.query, now.query], dim=2)
                now.output = torch.cat([self.before.output, now.output], dim=1)
            self.record.ends = [*(self.record.ends if before is not None else [0]), now.query.shape[2]]
            layer.stored, self.before = held, now
            self._without_padding(layer)
        return result

    def _without_padding(self, layer: LayerRecord) -> None:
        """Leaves out channels of heads that are zeros in queries, keys and values alike, as Moonshine adds."""
        held, now = layer.stored, layer.attended
        assert held is not None and now is not None
        used = [t.flatten(0, -2).any(0).nonzero().amax(0, keepdim=True) for t in (now.query, held.keys, held.values)]
        dim = int(torch.cat(used).amax()) + 1 if all(map(len, used)) else now.query.shape[-1]
        if dim < now.query.shape[-1] and now.options.get("scaling") is not None:
            now.query, now.output = now.query[..., :dim], now.output[..., :dim]
            layer.stored = held._replace(keys=held.keys[..., :dim], values=held.values[..., :dim])


def layers_in(model: nn.Module, stack: str) -> dict[str, nn.Module]:
    """The layers of a stack by their paths; those of its groups where it consists of such, as in ALBERT."""
    layers = {f"{stack}.{name}": one for name, one in model.get_submodule(stack).named_children()}
    lists = {f"{path}.{name}": one for path, layer in layers.items() for name, one in layer.named_children()}
    inner = {f"{path}.{name}": one for path, held in lists.items() for name, one in held.named_children()}
    groups = len(lists) == len(layers) and all(type(one) is nn.ModuleList for one in lists.values())
    return inner if groups and len({type(one) for one in inner.values()}) == 1 else layers


def understand_encoder(model: Any, call: dict[str, Any]) -> tuple[str, dict[str, LayerSpec], list[int], set[int]]:
    """The path of the stack of an encoder; by path what each of its layers computes that run in a call of the model,
    and in which order. Then behind how many of them other modules are given what they gave. Raises NotUnderstood.
    """
    stack, modules = decoder_layers(model, call)
    if (foreign := foreign_attention([model, *modules.modules()])) is not None:
        raise NotUnderstood(foreign)
    if placement(model)[1] == torch.float16 and any(map(clamps, layers_in(model, stack).values())):
        raise NotUnderstood("in float16 its layers clamp what overflows")
    kinds: dict = {}
    seen = EncoderRecord([LayerRecord(layer, path, kinds) for path, layer in layers_in(model, stack).items()])
    seen.padded = any(name in ("input_ids", PLACES) or "mask" in name for name in call)
    recorder = EncoderRecorder(seen)
    try:
        inside = {one for layer in seen.layers for one in layer.layer.modules()}
        others = listening((one, recorder.note) for one in model.modules() if one not in inside)
        biases = listening_to_biases(model, seen.biases)
        attached = recorder.attached(model)
        with resting(model), math_attention(), Unwritten(model), attached, recorder.until_shown, biases, others:
            type(model).forward(model, **call)
    except NotUnderstood:
        raise
    except Exception as error:  # whatever a forward may raise
        raise NotUnderstood(f"could not be examined: {reason_of(error)}") from error
    ran = sorted(recorder.specs)
    if not ran:
        raise NotUnderstood("none of its layers runs")
    specs = [recorder.specs[at] for at in ran]
    attentions: list[Any] = [spec.attention for spec in specs]
    for one in recorder.pairs:
        _check_pairs(*one)
    paths = {one.position_bias.path for one in attentions if one.position_bias is not None}
    if paths:
        found = learned(model, paths)
        attentions = [
            replace(one, position_bias=one.position_bias and found[one.position_bias.path]) for one in attentions
        ]
        specs = [replace(spec, attention=one) for spec, one in zip(specs, attentions, strict=True)]
    if any(one.relative is not None for one in attentions):
        first = next(one.relative for one in attentions if one.relative is not None)
        long: list[SeenBias] = []
        with resting(model), OwnCode(lambda: model) as watched, listening_to_biases(model, long):
            _run_long(model, stack, call, long_text(model))
        found = first.learned(watched.gathered, long)
        known = {name: getattr(found, name) for name in ("buckets", "most", "columns")}
        attentions = [replace(one, relative=one.relative and replace(one.relative, **known)) for one in attentions]
        specs = [replace(spec, attention=one) for spec, one in zip(specs, attentions, strict=True)]
    found_by_path = dict(zip((seen.layers[at].path for at in ran), specs, strict=True))
    return stack, found_by_path, [ran.index(at) for at in recorder.order], recorder.stops


def _check_pairs(layer: nn.Module, named: dict[str, Any], mask: torch.Tensor) -> None:
    """Raises NotUnderstood where a layer's own code, told this, does not tell what was added to its scores."""
    try:
        with resting(layer):
            added = added_by(layer, mask.shape[-1], named, mask.device)
    except Exception as error:  # whatever its code may raise
        raise NotUnderstood(f"{OWN_MASK}: {reason_of(error)}") from error
    if added.dim() != mask.dim() or not torch.equal(added.expand_as(mask), mask):
        raise NotUnderstood(OWN_MASK)


def understand_windows(model: Any, call: dict[str, Any]) -> tuple[str, dict[str, LayerSpec], list[int], set[int]]:
    """The same of blocks of stages that attend in windows of a picture; no path of a stack. Raises NotUnderstood."""
    calls, kinds = one_window(model, call), dict[Any, Any]()
    ordered = {path: one for path, one in calls.items() if one[1] is not None}
    seen = EncoderRecord([LayerRecord(one[0], path, kinds) for path, one in ordered.items()], in_windows=True)
    recorder = EncoderRecorder(seen)
    try:
        with resting(model), math_attention(), recorder.attached(model), recorder.until_shown:
            for layer, x, named in ordered.values():
                layer(x, **named)
    except NotUnderstood:
        raise
    except Exception as error:  # whatever a forward may raise
        raise NotUnderstood(f"could not be examined: {reason_of(error)}") from error
    known, specs = dict(zip(ordered, recorder.specs.values(), strict=True)), dict[str, LayerSpec]()
    for path in calls:
        before = next(reversed(specs.values()), None)  # a block with a shift is as the one before it
        if (spec := known.get(path, before)) is None:
            raise NotUnderstood("its first block moves windows")
        one = cast(BidirectionalSpec, spec.attention)
        turned = one.rotary is not None or one.q_norm is not None or one.k_norm is not None or one.key_scale != 1.0
        if turned or one.heads != one.kv_heads:
            raise NotUnderstood("its blocks turn or scale queries and keys")
        specs[path] = spec
    return "", specs, list(range(len(specs))), set()


def _run_long(model: Any, stack: str, call: dict[str, Any], length: int) -> None:
    """Runs the module that holds the stack on what the call gives it, over and over, as far as a long text goes."""
    around, given = model.get_submodule(stack.rpartition(".")[0]), []
    with listening([(around, lambda _, *now: given.append(now))], before=True):
        type(model).forward(model, **call)
    args, kwargs = given[0] if given else ((), call)
    tokens = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)).shape[1]

    def long(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != tokens:
            return value
        return value[:1, torch.arange(length, device=value.device) % tokens]

    type(around).forward(around, *map(long, args), **{name: long(one) for name, one in kwargs.items()})


def clamps(layer: nn.Module) -> bool:
    """Whether the code of a layer names that: no few numbers would show it."""
    return "clamp" in inspect.unwrap(type(layer).forward).__code__.co_names
