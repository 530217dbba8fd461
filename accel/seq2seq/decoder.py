"""The forward of an encoder-decoder model: steps of generate() in a CUDA graph, all other calls as stock."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import torch

from accel.errors import Unfit
from accel.libraries.cache import (
    ENCODED,
    ENCODER_MASK,
    MASK,
    POSITIONS,
    TOKENS,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    cache_argument,
    cache_field,
    empty_layers,
    filled_layers,
    hold_nothing,
    is_empty,
    note_filled,
    output_of,
    with_present_names,
)
from accel.llm.recording.record import is_absent
from accel.offload.call_hooks import streamed_model
from accel.seq2seq.course import Course, StreamOrder
from accel.seq2seq.fixed_memory import CROSS, OWN, FixedMemory, Holding
from accel.seq2seq.held_layers import HeldLayer, HeldWindow
from accel.seq2seq.step_forward import CHOSEN, Choice, DecoderStepForward
from accel.seq2seq.step_inputs import HiddenTexts, TextStep, hides_a_text, step_behind

KNOWN = {TOKENS, ENCODED, ENCODER_MASK, MASK, POSITIONS, "use_cache", "return_dict"}
LAYERS = DynamicLayer, DynamicSlidingWindowLayer, HeldLayer, HeldWindow
FIRST = 8  # tokens that a text may begin with, to be run one by one
RECENT = 1.0  # seconds since a step, after which a text counts as ended


class Seq2SeqForward(DecoderStepForward):
    """Takes over the cache of a text, and has its steps computed there.

    output: the class of what a call returns. whole: steps may also run the model's own code all through. begins: so
    many first tokens may be steps too. codes: the dtype of 8 bits in which what the encoder gave is kept, or None.
    """

    captures = False  # the encoder and the prompt are run one by one, in which lone sites must pay
    renewed = (
        *DecoderStepForward.renewed,
        "cache_name",
        "lock",
        "memory",
        "holding",
        "used",
        "order",
        "beams",
        "course",
        "hidden_texts",
    )
    whole = True
    begins = 0
    codes: torch.dtype | None = None
    unfit = hides_a_text
    output: type
    memory: FixedMemory
    holding: Holding | None
    used: tuple[int, float]  # by which thread, and when
    hidden_texts: HiddenTexts
    beams: tuple[Callable, int]  # rows of one text, of what an encoder gave as the first says, a weak reference
    order: StreamOrder

    def renew(self) -> None:
        super().renew()
        self.cache_name = cache_argument(type(self.module).forward) or ""
        self.memory = FixedMemory()
        self.holding = None
        self.used = 0, 0.0
        self.order = StreamOrder()
        self.lock = threading.RLock()
        self.beams = (lambda: None), 1
        self.course = Course()
        self.hidden_texts = HiddenTexts()

    def forget(self) -> None:
        super().forget()
        with self.lock:
            if self.holding is not None:
                self.holding.release()
            self.renew()

    @property
    def kept_bytes(self) -> int:
        """Of memory that stays between calls, until `forget`."""
        return sum(one.nbytes for one in self.memory.flat.values())

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        given = self.named(args, with_present_names(type(self.module).forward, kwargs))
        cache = given.pop(self.cache_name, None)
        if is_empty(cache):
            if (made := self._first(cache, given)) is None:
                return self.by_stock(*args, **kwargs)
        else:
            self._check(given)
            with self.lock, self.order.inside(given[TOKENS].device):
                # Under a budget weights may move from one step to the next.
                self.trusted = self.course.begin() and streamed_model(self.module) is None
                try:
                    made = self._made(cache, given)
                except BaseException:  # stock's code may take a part of the cache's layers out of the memory
                    self.course.place = None, None
                    raise
        result = output_of(self.output, made, cache, cache_field(self.output), given[ENCODED])
        return result if given.get("return_dict") is not False else result.to_tuple()

    def _first(self, cache: Any, given: dict[str, Any]) -> dict[str, Any] | None:
        """What `step` gives, of the first tokens of a text; None where they are run at once, by stock."""
        layers, tokens, positions = empty_layers(cache), given.get(TOKENS), given.get(POSITIONS)
        if not self.begins or layers is None or len(layers[OWN]) != len(self.layers) or given.get(MASK) is not None:
            return None
        if getattr(streamed_model(self.module), "streamed", ()):
            return None  # keys and values of what the encoder gave are made before its layers are called
        if type(tokens) is not torch.Tensor or tokens.dim() != 2 or not 0 < tokens.shape[1] <= self.begins:
            return None
        if given.get("logits_to_keep") or (positions is not None and positions.shape != tokens.shape):
            return None
        cut = {TOKENS: tokens, **({} if positions is None else {POSITIONS: positions})}
        steps = [given | {name: one[:, at : at + 1] for name, one in cut.items()} for at in range(tokens.shape[1])]
        try:
            self._check(steps[0])
            hidden = given[ENCODED].last_hidden_state
            with self.lock, self.order.inside(tokens.device):
                self.trusted = False
                told = [step_behind(self, one, at, hidden.shape[1]) for at, one in enumerate(steps)]
                if any(one.key != told[0].key for one in told) or not self.ready(told[0].rooms[OWN]):
                    return None
                for own, attention in zip(layers, self.layers[0].attentions, strict=True):
                    shape = hidden.shape[0], attention.kv_heads, 0, attention.dim
                    hold_nothing(own, hidden.new_empty(shape, dtype=next(self.module.parameters()).dtype))
                holding = self._held(layers, told[0], self._beams_of(hidden))
                try:
                    made = self._begun(holding, hidden, told)
                except BaseException:  # stock begins with an empty cache
                    holding.forget()
                    self.holding = None
                    raise
        except Unfit:
            return None
        note_filled(cache)
        return made

    def _begun(self, holding: Holding, hidden: torch.Tensor, told: list[TextStep]) -> dict[str, Any]:
        for index, layer in enumerate(self.layers):
            holding.write(CROSS, index, *layer.sources_of(hidden[:: holding.beams]))
        holding.lengths[CROSS] = hidden.shape[1]
        return {"logits": torch.cat([self._next(holding, one)["logits"] for one in told], 1)}

    @contextmanager
    def told_beams(self, given: dict[str, Any], config: Any) -> Iterator[None]:
        """Inside, beams of one text share what the encoder gave. given: of generate()'s loop, with its configuration.

        Those of a cache that somebody goes on with are copied in the end.
        """
        beams = max(config.num_beams or 1, config.num_return_sequences or 1)
        before, hidden = self.beams, getattr(given.get(ENCODED), "last_hidden_state", None)
        if beams == 1 or hidden is None:
            yield
            return
        self.beams = weakref.ref(hidden), beams
        try:
            yield
        finally:
            self.beams = before
            known = given.get(self.cache_name)
            kept = config.return_dict_in_generate or getattr(known, "_is_user_defined", False)
            with self.lock:
                if kept and self.holding is not None and self.holding.beams > 1:
                    self.holding.release()

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside is a loop in which no code of the user's runs: some steps do not compare the model."""
        self.course.left = 0
        try:
            yield
        finally:
            self.course.end()

    def continued(self, cache: Any, tokens: torch.Tensor, choice: Choice | None = None) -> Any:
        """The logits behind one more token of the text that this thread is in, (rows, 1, vocabulary), without a look at
        the model; None where that is to be called. tokens: (rows, 1). choice: gives what it makes of them instead.
        Raises Unfit.
        """
        if not self.course.left:
            return None
        with self.lock, self.order.inside(tokens.device):
            holding = self.holding
            if holding is None or (step := self.course.after(cache, holding, tokens)) is None:
                return None
            self.trusted = self.course.begin()
            return self._next(holding, step, choice)["logits" if choice is None else CHOSEN]

    def reordered(self, cache: Any, order: torch.Tensor, beams: int) -> bool:
        """Puts the rows of the texts that this thread is in into another order, each among the `beams` of its text;
        False where the cache is to do it.
        """
        with self.lock:
            place, holding = self.course.place
            mine = place is cache and holding is self.holding and holding is not None and holding.alive
            mine = mine and order.shape == (holding.rows,)
            if mine:
                holding.reorder_beams(order, beams)
            return mine

    def go_back(self, cache: Any, length: int) -> None:
        """Leaves so many tokens of the decoder in a cache that holds more."""
        with self.lock:
            more, layers = cache.get_seq_length() - length, filled_layers(cache)
            if more > 0 and self.holding is not None and layers is not None and self.holding.holds(layers):
                self.holding.lengths[OWN] = length
            elif more > 0:
                cache.crop(-more)

    def _check(self, given: dict[str, Any]) -> None:
        """Raises Unfit for a call that is no step."""
        known = KNOWN | ({"logits_to_keep"} if type(given.get("logits_to_keep")) is int else set())
        unknown = next((name for name, one in given.items() if name not in known and not is_absent(one)), None)
        if unknown is not None:
            raise Unfit(f"called with {unknown}")
        tokens, encoder = given.get(TOKENS), given.get(ENCODED)
        if type(tokens) is not torch.Tensor or tokens.dim() != 2 or tokens.shape[1] != 1:
            raise Unfit("more than one token of the decoder behind others")
        if given.get("use_cache") is False or not hasattr(encoder, "last_hidden_state"):
            raise Unfit("no cache, or nothing that an encoder gave")

    def _made(self, cache: Any, given: dict[str, Any]) -> dict[str, Any]:
        found = self.holding
        if self.trusted and found is not None and (next_ := self.course.next(cache, found, given)) is not None:
            return self._next(found, next_)
        layers = filled_layers(cache)
        if layers is None:
            raise Unfit("a cache of another kind")
        keys, length = layers[OWN][0].keys, layers[CROSS][0].get_seq_length()
        if given[TOKENS].device != keys.device:
            raise Unfit("tokens on another device than the cache")
        if given[TOKENS].shape[0] != keys.shape[0]:
            raise Unfit("a cache of another number of rows")
        step = step_behind(self, given, layers[OWN][0].get_seq_length(), length)
        holding = self._held(layers, step, self._beams_of(given[ENCODED].last_hidden_state))
        if (holding.beams > 1 or holding.codes is not None or not self.whole) and not self.ready(step.rooms[OWN]):
            raise Unfit("its layers run their own code, which does not know the memory of steps")
        self.course.note(cache, holding, given, step)
        return self._next(holding, step)

    def _beams_of(self, hidden: torch.Tensor) -> int:
        """Rows that are of one text, as far as generate() has told."""
        told, beams = self.beams
        return beams if self.layers and told() is hidden else 1

    def _next(self, holding: Holding, step: TextStep, choice: Choice | None = None) -> dict[str, Any]:
        self.used = threading.get_ident(), time.monotonic()
        made = self.run_step(holding, step, choice)
        holding.lengths[OWN] += 1
        return made

    def _held(self, layers: tuple[list, list], step: TextStep, beams: int) -> Holding:
        """The cache in the fixed memory. Raises Unfit where its steps are better left stock."""
        if step.key in self.declined:
            raise Unfit("a CUDA graph of its steps gains nothing, or is none")
        found, rooms, device = self.holding, step.rooms, step.given.tokens.device
        if found is not None and found.holds(layers) and found.room(OWN) == rooms[OWN]:
            return found
        if found is not None:
            thread, last = self.used
            if found.alive and thread != threading.get_ident() and time.monotonic() - last < RECENT:
                raise Unfit("another thread's text is under way")  # or each step would move both
            found.release()
            self.holding = None
        if any(type(layer) not in LAYERS for part in layers for layer in part):
            raise Unfit("cache layers of another kind")
        if any(getattr(layer, "sliding_window", inf) <= rooms[part] for part in (OWN, CROSS) for layer in layers[part]):
            raise Unfit("a window that a text of this length may pass")
        forms = [{(one.shape, one.dtype) for layer in part for one in (layer.keys, layer.values)} for part in layers]
        if any(len(form) > 1 for form in forms):
            raise Unfit("keys and values of different sizes")
        if self.runner is not None and device.type == "cuda":
            token = layers[OWN][0].keys
            numbers = 2 * len(layers[OWN]) * token.shape[0] * token.shape[1] * token.shape[3]
            widths = [token.element_size()] * 2 if self.codes is None else [token.element_size(), 1]
            bytes_ = sum(numbers * room * width for room, width in zip(rooms, widths, strict=True))
            if bytes_ > 2**20 * self.runner.pool.limit_mb(device):
                raise Unfit("its keys and values take more than graph_memory_gb allows")
        before = self.memory.given_up
        ready = self.ready(rooms[OWN])  # here, as what is bound may be looked at, which a graph cannot
        try:
            self.holding = Holding(self.memory, layers, rooms, *((beams, self.codes) if ready else ()))
        finally:
            if self.runner is not None and self.memory.given_up != before:
                with self.runner.pool.lock:  # its graphs write where other things may be now
                    for entry in self.runner.entries.values():
                        self.runner.pool.drop(entry)
                    self.runner.entries.clear()
        return self.holding
