"""How a model wants to be called: what is found out about it by trying, beside the formulas of its layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from accel.errors import Unfit
from accel.fusion.host_numbers import FEW, on_host
from accel.libraries.attention import MASK
from accel.libraries.generation import ARGUMENTS, LABELS, OUTPUTS, POSITIONS
from accel.llm.generation.shown_cache import empty
from accel.llm.kv_cache.store import Store
from accel.llm.parts.step import Step
from accel.llm.recording.record import is_absent

TOLD = (MASK, "position_ids")  # beside tokens, in a trial
IN_ORDER, BY_MASK = "0, 1, 2 ..", "counted by the mask"  # positions a model gives itself where it is given none


def own_arguments(kwargs: dict) -> frozenset[str]:
    """The names of arguments of a model's own that say something."""
    return frozenset(name for name, value in kwargs.items() if name not in ARGUMENTS and not is_absent(value))


def wanted_of(kwargs: dict, config: Any) -> tuple[bool, bool]:
    """(Whether a call wants a cache, whether it wants a dict). Raises Unfit where it wants more."""
    more = next((name for name in (*OUTPUTS, LABELS) if not is_absent(kwargs.get(name))), None)
    if more is not None:
        raise Unfit(f"called with {more}")
    if any(getattr(config, name, False) for name in OUTPUTS):
        raise Unfit("the configuration asks for attentions, hidden states or router logits")
    given = ((name, kwargs.get(name)) for name in ("use_cache", "return_dict"))
    use_cache, as_dict = (getattr(config, name, True) if value is None else value for name, value in given)
    return use_cache, as_dict


def tokens_of(kwargs: dict, weight: torch.Tensor, alone: bool) -> torch.Tensor:
    """Of a call: (rows, new) numbers, or (rows, new, C) embeddings as those in this weight. Raises Unfit for others.

    alone: it has no cache; without a mask, the masks of some models then keep texts apart whose positions begin anew.
    """
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    tokens = ids if embeds is None else embeds
    if type(tokens) is not torch.Tensor or tokens.dim() != (2 if embeds is None else 3) or not tokens.numel():
        raise Unfit("inputs of another form")
    if embeds is not None and (ids is not None or embeds.shape[-1] != weight.shape[1]):
        raise Unfit("input_ids besides inputs_embeds, or embeddings of another width")
    if embeds is not None and embeds.dtype is not weight.dtype:
        raise Unfit("embeddings of another dtype than the model's")
    places = kwargs.get("position_ids") if alone and kwargs.get(MASK) is None else None
    if type(places) is torch.Tensor and places.dim() == 2 and bool((on_host(places).diff() != 1).any()):
        raise Unfit("positions without a mask, which may be those of several texts in a row")
    return tokens


def padding_of(mask: Any, store: Store, rows: int, tokens: int, left_padded: bool = False) -> torch.Tensor | None:
    """A call's mask, (rows, tokens), if any. left_padded: it hides first tokens alone, or Unfit is raised."""
    if mask is not None and (type(mask) is not torch.Tensor or mask.shape != (rows, tokens)):
        raise Unfit("an attention mask of another form than (rows, tokens)")
    if mask is not None and store.hides_behind_first(mask):
        raise Unfit("an attention mask that hides tokens behind one of padding that was read alone, without a mask")
    if left_padded and mask is not None and not bool((mask.bool().int().diff() >= 0).all()):
        raise Unfit("an attention mask with gaps, where only padding on the left is understood")
    return mask


def shows_all(mask: Any) -> bool:
    """Whether a mask, if there is one, hides nothing. Waits for the device."""
    return mask is None or (type(mask) is torch.Tensor and mask.dim() == 2 and bool(on_host(mask).all()))


class Kept(NamedTuple):
    """A tensor that a module keeps from call to call, and that no forward reads which is given positions.

    path: the module; name: its attribute; field: of the output that hands it on, None where none does.
    """

    path: str
    name: str
    field: str | None


# What an argument of a step may look like: a number for each new token, for each token so far, three an image, or any.
NEW, ALL, GRID, ANY = "new", "all", "grid", "any"


