"""An encoder whose layers run fused on packed tokens; the code around its layers is the model's own."""

import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from accel.cuda_graphs.fingerprint import VERSION, Fingerprint
from accel.cuda_graphs.runner import GraphRunner
from accel.cuda_graphs.small_calls import SmallCalls
from accel.encoders.inputs import GRIDS, PLACES, SHOWN, SOUNDS, TEXT, Inputs, pad_token
from accel.encoders.late_cache import LateCache
from accel.encoders.packing import Packing, PaddedRows, Sight, padded, reads_positions, unpadded
from accel.encoders.picture_sizes import PictureSizes
from accel.encoders.recording import layers_in
from accel.encoders.stack import HIDDEN_STATES, EncoderLayerForward, EncoderStep
from accel.encoders.windows import blocks_in
from accel.errors import Unfit
from accel.in_flight import called_in
from accel.libraries.attention import ATTENTION, EAGER
from accel.libraries.cache import cache_field, cache_of
from accel.libraries.hooks import why_elsewhere
from accel.llm.parts.step import ForwardContext
from accel.llm.recording.implementation import foreign_attention
from accel.llm.recording.record import NotUnderstood, is_absent
from accel.offload.call_hooks import streamed_model
from accel.patching.fast_forward import FastForward, as_written
from accel.patching.structure import CallersHook, foreign, foreign_hooks, replaced_forward

OUTPUTS = ("output_attentions", "output_router_logits", HIDDEN_STATES)
ALIKE_AGAIN = 31  # calls after one in which rows of padding differed, until it is asked again whether they do
TOLD = ("starts", "keys", "longest", "mirrored", "padding")  # of a packing, what layers read
# Of a configuration: what a call may say otherwise, and rows of a table that no layer reads: new tokens change it.
CALLS = {*OUTPUTS, "use_cache", "return_dict", "vocab_size"}


