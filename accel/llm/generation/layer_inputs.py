"""What stock code around fused layers hands them, looked at before they compute by it.

So a call runs fused whose arguments are not understood, such as images: the model's own code makes hidden states, masks
and angles of them. A layer is the function of its inputs that it was in a text; what it knows nothing of is a mask that
hides something else than the future, the padding and what a window has passed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accel_kernels import KV

from accel.libraries.cache import Cache
from accel.llm.analysis.layer import LayerSpec
from accel.llm.recording.record import says_nothing
from accel.llm.runtime.layer import LayerForward
from accel.llm.runtime.step import Step

HIDDEN_STATES, MASK = "hidden_states", "attention_mask"  # as every decoder layer of transformers names them


class UnlikeText(Exception):
    """What a layer was given that no text gives it, after others have computed."""


class CheckedStep(Step):
    """One forward by the model's own code. new: tokens of each row, behind `start`.

    mask: (rows, start + new), of the padding; None where it hides nothing. bare: without a mask a layer is causal.
    reason: why the first layer was not given what a text gives it; all layers run stock then, within the same forward.
    """

    __slots__ = ("bare", "mask", "ran", "reason", "seen", "start", "width")

    def __init__(
        self,
        kvs: Sequence[KV] | Mapping[int, KV],
        tokens: torch.Tensor,
        start: int,
        mask: torch.Tensor | None,
        bare: bool,
        dtype: torch.dtype,
    ):
        super().__init__(kvs)
        self.start, self.mask, self.bare = start, mask, bare
        self.width = (*tokens.shape[:2], dtype)
        self.reason: str | None = None
        self.ran: list[LayerForward] = []
        self.seen: dict[tuple, tuple] = {}  # masks that were looked at, which must live as long as their ids

    def leaves(self, layer: LayerForward, args: tuple, kwargs: dict) -> bool:
        if self.reason is None:
            reason = self._unlike(layer.spec, args, kwargs)
            if reason is not None and self.ran:
                raise UnlikeText(reason)
            self.reason = reason
            self.ran.append(layer)
        return self.reason is not None

    def _unlike(self, spec: LayerSpec, args: tuple, kwargs: dict) -> str | None:
        """What a layer is given that no text gives it."""
        x = args[0] if args else kwargs[HIDDEN_STATES]
        if (*x.shape[:2], x.dtype) != self.width:
            return "its layers are given other tokens than the call"
        if not all(map(says_nothing, args[1:])):
            return "a layer is given more than hidden states by place"
        for name, value in kwargs.items():
            if name in (HIDDEN_STATES, MASK) or says_nothing(value) or isinstance(value, Cache):
                continue
            if name not in spec.given or not self._plain(value):
                return f"a layer is given {name}"
        return self._unlike_mask(kwargs.get(MASK), spec.attention.sees)

    def _plain(self, value: object) -> bool:
        """Whether a value is a number, positions of tokens, or tables of angles, one a token."""
        if isinstance(value, tuple | list):
            return all(_is_table(one) and one.shape[-2] == self.width[1] for one in value)
        if isinstance(value, torch.Tensor):
            return value.dim() <= 2 and not value.is_floating_point()
        return isinstance(value, bool | int | float | str)

    def _unlike_mask(self, mask: Any, window: int | None) -> str | None:
        key = id(mask), window
        if key not in self.seen:
            self.seen[key] = mask, None if self._as_in_text(mask, window) else "its attention mask is not causal"
        return self.seen[key][1]

    def _as_in_text(self, mask: Any, window: int | None) -> bool:
        """Whether a mask shows every query the tokens up to its own, but for padding and what a window has passed.

        Waits for the device. What a query sees that is padding itself is nobody's concern.
        """
        if mask is None:
            return self.bare and self.mask is None
        end = self.start + self.width[1]
        if type(mask) is not torch.Tensor:
            return False
        if mask.dim() == 2:  # of the padding, for an attention that is causal by itself
            return self.bare and self.mask is not None and mask.shape == self.mask.shape and torch.equal(mask, self.mask)
        if mask.dim() != 4 or mask.shape[2] != self.width[1] or mask.shape[3] > end:
            return False
        shown = mask
        if mask.dtype is not torch.bool:
            shown = mask == 0
            if not bool((shown | (mask <= torch.finfo(mask.dtype).min)).all()):
                return False
        keys, queries = torch.arange(end, device=mask.device), torch.arange(self.start, end, device=mask.device)[:, None]
        visible = keys <= queries
        if window is not None:
            visible = visible & (queries - keys < window)
        first = end - mask.shape[3]
        if bool(visible[:, :first].any()):
            return False
        differs = shown ^ visible[:, first:]
        if self.mask is not None:
            real = self.mask.bool()
            visible = visible & real[:, None, None]
            differs = (shown ^ visible[..., first:]) & real[:, None, self.start :, None]
        return not bool(differs.any())


def _is_table(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 3 and value.is_floating_point()