@dataclass(frozen=True)
class CallingConvention:
    """output: the class of what it returns.

    mask: it takes a finished mask of four dimensions, and then makes none. positions: how it counts them where it is
    given a mask without position_ids, IN_ORDER or BY_MASK; None for another way. pads_prompts: a prompt may be padded
    on the right, and the logits of its last real token asked for by a tensor.

    unmasked_alike: it reads a prompt without a mask, or with one that hides nothing, as with one that hides something.
    counts_positions: without mask and position_ids it counts 0, 1, 2 .. itself. position_parts: positions may also be
    (parts, rows, new), with one of these numbers of parts, as of time, height and width. unused_in_steps: arguments, by
    name and form, that change nothing in a step of one token. unused_if_zero: marks of tokens that change nothing where
    all are zero. kept_tensors: what generate() leaves in the model while it counts positions. shown: makes the cache
    that its own code is shown. prepared: a function of its class that prepares inputs of a step as the library's does.
    """

    output: type
    mask: bool
    positions: str | None
    pads_prompts: bool = False
    unmasked_alike: bool = True
    counts_positions: bool = True
    position_parts: tuple[int, ...] = ()
    unused_in_steps: frozenset[tuple[str, str]] = frozenset()
    unused_if_zero: frozenset[str] = frozenset()
    kept_tensors: tuple[Kept, ...] = ()
    shown: Callable[[Step], Any] = empty
    prepared: Callable | None = None

    @property
    def ignored_attributes(self) -> tuple[tuple[str, str], ...]:
        """What may change from call to call, as `Fingerprint` takes it."""
        return tuple((one.path, one.name) for one in self.kept_tensors)

    def unknown(self, kwargs: dict, rows: int, start: int, new: int) -> str | None:
        """That a call of `new` tokens behind `start` has an argument which says something and is not understood."""
        for name in filter(own_arguments(kwargs).__contains__, kwargs):
            value = kwargs[name]
            if type(value) is not torch.Tensor or not self.is_absent(name, value, rows, start, new):
                return f"called with {name}"
        return None

    def is_absent(self, name: str, value: torch.Tensor, rows: int, start: int, new: int) -> bool:
        """Whether an argument makes no difference to a call of `new` tokens behind `start`."""
        if (
            start
            and new == 1
            and any((name, form) in self.unused_in_steps for form in forms(value.shape, rows, start, new))
        ):
            return True
        # Waits for the GPU, once a prompt.
        return name in self.unused_if_zero and value.shape == (rows, new) and not bool(on_host(value).any())

    def read_mask(
        self, mask: Any, store: Store, rows: int, start: int, new: int, left_padded: bool
    ) -> torch.Tensor | None:
        """The mask of a call, (rows, start + new), if any. left_padded: it may only hide first tokens. Raises Unfit."""
        # A bias by distance is counted by the mask in stock; with padding on the left alone the two differ by a
        # constant, which the softmax does not see.
        mask = padding_of(mask, store, rows, start + new, left_padded)
        if mask is None:
            if new > 1 and not self.unmasked_alike:
                raise Unfit("without a mask it reads a prompt in a way of its own")
            return None
        if new > 1 and not self.unmasked_alike and bool(mask.all()):
            raise Unfit("where nothing is hidden it reads a prompt in a way of its own")
        return mask

    def read_positions(
        self, positions: Any, mask: torch.Tensor | None, rows: int, start: int, new: int, device: torch.device
    ) -> torch.Tensor:
        """(1 or rows, new), or that of several parts, (parts, 1 or rows, new). Raises Unfit."""
        if positions is not None:
            positions = self.of_one_part(positions)
            shape = positions.shape if type(positions) is torch.Tensor else ()
            several = [(), *((parts,) for parts in self.position_parts)]
            if shape[-2:] not in ((rows, new), (1, new)) or shape[:-2] not in several:
                raise Unfit("position_ids of another form")
            if positions.device != device:
                raise Unfit("position_ids on another device")
            return positions
        if self.kept_tensors:
            raise Unfit("no position_ids, and the model goes on with what it counted before")
        if mask is None and not self.counts_positions:
            raise Unfit("neither a mask nor position_ids")
        if mask is None or self.positions == IN_ORDER:
            return torch.arange(start, start + new, device=device).unsqueeze(0)
        if self.positions != BY_MASK:
            raise Unfit("a mask without position_ids")
        mask = mask.long()
        return (mask.cumsum(1) * mask - 1).clamp_(min=0)[:, start:]  # padding has a row of a table too

    def of_one_part(self, positions: Any) -> Any:
        """Positions in parts of which layers understand one, where all are alike: that one. Waits for the device."""
        if type(positions) is not torch.Tensor or positions.dim() != 3 or not self.kept_tensors:
            return positions
        known = len(positions) in self.position_parts
        return positions if known or bool((positions != positions[:1]).any()) else positions[0]

    def count_positions(self, model: Any, ids: list[int], given: dict[str, Any]) -> tuple[torch.Tensor, int]:
        """Positions of a prompt as generate() counts them, (1, tokens) or of several parts, on the CPU; then how far
        those of tokens behind it are from their places. Raises Unfit where they go on in several ways.
        """
        tokens = torch.tensor([ids], device="cpu")
        known = {name: one.cpu() for name, one in given.items() if type(one) is torch.Tensor and one.numel() <= FEW}
        kept = [(model.get_submodule(one.path), one.name) for one in self.kept_tensors]
        before = [getattr(module, name) for module, name in kept]
        try:
            counted = getattr(model, POSITIONS)(tokens, known | {"attention_mask": torch.ones_like(tokens)})
        finally:
            for (module, name), value in zip(kept, before, strict=True):
                setattr(module, name, value)
        found = self.of_one_part(counted)
        if found.dim() == 3 and len(found) not in self.position_parts:
            raise Unfit("positions of another form than those of a text")
        ends = set(found[..., -1].flatten().tolist()) - (
            {len(ids) - 1} if found.dim() == 3 and len(found) > 3 else set()
        )
        if len(ends) > 1:
            raise Unfit("a prompt that ends within a picture")
        return found, ends.pop() + 1 - len(ids) if ends else 0

    def handed_on(self, model: nn.Module, given: dict[str, Any]) -> dict[str, object]:
        """The fields of the output that hold what the model keeps, or was given: as a mask, or the trial failed."""
        held = {one.field: getattr(model.get_submodule(one.path), one.name) for one in self.kept_tensors if one.field}
        held |= {name: given.get(name) for name in getattr(self.output, "__dataclass_fields__", ()) if name in TOLD}
        return {field: value for field, value in held.items() if value is not None}


def forms(shape: tuple[int, ...], rows: int, start: int, new: int) -> list[str]:
    """The forms that an argument of this shape may have."""
    lengths = {NEW: new, ALL: start + new}
    found = [form for form, length in lengths.items() if shape == (rows, length)]
    return [*found, *[GRID] * (shape[1:] == (3,)), *[ANY] * (len(shape) == 2)]
