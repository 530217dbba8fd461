"""What a step of the decoder is given, in the forms that a graph of it holds for."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from accel.encoders.packing import EMPTY
from accel.errors import Unfit
from accel.libraries.attention import ATTENTION
from accel.libraries.cache import ENCODED, ENCODER_MASK, MASK, MASK_BESIDE, MASK_OF_FRAMES, POSITIONS, TOKENS
from accel.patching.owner import InstanceMethod
from accel.seq2seq.fixed_memory import CROSS, OWN

ROOMS, TIMES = 128, 4  # tokens of the decoder that there is room for, and how many times as many next
STEP = 64  # tokens of an encoder are rounded up to a multiple of this, or of an eighth
TAKES_MASKS = ("sdpa", "eager")  # attentions that add a mask of numbers to the scores


class MaskOfTokens(InstanceMethod):
    """Stands for the method of a module by which its model makes one of frames: a mask of scores it leaves alone."""

    name = MASK_OF_FRAMES

    def __init__(self, module: Any):
        self.module = module

    @property
    def owner(self) -> Any:
        return self.module

    def call(self, length: int, mask: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """length: of the encoder. mask: (rows, frames), or in a step what is added to scores, (rows, 1, 1, length)."""
        return mask if mask.shape[1:] == (1, 1, length) else self.stock(length, mask, *args, **kwargs)


class MaskByLengths(NamedTuple):
    """Makes a mask of tokens of one of frames, as models do by themselves. counts: how many tokens each row has."""

    counts: Callable[[torch.Tensor], torch.Tensor]

    def stock(self, length: int, mask: torch.Tensor) -> torch.Tensor:
        """(rows, length) bool. mask: (rows, frames)."""
        return torch.arange(length, device=mask.device) < self.counts(mask).to(mask.device)[:, None]


class Masks(NamedTuple):
    """Which masks a model reads. encoder: of the encoder's tokens, else all count; beside: that is what the encoder
    gave; frames: what makes it of a mask of frames. own: of the decoder's tokens.
    """

    encoder: bool = False
    beside: bool = False
    own: bool = False
    frames: MaskOfTokens | MaskByLengths | None = None


class Given(NamedTuple):
    """What a step is given. start: tokens before it, (), int64; others as the model takes them, None for none.

    mask, padding: of the encoder's tokens and the decoder's, (rows, room).
    """

    tokens: torch.Tensor
    start: torch.Tensor
    mask: torch.Tensor | None
    padding: torch.Tensor | None
    positions: torch.Tensor | None


class TextStep(NamedTuple):
    """A step of a text: what it is given, the rooms of both parts of the memory, and by which attention."""

    given: Given
    rooms: tuple[int, int]
    attention: str

    def after(self, tokens: torch.Tensor, start: int) -> "TextStep":
        """A later one of the same text."""
        return self._replace(given=self.given._replace(tokens=_packed(tokens), start=_number(start, tokens)))

    @property
    def key(self) -> tuple:
        """Equal for steps of one graph."""
        return len(self.given.tokens), self.rooms, *(one is None for one in self.given[2:])


class HiddenTexts:
    """Whether a mask, (rows, tokens), hides all of a row. Asked once, as it waits for the GPU."""

    def __init__(self) -> None:
        self.known: tuple[Callable[[], torch.Tensor | None], int, bool] = (lambda: None), 0, False

    def __call__(self, mask: torch.Tensor) -> bool:
        version = 0 if mask.is_inference() else mask._version
        of, then, found = self.known
        if of() is not mask or then != version:
            found = not bool(mask.any(-1).all())
            self.known = weakref.ref(mask), version, found
        return found


def hides_a_text(forward: Any, *args: Any, **kwargs: Any) -> str | None:
    """Of a text that is all padding, what attention makes of nothing is told by rounding."""
    mask = forward.named(args, kwargs).get(ENCODER_MASK)
    known = forward.masks.encoder and type(mask) is torch.Tensor and mask.dim() == 2 and not mask.is_meta
    return EMPTY if known and forward.hidden_texts(mask) else None


def step_behind(forward: Any, given: dict[str, Any], start: int, length: int) -> TextStep:
    """The step that a call of one token stands for. Raises Unfit where it is none.

    given: the call's keywords; start: tokens before it; length: of the encoder.
    """
    model, masks = forward.module, forward.masks
    tokens, encoder = given[TOKENS], given[ENCODED].last_hidden_state
    rows, mask = tokens.shape[0], getattr(given[ENCODED], MASK_BESIDE, None)
    if mask is not None and not masks.beside:
        raise Unfit("a mask beside what the encoder gave")
    if not masks.beside:
        mask = given.get(ENCODER_MASK) if masks.encoder else None
    if mask is not None and masks.frames is not None:
        mask = masks.frames.stock(length, mask)
    if tokens.device != next(model.parameters()).device:
        raise Unfit("tokens on another device than the model")
    if encoder.shape[:2] != (rows, length):
        raise Unfit("a cache of another text than the encoder's, or of other rows")
    if mask is not None and (type(mask) is not torch.Tensor or mask.shape != (rows, length)):
        raise Unfit("a mask of the encoder's tokens in another form than (rows, tokens)")
    padding, positions = given.get(MASK), given.get(POSITIONS)
    if padding is not None and (not masks.own or padding.shape != (rows, start + 1)):
        raise Unfit("a mask of the decoder's tokens in another form than (rows, tokens)")
    if positions is not None and positions.shape != (rows, 1):
        raise Unfit("positions in another form than (rows, 1)")
    config = getattr(model.get_decoder(), "config", model.config)
    attention, most = getattr(config, ATTENTION, None), getattr(config, "max_position_embeddings", None)
    if attention not in TAKES_MASKS:
        raise Unfit("an attention that takes other masks")
    if forward.counts and start >= (most or 0):  # a GPU would not come back from a place behind a table
        raise Unfit("more tokens than there are positions for")
    rooms = room_for(start + 1, most), room_of(length) if masks.encoder or masks.beside else length
    if mask is None and rooms[CROSS] != length:
        mask = tokens.new_ones(rows, length)
    step = Given(
        _packed(tokens),
        _number(start, tokens),
        None if mask is None else _filled_up(mask, rooms[CROSS]),
        None if padding is None else _filled_up(padding, rooms[OWN]),
        None if positions is None else _packed(positions),
    )
    return TextStep(step, rooms, attention)


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


def _number(number: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), number, device=like.device)


def _filled_up(mask: torch.Tensor, room: int) -> torch.Tensor:
    """(rows, room), 0 behind what is in the mask."""
    return torch.nn.functional.pad(mask, (0, room - mask.shape[1]))
