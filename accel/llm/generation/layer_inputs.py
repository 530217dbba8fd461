"""Checks what stock code gives the fused layers, so that calls with unknown arguments, such as images, run fused.

The model's own code makes hidden states, masks and angles of its arguments, and a layer computes of these what it does
in a text. A mask that hides the future, the padding and what a window has passed, and nothing else, is not read. By
another one, as of images whose tokens see each other, attend the layers that are known to do so.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from accel_kernels import KV, RowStates

from accel.errors import Unfit
from accel.fusion.host_numbers import HostNumbers, few_on_host
from accel.libraries.attention import MASK
from accel.libraries.cache import Cache
from accel.libraries.generation import ENCODED, POSITIONS, stock_methods
from accel.llm.attention.rotary import Rotary
from accel.llm.attention.softmax_attention import SoftmaxSpec
from accel.llm.attention.stock.stock_attention import StockSpec
from accel.llm.generation.calling_convention import own_arguments
from accel.llm.generation.layer_forward import LayerForward
from accel.llm.generation.prefill import PromptLayers
from accel.llm.parts.step import Step
from accel.llm.recording.record import form, is_absent
from accel.llm.recording.window import Chunk
from accel.llm.runtime.layer_spec import LayerSpec

HIDDEN_STATES = "hidden_states"  # as decoder layers of transformers name it
NOT_CAUSAL = "its attention mask is not causal"
OTHER_TURNS = "its heads are turned by other angles than those of a text"
OTHER_TOKENS = "its layers are given other tokens than the model"
OF_ONE_CALL = (NOT_CAUSAL, OTHER_TURNS, OTHER_TOKENS)  # which another one with the same arguments may not be
# Of tokens and pictures: handed on also where nobody reads them.
PLACES = ("position_ids", "cache_position", "logits_to_keep", "image_sizes")


class CheckedStep(Step):
    """One forward of `tokens`, (rows, new) numbers or (rows, new, C) embeddings, behind `start`, by the model's code.

    forward: the `DecoderForward`. cache: the caller's, over the store of `kvs`. mask: (rows, start + new), of the
    padding; None where it hides nothing. checked: layers' inputs are compared. names: of its own arguments, which tell
    whether masks are likely to be causal: to find out waits for the device. turns: so may halves of heads be turned by
    positions of their own. bare: layers are without a mask. reason: what the first layer was given that no text gives
    it; then all layers run stock. ran: those that ran fused. masks: by which layers attend, by the id of what they are
    given. stretch: runs them in graphs; None where none may.
    """

    __slots__ = (
        "bare", "by_mask", "cache", "checked", "device", "given", "known", "masks", "padding", "ran", "reason", "seen",
        "start", "stretch", "turns",
    )  # fmt: skip

    def __init__(
        self,
        forward: Any,
        kvs: Mapping[int, KV | RowStates],
        cache: Cache | None,
        tokens: torch.Tensor,
        start: int,
        mask: torch.Tensor | None,
        checked: bool,
        names: frozenset[str],
        stretch: PromptLayers | None = None,
    ):
        super().__init__(kvs)
        self.stretch = stretch
        self.cache, self.start, self.padding, self.checked = cache, start, mask, checked
        self.bare, self.by_mask, dtype = (
            forward.convention.unmasked_alike,
            names in forward.masked,
            forward.embeddings().dtype,
        )
        self.turns = not (forward.convention.position_parts or stock_methods(forward.module, POSITIONS))
        self.masks: dict[int, torch.Tensor] = {}
        self.known: HostNumbers | None = None
        self.given, self.device = (*tokens.shape[:2], dtype), tokens.device
        self.reason: str | None = None
        self.ran: list[LayerForward] = []
        self.seen: dict[Any, tuple] = {}  # masks and angles, kept so that no other has their id, and whether they fit

    def runs_stock(self, layer: LayerForward, args: tuple, kwargs: dict) -> bool:
        """Raises Unfit where layers before it have computed already."""
        if self.known is not None and (self.stretch is None or self.stretch.goes_on):
            self.known.leave()
            self.known = None
        if self.checked and self.reason is None:
            self.reason = self._unlike(layer.spec, args, kwargs)
            if self.reason is not None and self.ran:
                raise Unfit(self.reason)
            self.ran.append(layer)
        return self.reason is not None

    def of_layer(self, layer: LayerForward, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        if layer.spec.borrows and x.shape[1] < self.given[1]:
            # Tokens of which logits are wanted, which read what all have stored.
            self.written = dict.fromkeys(self.kvs, self.given[1])
            if self.stretch is not None:
                self.stretch.leave()
            return layer.computed(self, x, kwargs)
        if self.masks:
            self.stretch = None
        return layer.computed(self, x, kwargs) if self.stretch is None else self.stretch.run(self, layer, x, kwargs)

    def _unlike(self, spec: LayerSpec, args: tuple, kwargs: dict) -> str | None:
        """What a layer is given that no text gives it."""
        x = args[0] if args else kwargs[HIDDEN_STATES]
        rows, new, dtype = self.given
        last = x.shape[1]  # of the new tokens
        fits = x.shape[0] == rows and (last == new or (last < new and spec.borrows))
        if not fits or x.dtype not in (dtype, spec.widths.total):
            return OTHER_TOKENS
        if not any(value is self.cache for value in kwargs.values()):
            return "its layers are given another cache than the model"
        known = dict(spec.given)
        read = spec.keywords
        for name in {*read, *kwargs}:
            value = kwargs.get(name)
            unread = name not in read and (name in PLACES or is_absent(value))
            if name in (HIDDEN_STATES, MASK) or value is self.cache or unread or form(value) == known.get(name):
                continue
            return f"its layers are given {name} as no text gives it"
        if spec.attention is None or isinstance(spec.attention, StockSpec):
            return None
        mask, window, parts = kwargs.get(MASK), spec.attention.window, spec.attention.mixers
        if self.turns and not all(self._turned(getattr(part, "rotary", None), kwargs) for part in parts):
            return OTHER_TURNS
        key = id(mask), window, last, tuple(part.keeps_state for part in parts)
        if self.by_mask and self._attends_by(spec.attention, mask, last):
            return None
        if key not in self.seen:
            alone = len(parts) == 1  # else a state's own mask has another name, and no text gives one
            shown = (
                self._of_padding(mask if alone else None) if part.keeps_state else self._causal(mask, window, last)
                for part in parts
            )
            self.seen[key] = mask, all(shown)
        return None if self.seen[key][1] or self._attends_by(spec.attention, mask, last) else NOT_CAUSAL

    def _turned(self, rotary: Rotary | None, kwargs: dict) -> bool:
        """Whether a layer is given one angle for each pair of channels. Waits for the device."""
        if rotary is None or not rotary.given:
            return True
        table = kwargs[rotary.name]
        if id(table) not in self.seen:
            self.seen[id(table)] = table, rotary.fits(kwargs, None)
        return self.seen[id(table)][1]

    def mask(self, spec: Any, kwargs: dict) -> torch.Tensor | None:
        mask = kwargs.get(MASK)
        return None if mask is None and not spec.sees_all else self.masks.get(id(mask))

    def _attends_by(self, spec: Any, mask: Any, last: int) -> bool:
        """Whether an attention is one that can attend by this mask of the last tokens, which is noted then."""
        if last == 1 or not isinstance(spec, SoftmaxSpec) or not (spec.masked if mask is not None else spec.sees_all):
            return False
        if id(mask) not in self.masks:
            end = self.start + self.given[1]
            shown = (
                torch.ones((), dtype=torch.bool, device=self.device).expand(1, 1, last, end)
                if mask is None
                else self._shown(mask, last)
            )
            if shown is None:
                return False
            self.masks[id(mask)] = F.pad(shown, (end - shown.shape[3], 0))
        return True

    def _shown(self, mask: Any, last: int) -> torch.Tensor | None:
        """(rows or 1, heads or 1, last, tokens) bool of such a mask, or of one that is added to scores, which waits for
        the device; None of another.
        """
        end = self.start + self.given[1]
        if type(mask) is not torch.Tensor or mask.dim() != 4 or mask.shape[2] != last or mask.shape[3] > end:
            return None
        if mask.dtype is torch.bool:
            return mask
        shown = mask == 0
        hides = mask.is_floating_point() and bool((shown | (mask <= torch.finfo(mask.dtype).min)).all())
        return shown if hides else None

    def _of_padding(self, mask: Any) -> bool:
        """Whether a mask of a layer that keeps a state hides the padding among the new tokens, and that stands first.

        Waits for the device.
        """
        new = self.given[1]
        if self.padding is None or new == 1:
            return mask is None
        first = bool((self.padding.bool().int().diff() >= 0).all())
        wanted = self.padding[:, -new:].bool()
        return first and (bool(wanted.all()) if mask is None else torch.equal(mask.bool(), wanted))

    def _causal(self, mask: Any, window: int | None, last: int) -> bool:
        """Whether a mask shows every query, of the last tokens, the keys up to its own, but for padding and what a
        window has passed.

        Queries that are padding may see anything. Waits for the device.
        """
        end = self.start + self.given[1]
        if mask is None:
            return self.bare and self.padding is None
        if type(mask) is torch.Tensor and mask.dim() == 2:  # of an attention that is causal by itself
            return self.bare and self.padding is not None and torch.equal(mask.bool(), self.padding.bool())
        if (shown := self._shown(mask, last)) is None:
            return False
        keys = torch.arange(end, device=mask.device)
        queries = keys[end - last :, None]
        visible = (keys <= queries)[None, None]
        real = shown.new_ones(1, end) if self.padding is None else self.padding.bool()
        visible = visible & real[:, None, None]
        if isinstance(window, Chunk):
            first = (real.cumsum(1) == 0).sum(1)[:, None, None, None]
            visible = visible & ((queries - first) // window == (keys - first) // window)
        elif window is not None:
            visible = visible & (queries - keys < window)
        shown = F.pad(shown, (end - mask.shape[3], 0))  # keys that a cache with a window has no more
        return not bool(((visible ^ shown) & real[:, None, end - last :, None]).any())


@contextmanager
def under_way(forward: Any, step: CheckedStep, known: HostNumbers | dict[str, Any]) -> Iterator[None]:
    """Inside, the model's own code runs around fused layers. known: what it may read on the host up to the first one,
    or the call's arguments, of which it may read the integers.
    """
    if isinstance(known, dict):  # where pictures are being encoded, to ask for integers would wait for that
        known = HostNumbers.of_call(known, waits=ENCODED not in known)
    known.note()
    step.known = known if known.known else None
    ranks, stretch = nullcontext() if forward.ranks is None else forward.ranks.forward(), step.stretch
    try:
        with forward.steps.taken(step), ranks, step.known or nullcontext():
            yield
    finally:
        if stretch is not None:
            stretch.end(step.stretch is stretch and step.ran == forward.layers and step.reason is None)


def read_whole(
    forward: Any, kvs: dict[int, Any], tokens: torch.Tensor, positions: torch.Tensor | None, given: dict[str, Any]
) -> torch.Tensor:
    """The logits of the last token of a prompt, (1, tokens), by the own code of a `DecoderForward`'s model with these
    arguments, into empty stores. Raises Unfit where its layers are given what they do not understand.
    """
    forward.ready()
    names, device = own_arguments(given), tokens.device
    step = CheckedStep(forward, kvs, None, tokens, 0, None, True, names)
    step.cache = forward.convention.shown(step)
    there = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in given.items()}
    known = HostNumbers((there[name], one) for name, one in given.items() if device.type == "cuda" and few_on_host(one))
    given = there | {"input_ids": tokens} | forward.given_cache(step.cache)
    given |= {} if positions is None else {"position_ids": positions.to(device)}
    given |= {"logits_to_keep": 1} if "logits_to_keep" in forward.names else {}
    with under_way(forward, step, known):
        logits = type(forward.module).forward(forward.module, **given).logits
    if step.reason is not None or step.ran != forward.layers:
        raise Unfit(step.reason or "its layers do not run one after another")
    if step.masks:
        forward.masked.add(names)
    return logits[:, -1:]
