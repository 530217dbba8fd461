"""The forward of an encoder-decoder model: steps of generate() in a CUDA graph, all other calls as stock."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from accel.cuda_graphs.fingerprint import Fingerprint
from accel.cuda_graphs.runner import GraphRunner
from accel.errors import Unfit
from accel.libraries.attention import ATTENTION
from accel.libraries.cache import (
    ENCODED,
    ENCODER_MASK,
    MASK,
    POSITIONS,
    TOKENS,
    DynamicLayer,
    cache_argument,
    cache_field,
    encoded,
    filled_layers,
    is_empty,
    output_of,
    with_present_names,
)
from accel.llm.parts.step import ForwardContext
from accel.llm.recording.record import NotUnderstood, is_absent
from accel.patching.fast_forward import FastForward
from accel.patching.structure import foreign_hooks
from accel.seq2seq.fixed_memory import CROSS, OWN, FixedMemory, HeldLayer, Holding, Length
from accel.seq2seq.layers import DecoderLayerForward
from accel.seq2seq.memory_attention import MemoryStep, hiding

KNOWN = {TOKENS, ENCODED, ENCODER_MASK, MASK, POSITIONS, "use_cache", "return_dict"}
ROOMS, TIMES = 128, 4  # tokens of the decoder that there is room for, and how many times as many next
STEP = 64  # tokens of an encoder are rounded up to a multiple of this, or of an eighth
RECENT = 1.0  # seconds since a step, after which a text counts as ended
TAKES_MASKS = ("sdpa", "eager")  # attentions that add a mask of numbers to the scores


class Given(NamedTuple):
    """What a step is given. start: tokens before it, (), int64; others as the model takes them, None for none.

    mask, padding: of the encoder's tokens and the decoder's, (rows, room).
    """

    tokens: torch.Tensor
    start: torch.Tensor
    mask: torch.Tensor | None
    padding: torch.Tensor | None
    positions: torch.Tensor | None


class Seq2SeqForward(FastForward):
    """Steps run the model's own code over a cache at fixed addresses, whose lengths are numbers on the device.

    masked: the decoder reads the mask of the encoder's tokens; else it reads all of them. padded: it reads one of its
    own. output: the class of what a call returns. layers: fused in steps; none where they are not understood. apart:
    their weights stay where they are, as they are tried.
    """

    captures = False  # the encoder and the prompt are run one by one, in which lone sites must pay
    renewed = ("cache_name", "lock", "memory", "holding", "used", "declined", "done", "seen", "reason", "biases")
    runner: GraphRunner | None
    masked = False
    padded = False
    apart = False
    output: type
    layers: Sequence[DecoderLayerForward] = ()
    steps: ForwardContext
    seen: Fingerprint | None
    reason: str | None  # why the layers run their own code, as they are now
    biases: dict[str, tuple[torch.Tensor, torch.Tensor]]
    memory: FixedMemory
    holding: Holding | None
    used: tuple[int, float]  # by which thread, and when
    declined: set[tuple]  # steps whose graph gains nothing, or is none
    done: Any  # event behind the last use of the memory

    def renew(self) -> None:
        self.cache_name = cache_argument(type(self.module).forward) or ""
        self.lock = threading.RLock()
        self.memory, self.holding, self.used = FixedMemory(), None, (0, 0.0)
        self.declined, self.done = set(), None
        self.seen, self.reason, self.biases = None, None, {}

    def forget(self) -> None:
        super().forget()
        with self.lock:
            if self.holding is not None:
                self.holding.release()
            self.renew()

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        given = self.named(args, with_present_names(type(self.module).forward, kwargs))
        cache = given.pop(self.cache_name, None)
        if is_empty(cache):
            return self.stock(*args, **kwargs)  # the first tokens of a text
        self._check(given)
        with self.lock, self._in_order(given[TOKENS].device):
            layers = filled_layers(cache)
            if layers is None:
                raise Unfit("a cache of another kind")
            logits = self._logits(layers, given)
        result = output_of(self.output, logits, cache, cache_field(self.output), given[ENCODED])
        return result if given.get("return_dict") is not False else result.to_tuple()

    @contextmanager
    def _in_order(self, device: torch.device) -> Iterator[None]:
        """Threads have streams of their own: inside, the memory is as the last use of it has left it."""
        if device.type != "cuda":
            yield
            return
        if torch.cuda.is_current_stream_capturing():
            raise Unfit("part of somebody's capture")
        stream = torch.cuda.current_stream(device)
        if self.done is not None:
            stream.wait_event(self.done)
        try:
            yield
        finally:
            self.done = stream.record_event()

    def _check(self, given: dict[str, Any]) -> None:
        """Raises Unfit for a call that is no step."""
        unknown = next((name for name, one in given.items() if name not in KNOWN and not is_absent(one)), None)
        if unknown is not None:
            raise Unfit(f"called with {unknown}")
        tokens, encoder = given.get(TOKENS), given.get(ENCODED)
        if type(tokens) is not torch.Tensor or tokens.dim() != 2 or tokens.shape[1] != 1:
            raise Unfit("more than one token of the decoder behind others")
        if given.get("use_cache") is False or not hasattr(encoder, "last_hidden_state"):
            raise Unfit("no cache, or nothing that an encoder gave")

    def _logits(self, layers: tuple[list, list], given: dict[str, Any]) -> torch.Tensor:
        tokens, encoder, mask = given[TOKENS], given[ENCODED].last_hidden_state, given.get(ENCODER_MASK)
        (rows, _), length = tokens.shape, layers[CROSS][0].get_seq_length()
        mask = mask if self.masked else None
        if tokens.device != layers[OWN][0].keys.device or tokens.device != next(self.module.parameters()).device:
            raise Unfit("tokens on another device than the model, or the cache")
        if encoder.shape[:2] != (rows, length) or layers[OWN][0].keys.shape[0] != rows:
            raise Unfit("a cache of another number of rows, or of another text, than the encoder's")
        if mask is not None and (type(mask) is not torch.Tensor or mask.shape != (rows, length)):
            raise Unfit("a mask of the encoder's tokens in another form than (rows, tokens)")
        start, padding, positions = layers[OWN][0].get_seq_length(), given.get(MASK), given.get(POSITIONS)
        if padding is not None and (not self.padded or padding.shape != (rows, start + 1)):
            raise Unfit("a mask of the decoder's tokens in another form than (rows, tokens)")
        if positions is not None and positions.shape != (rows, 1):
            raise Unfit("positions in another form than (rows, 1)")
        config = self.module.get_decoder().config
        attention, most = getattr(config, ATTENTION, None), getattr(config, "max_position_embeddings", None)
        if attention not in TAKES_MASKS:
            raise Unfit("an attention that takes other masks")
        rooms = room_for(start + 1, most), room_of(length) if self.masked else length
        if mask is None and rooms[CROSS] != length:
            mask = tokens.new_ones(rows, length)
        step = Given(
            _packed(tokens),
            torch.full((), start, device=tokens.device),
            None if mask is None else _filled_up(mask, rooms[CROSS]),
            None if padding is None else _filled_up(padding, rooms[OWN]),
            None if positions is None else _packed(positions),
        )
        holding = self._held(layers, rooms, step)
        self.used = threading.get_ident(), time.monotonic()
        logits = self._run(holding, step, attention)
        holding.lengths[OWN] += 1
        return logits

    def _held(self, layers: tuple[list, list], rooms: tuple[int, int], step: Given) -> Holding:
        """The cache in the fixed memory. Raises Unfit where its steps are better left stock."""
        if self._key(len(step.tokens), rooms, step) in self.declined:
            raise Unfit("a CUDA graph of its steps gains nothing, or is none")
        found = self.holding
        if found is not None and found.holds(layers) and found.room(OWN) == rooms[OWN]:
            return found
        if found is not None:
            thread, last = self.used
            if found.alive and thread != threading.get_ident() and time.monotonic() - last < RECENT:
                raise Unfit("another thread's text is under way")  # or each step would move both
            found.release()
            self.holding = None
        if any(type(layer) not in (DynamicLayer, HeldLayer) for part in layers for layer in part):
            raise Unfit("cache layers of another kind")
        forms = [{(one.shape, one.dtype) for layer in part for one in (layer.keys, layer.values)} for part in layers]
        if any(len(form) > 1 for form in forms):
            raise Unfit("keys and values of different sizes")
        if self.runner is not None and step.tokens.is_cuda:
            firsts = [part[0].keys for part in layers]
            sizes = (
                2 * len(layers[OWN]) * one[:, :, :1].nbytes * room for one, room in zip(firsts, rooms, strict=True)
            )
            if sum(sizes) > 2**20 * self.runner.pool.limit_mb(step.tokens.device):
                raise Unfit("its keys and values take more than graph_memory_gb allows")
        before = self.memory.addresses
        self.holding = Holding(self.memory, layers, rooms)
        self._ready(rooms[OWN])  # here, as what is bound may be looked at, which a graph cannot
        if self.runner is not None and self.memory.addresses != before:
            with self.runner.pool.lock:  # its graphs write where other things may be now
                for entry in self.runner.entries.values():
                    self.runner.pool.drop(entry)
                self.runner.entries.clear()
        return self.holding

    def _key(self, rows: int, rooms: tuple[int, int], step: Given) -> tuple:
        return rows, rooms, *(one is None for one in step[2:])

    def _run(self, holding: Holding, step: Given, attention: str) -> torch.Tensor:
        rooms = holding.room(OWN), holding.room(CROSS)
        holding.settle(OWN)
        holding.settle(CROSS)
        eager: Callable = partial(self.step, holding)
        if self.runner is None or not step.tokens.is_cuda:
            return eager(*step)
        variant = *rooms, attention
        logits = self.runner(eager, tuple(step), {}, variant)
        known = (entry for key, entry in self.runner.entries.items() if key[-1] == variant)
        if self.runner.reason is not None or any(entry.reason is not None for entry in known):
            self.declined.add(self._key(len(step.tokens), rooms, step))
        return logits

    def step(
        self,
        holding: Holding,
        tokens: torch.Tensor,
        start: torch.Tensor,
        mask: torch.Tensor | None,
        padding: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """The logits, (rows, 1, vocabulary), by the model's own code. Nothing it does depends on lengths in Python."""
        holding.place.length = Length(start.reshape(1), 1, holding.room(OWN) - 1)
        rows, dtype = holding.rows, holding.kept[OWN].dtype
        seen = (torch.arange(holding.room(OWN), device=tokens.device) <= start).expand(rows, -1)
        seen = seen if padding is None else seen & padding.bool()
        # What the encoder gave is in the cache: of this the model reads the shape alone, or the trial has failed.
        nothing = torch.full((1, 1, 1), torch.nan, dtype=dtype, device=tokens.device)
        width = self.module.get_encoder().config.hidden_size
        given = {
            TOKENS: tokens,
            ENCODED: encoded(nothing.expand(rows, holding.room(CROSS), width)),
            MASK: hiding(seen, dtype),
            self.cache_name: holding.shown,
            "use_cache": True,
            "return_dict": True,
        }
        given |= {} if mask is None else {ENCODER_MASK: hiding(mask.bool(), dtype)}
        given |= {} if positions is None else {POSITIONS: positions}
        fused = self._ready(holding.room(OWN))
        step = MemoryStep(self.kernels, holding, start, (padding, mask), self.biases) if fused else None
        with nullcontext() if step is None else self.steps.taken(step):
            return type(self.module).forward(self.module, **given).logits

    def _ready(self, room: int) -> bool:
        """Whether the layers may be computed fused. Binds them to the weights where the model has changed."""
        if not self.layers:
            return False
        if self.seen is None or not (self.seen.reachable() and self.seen.holds()):
            self.reason = self._bind()
            self.seen = Fingerprint(self.module)
        longest = min((one.most or room for layer in self.layers for one in layer.biases), default=room)
        reason = self.reason if longest >= room else f"more than {longest} tokens, and a position bias"
        if reason is not None:
            self.log.fell_back(self.path, f"its layers run their own code: {reason}")
        return reason is None

    def _bind(self) -> str | None:
        try:
            self.biases = {one.path: one.bind(self.module) for layer in self.layers for one in layer.biases}
        except (NotUnderstood, AttributeError) as error:  # or it is gone
            return str(error)
        hooked = (f"{one.path} has forward hooks" for one in self.layers if foreign_hooks(one.module))
        return next(hooked, None) or next(filter(None, (one.bind(not self.apart) for one in self.layers)), None)


def room_for(tokens: int, most: int | None) -> int:
    """Of the decoder. most: that it has positions for, None for any number."""
    room = ROOMS
    while room < tokens:
        room *= TIMES
    return min(room, most) if most is not None and tokens <= most else room


def room_of(length: int) -> int:
    """As many tokens of an encoder or a few more."""
    step = max(STEP, (1 << length.bit_length()) // 16)
    return -(-length // step) * step


def _packed(column: torch.Tensor) -> torch.Tensor:
    """(rows, 1), with strides that do not tell of what it is a part, as graphs go by them."""
    return column if column.stride() == (1, 1) else column.clone(memory_format=torch.contiguous_format)


def _filled_up(mask: torch.Tensor, room: int) -> torch.Tensor:
    """(rows, room), 0 behind what is in the mask."""
    return torch.nn.functional.pad(mask, (0, room - mask.shape[1]))