class EncoderForward(FastForward):
    """An encoder and its layers. root: the model that it is part of, or itself; blind: whether what that gives does not
    depend on rows of padding behind a text, so that none are computed in its calls. unseen: nor in others, as the
    user says. pad: where it is blind only to padding that is this token. caches: it makes a cache where a call does not
    say otherwise; watches: somebody has looked into one. heard: hooks are on what it calls. shows: the code around the
    layers is given the mask, and what each layer gives where there is none. inputs: what it is given; unread: names of
    what it is given beside, which changes nothing. order: of the layers that it calls, some of them several times.
    stops: see `EncoderStep`. mirrors, alike: see `Sight`. When it was understood, implementation: of attention;
    settings: what `told` gave; kinds: of modules in it. sizes: what its code makes of these alone, or None.
    """

    renewed = ("seen", "reason", "lock", "sees", "biases", "differ", "numbers", "versions")
    forgotten = ("seen",)
    root: nn.Module
    inputs: Inputs
    stack: str
    layers: list[EncoderLayerForward]
    order: list[int]
    stops: set[int]
    settings: tuple = ()
    implementation: str | None
    kinds: frozenset[type]
    sizes: PictureSizes | None = None
    steps: ForwardContext
    runner: GraphRunner | None  # of the layers
    calls: SmallCalls
    blind = unseen = caches = watches = alike = heard = False
    pad: int | None = None
    mirrors = True
    shows = False
    unread: frozenset[str] = frozenset()
    apart = False  # while it is tried: weights stay where they are
    streams = False  # its layers' weights are there while each is called, so each runs then
    seen: Fingerprint | None
    reason: str | None  # why it runs stock, as it is now
    biases: dict[str, tuple[torch.Tensor, torch.Tensor]]  # by path, see `PositionBias.bind`
    longest: float = inf  # of the texts that these are known for
    sees: bool  # whether the caller may see rows of padding
    numbers: list[torch.Tensor]  # see `LayerGuard`
    versions: int
    differ: int  # calls to come in which these are taken to differ, as they did, by positions of words

    def told(self) -> tuple:
        """Numbers and switches of its configuration, and why the attention that it names is none of transformers' own,
        which are alike: Whisper sets another one for times of words. Saving changes other texts.
        """
        named = vars(self.module.config).items()
        kept = ((name, one) for name, one in named if name not in CALLS and isinstance(one, bool | int | float))
        return foreign_attention([self.module]), *kept

    def renew(self) -> None:
        self.names = tuple(inspect.signature(type(self.module).forward).parameters)[1:]
        self.seen, self.reason, self.sees, self.biases = None, None, True, {}
        self.lock, self.differ, self.numbers, self.versions = threading.Lock(), 0, [], 0

    @property
    def sight(self) -> Sight:
        """By what its layers tell tokens."""
        attentions = [layer.attention for layer in self.layers]
        distances = any(one.has_position_bias for one in attentions)
        places = distances or any(layer.spec.keywords for layer in self.layers)
        places = (places and not self.alike) or any(layer.inner for layer in self.layers)  # as of convolutions
        return Sight(distances, places, all(one.causal for one in attentions), self.mirrors, self.alike)

    @property
    def biased(self) -> bool:
        """Whether a layer has scores by distances."""
        held = ((layer.attention.position_bias, layer.attention.relative) for layer in self.layers)
        return any(one is not None for both in held for one in both)

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        named = self.named(args, kwargs)
        given = {name: one for name, one in named.items() if not is_absent(one)}
        mask = given.pop(self.inputs.mask, None)
        for name in OUTPUTS[:-1]:
            if self.asked(name, named):
                return f"{name}: its layers run stock where each is looked at"
        known = {self.inputs.main, *self.inputs.others, *self.unread, *OUTPUTS, "return_dict"}
        switches = bool if not self.stack else ()  # which own code of layers in windows is told
        unknown = next((n for n, one in given.items() if n not in known and not isinstance(one, switches)), None)
        if unknown is not None:
            return f"{unknown} is given"
        if mask is None and "position_ids" in given:
            return "positions without a mask, which may be those of several texts in a row"
        dims = 2 + (self.inputs.mask in (SHOWN, PLACES))
        if mask is not None and (type(mask) is not torch.Tensor or mask.dim() != dims):
            return "a mask that is not one of tokens, (batch, length)"
        if self.watches and self.makes_cache(named):
            return "a cache, into which somebody looks"
        if mask is not None and mask.is_cuda and torch.cuda.is_current_stream_capturing() and not self.small:
            return "a mask that cannot be looked at, as a CUDA graph is being captured"
        return self.ready()

    @property
    def small(self) -> bool:
        """Whether this is in the graph of a small call, in which no text has padding."""
        return self.calls.unpadded and self.inputs == TEXT

    def asked(self, output: str, given: dict[str, Any]) -> bool:
        """Whether a call, or else the configuration, asks for an output."""
        value = given.get(output)
        return bool(getattr(self.module.config, output, False)) if value is None else value is not False

    def makes_cache(self, given: dict[str, Any]) -> bool:
        """Whether a call gives one."""
        return self.caches and self.asked("use_cache", given)

    def late(self, args: tuple, kwargs: dict) -> "tuple[dict[str, Any], Callable[[Any], Any]] | None":
        """Of a call that gives a cache: keywords with which it gives none, and what puts a late one into its result.
        None for another call.
        """
        given = self.named(args, kwargs)
        if not self.makes_cache(given):
            return None
        held = {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in given.items()}
        inference, plain = torch.is_inference_mode_enabled(), not self.asked("return_dict", given)

        def make() -> Any:
            self.watches = True
            with torch.inference_mode(inference), torch.no_grad(), as_written():
                return cache_of(self.stock(**held | {"return_dict": True}))

        def put(result: Any) -> Any:
            kind: Any = type(result)
            result = replace(result, **{cache_field(kind): LateCache(make)})
            return result.to_tuple() if plain else result

        return given | {"use_cache": False, "return_dict": True}, put

    def unlike(self, args: tuple, kwargs: dict) -> bool:
        """See `OwnCodeForward`; found out while it packs."""
        return False

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        if (late := self.late(args, kwargs)) is not None:
            return late[1](self.fast(**late[0]))
        named = {name: one for name, one in self.named(args, kwargs).items() if name not in self.unread}
        mask = self.inputs.shown(named.get(self.inputs.mask))
        # All layers run at once where something may be padding, and for a graph of all, unless each is looked at.
        together = self.inputs == TEXT or (self.inputs.in_one_row and not self.shows)
        shows = self.asked(HIDDEN_STATES, named)
        deferred = mask is not None or self.biased or (together and not shows)
        run = partial(self.run, mask) if deferred else None
        stops = range(len(self.order)) if self.streams or shows else self.stops
        step = EncoderStep([self.layers[at] for at in self.order], run, self.biases, stops)
        step.ids, step.shows = named.get(self.inputs.main), shows
        if mask is not None and not self.small and self.inputs.main not in SOUNDS:
            # Now, so that the GPU looks at it while the model's own code begins.
            step.padded = self.padded(mask, step.ids, None, shows)
            if self.heard and not self.alike:  # what runs before the layers is to run once
                self._fitting(step.padded or padded(None, mask.flatten(1).bool(), False, self.sight), mask)
        if not self.shows:
            named.pop(self.inputs.mask, None)
        told = {} if self.sizes is None else self.sizes(named[GRIDS])
        with self.steps.taken(step):
            result = self.stock(**named, **told)
        if deferred and not step.done:
            raise Unfit("not all of its layers were called")
        return result

    def run(self, mask: torch.Tensor | None, step: EncoderStep) -> torch.Tensor:
        """The hidden states behind the last layer that was called, (B, L, C)."""
        assert step.hidden is not None
        hidden, mask = step.rows, step.shown if mask is not None and self.inputs.main in SOUNDS else mask
        if hidden.shape[1] > self.longest:
            raise Unfit(f"a text of more than {self.longest} tokens, and a position bias")
        graph, runner = not step.shows and self.in_graph(hidden), self.runner
        looked = None if runner is None or not graph else runner.look()
        x = self._packed(step, hidden, mask, graph)[None]
        packing = step.packing
        self._prepare(step)
        for layer, kwargs in step.waiting:
            if (starts := layer.attention.starts) is not None:
                step.packed(kwargs.get(starts), graph)
        given = x, {name: getattr(packing, name) for name in TOLD}, step.prepared()
        if graph and runner is not None:
            compute = partial(self._layers, step)
            x = runner(compute, given, {}, (step.begun,), without_graph=partial(compute, *given), looked=looked)
        else:
            x = self._layers(step, *given)
        return packing.unpack(x[0], *step.shape).reshape(step.hidden.shape)

    def _layers(self, step: EncoderStep, x: torch.Tensor, told: dict[str, Any], prepared: tuple) -> Any:
        """The layers that wait, of tokens packed as `told` says; a graph for each form of these."""
        step.packing = step.packing._replace(**told)
        if not self.streams:
            step.prepare(*prepared)
        for layer, kwargs in step.waiting:
            x = layer.bound(self.kernels, step, x, kwargs)
        return x

    def in_graph(self, x: torch.Tensor) -> bool:
        """Whether its layers are a graph of their own in this call. The last is in the graph of a small call."""
        apart = self.runner is None or self.apart or self.calls.unpadded or self.streams
        return not apart and x.is_cuda and not torch.cuda.is_current_stream_capturing()

    def _prepare(self, step: EncoderStep) -> None:
        """Has the step hold what layers make of their keywords."""
        for layer, kwargs in step.waiting:
            if layer.spec.keywords and not layer.inner:
                layer.bound.attention.prepare(step, kwargs)

    def _packed(self, step: EncoderStep, x: torch.Tensor, mask: torch.Tensor | None, graph: bool) -> torch.Tensor:
        """The layers' input, (B, L, C), by a packing that the step holds from now on, (T, C). graph: in a size that
        graphs have.
        """
        if step.begun and mask is not None:
            return step.packing.pack(x)
        if mask is None or self.small:
            step.packing = unpadded(x, graph)
            return step.packing.pack(x)
        rows = step.padded or self.padded(mask, step.ids, x, step.shows)
        if rows is None or mask.flatten(1).shape != x.shape[:2] or mask.device != x.device:
            raise Unfit("a mask of another shape, or on another device")
        step.packing = rows.largest
        y = step.packing.pack(x)  # before it waits, as what follows
        if all(layer.attention.relative is None for layer in self.layers):  # else it hangs on the longest text
            self._prepare(step)
        step.settle(self._fitting(rows, mask))
        if rows.differ and step.ids is not None and not self.apart:
            self.differ = ALIKE_AGAIN
        return y[: step.packing.size]

    def _fitting(self, rows: PaddedRows, mask: torch.Tensor) -> Packing:
        """The packing that a mask asks for. Waits for the GPU. Raises Unfit."""
        if self.calls.weighs and not bool(((mask == 0) | (mask == 1)).all()):
            raise Unfit("a mask of other numbers than 0 and 1, with which its code computes")
        packing = rows.packing(mask.flatten(1))
        reaches = [one.attention.reach for one in self.layers if one.attention.reach is not None]
        named = getattr(self.module.config, ATTENTION, None)
        # To eager attention all are alike then, which so few tokens as a trial has do not show.
        other = named == EAGER and not self.apart and (packing.mirrored or any(far is not None for far, _ in reaches))
        if packing.keys is not None and packing.unseen is None and reaches and (other or named != self.implementation):
            raise Unfit("rows of padding may see nothing, of which each attention makes something else")
        return packing

    def padded(
        self, mask: torch.Tensor, ids: torch.Tensor | None, x: torch.Tensor | None, shows: bool = False
    ) -> PaddedRows | None:
        """Of these tokens. x: what layers are given, None before that is known; then it gives None where it matters.
        shows: the caller is shown all rows.
        """
        mask = mask.flatten(1)
        hidden = self.unseen or (not (self.sees or shows) and called_in(self.root))
        shown, plain = mask.bool(), None
        if hidden and not self.unseen and self.pad is not None:
            hidden = ids is not None and ids.shape == mask.shape and pad_token(self.root) == self.pad
            words = ids != self.pad
            plain = (shown | ~words).all() & (shown & words).any(1).all() if hidden else None
        sight = self.sight
        known = reads_positions(hidden, sight)
        if x is None and not known:
            if not self.differ or ids is None or sight.alike:
                return None
            self.differ -= 1
        return padded(x, shown, hidden, sight, self.in_graph(mask), plain)

    def ready(self) -> str | None:
        """Binds the layers to the weights where the model has changed. Returns why they no longer fit it."""
        with self.lock:
            versions = sum(map(VERSION, self.numbers))
            if self.seen is None or not (self.seen.reachable() and self.seen.holds()) or versions != self.versions:
                self.reason = self._bind()
                if self.reason is None:
                    self.numbers = [one for layer in self.layers for one in layer.layer_guard.numbers(layer.module)]
                self.versions = sum(map(VERSION, self.numbers))
                self.sees = not self.blind or (not self.unseen and self.watched())
                # A language model notes at each call how far images move its positions.
                self.seen = Fingerprint(self.root if self.blind and not self.unseen else self.module)
            return self.reason

    def _bind(self) -> str | None:
        known = [layer.module for layer in self.layers]
        now = layers_in(self.module, self.stack) if self.stack else blocks_in(self.module)
        if [one for one in now.values() if one in known] != known:
            return "its layers are not those that were optimized"
        if (elsewhere := why_elsewhere(self.module)) is not None:
            return elsewhere
        if self.told() != self.settings:
            return "its configuration has changed since it was optimized"
        self.heard = any(foreign_hooks(one, CallersHook) for one in list(self.module.modules())[1:])
        self.streams, stack = False, not self.apart and streamed_model(self.root) is None
        for layer in self.layers:
            for path, one in layer.module.named_modules(prefix=layer.path):  # the user's code would see packed rows
                seen = foreign_hooks(one, CallersHook) and "forward hooks"
                other = type(one) not in self.kinds and foreign(one)
                if (reason := seen or replaced_forward(one) or other or None) is not None:
                    return f"{path}: {reason}"
            self.streams |= foreign_hooks(layer.module)
            if (reason := layer.bind(stack)) is not None:
                return reason
        biases = [layer.attention.position_bias for layer in self.layers]
        far = [*biases, *(layer.attention.relative for layer in self.layers)]
        try:
            self.biases = {bias.path: bias.bind(self.module) for bias in biases if bias is not None}
            self.longest = min((one.most for one in far if one is not None and one.most is not None), default=inf)
        except (NotUnderstood, AttributeError) as error:  # or it is gone
            return str(error)
        return None

    def watched(self) -> bool:
        """Whether code of the user's inside of the root may see the hidden states."""
        every = [self.root, *self.root.modules()]
        return any(foreign_hooks(one) or replaced_forward(one) or foreign(one) for one in every)
