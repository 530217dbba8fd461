"""Checks what stock code gives the fused layers, so that calls with unknown arguments, such as images, run fused.

The model's own code makes hidden states, masks and angles of its arguments, and a layer computes of these what it does
in a text. A fused layer does not read its mask: that must hide the future, the padding and what a window has passed,
and nothing else.
"""

from collections.abc import Mapping
from typing import Any

import torch
from accel_kernels import KV, RowStates

from accel.errors import Unfit
from accel.libraries.cache import Cache
from accel.llm.attention.stock.stock_attention import StockSpec
from accel.llm.generation.layer_forward import LayerForward
from accel.llm.parts.step import Step
from accel.llm.recording.record import Chunk, form, is_absent
from accel.llm.runtime.layer_spec import LayerSpec

HIDDEN_STATES, MASK = "hidden_states", "attention_mask"  # as decoder layers of transformers name them
NOT_CAUSAL = "its attention mask is not causal"
PLACES = ("position_ids", "cache_position")  # of tokens: handed on also where nobody reads them


class CheckedStep(Step):
    """One forward of `tokens`, (rows, new) numbers or (rows, new, C) embeddings, behind `start`, by the model's code.

    cache: the caller's, over the store of `kvs`. dtype: of hidden states. mask: (rows, start + new), of the padding;
    None where it hides nothing. bare: layers are causal without a mask. checked: layers' inputs are compared.
    reason: what the first layer was given that no text gives it; then all layers run stock. ran: those that ran fused.
    """

    __slots__ = ("bare", "cache", "checked", "given", "mask", "ran", "reason", "seen", "start")

    def __init__(
        self,
        kvs: Mapping[int, KV | RowStates],
        cache: Cache,
        tokens: torch.Tensor,
        dtype: torch.dtype,
        start: int,
        mask: torch.Tensor | None,
        bare: bool,
        checked: bool,
    ):
        super().__init__(kvs)
        self.cache, self.start, self.mask, self.bare, self.checked = cache, start, mask, bare, checked
        self.given = (*tokens.shape[:2], dtype)
        self.reason: str | None = None
        self.ran: list[LayerForward] = []
        self.seen: dict[tuple, tuple] = {}  # masks, kept so that no other has their id, and whether they are causal

    def runs_stock(self, layer: LayerForward, args: tuple, kwargs: dict) -> bool:
        """Raises Unfit where layers before it have computed already."""
        if self.checked and self.reason is None:
            self.reason = self._unlike(layer.spec, args, kwargs)
            if self.reason is not None and self.ran:
                raise Unfit(self.reason)
            self.ran.append(layer)
        return self.reason is not None

    def _unlike(self, spec: LayerSpec, args: tuple, kwargs: dict) -> str | None:
        """What a layer is given that no text gives it."""
        x = args[0] if args else kwargs[HIDDEN_STATES]
        rows, new, dtype = self.given
        if x.shape[:2] != (rows, new) or x.dtype not in (dtype, spec.widths.total):
            return "its layers are given other tokens than the model"
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
        key = id(mask), window, tuple(part.keeps_state for part in parts)
        if key not in self.seen:
            alone = len(parts) == 1  # else a state's own mask has another name, and no text gives one
            shown = (
                self._of_padding(mask if alone else None) if part.keeps_state else self._causal(mask, window)
                for part in parts
            )
            self.seen[key] = mask, all(shown)
        return None if self.seen[key][1] else NOT_CAUSAL

    def _of_padding(self, mask: Any) -> bool:
        """Whether a mask of a layer that keeps a state hides the padding among the new tokens, and that stands first.

        Waits for the device.
        """
        new = self.given[1]
        if self.mask is None or new == 1:
            return mask is None
        first = bool((self.mask.bool().int().diff() >= 0).all())
        wanted = self.mask[:, -new:].bool()
        return first and (bool(wanted.all()) if mask is None else torch.equal(mask.bool(), wanted))

    def _causal(self, mask: Any, window: int | None) -> bool:
        """Whether a mask shows every query the keys up to its own, but for padding and what a window has passed.

        Queries that are padding may see anything. Waits for the device.
        """
        new = self.given[1]
        end = self.start + new
        if mask is None:
            return self.bare and self.mask is None
        if type(mask) is not torch.Tensor:
            return False
        if mask.dim() == 2:  # of an attention that is causal by itself
            return self.bare and self.mask is not None and torch.equal(mask.bool(), self.mask.bool())
        if mask.dim() != 4 or mask.shape[2] != new or mask.shape[3] > end:
            return False
        if mask.dtype is not torch.bool and not mask.is_floating_point():
            return False
        shown = mask if mask.dtype is torch.bool else mask == 0
        if shown is not mask and not bool((shown | (mask <= torch.finfo(mask.dtype).min)).all()):
            return False
        keys = torch.arange(end, device=mask.device)
        queries = keys[self.start :, None]
        visible = (keys <= queries)[None, None]
        real = torch.ones(1, end, dtype=torch.bool, device=mask.device) if self.mask is None else self.mask.bool()
        visible = visible & real[:, None, None]
        if isinstance(window, Chunk):
            first = (real.cumsum(1) == 0).sum(1)[:, None, None, None]
            visible = visible & ((queries - first) // window == (keys - first) // window)
        elif window is not None:
            visible = visible & (queries - keys < window)
        shown = torch.nn.functional.pad(shown, (end - mask.shape[3], 0))  # keys that a cache with a window has no more
        return not bool(((visible ^ shown) & real[:, None, self.start :, None]).any())
