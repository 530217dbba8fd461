"""The trial of steps of a decoder: small texts, compared with stock."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accel.comparison import relative_rms
from accel.errors import Unfit, reason_of
from accel.libraries.cache import (
    ENCODED,
    ENCODER_MASK,
    LENGTHS_OF_FRAMES,
    MASK,
    MASK_OF_FRAMES,
    TOKENS,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    cache_of,
    empty_pair,
    encoded,
)
from accel.llm.recording.position_table import within_tables
from accel.llm.recording.record import NotUnderstood
from accel.patching.fast_forward import as_written
from accel.patching.rule import ForwardPatch, Patch
from accel.patching.structure import placement
from accel.seq2seq.decoder import FIRST, Seq2SeqForward
from accel.seq2seq.fixed_memory import CROSS
from accel.seq2seq.held_layers import ASKED
from accel.seq2seq.step_inputs import MaskByLengths, MaskOfTokens
from accel.tolerances import LOGITS, bound

ROWS, BEGUN, STEPS, FRAMES = 2, 3, 2, 12  # of a trial: tokens of the decoder before its steps, and of the encoder
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}


def patches_of(forward: Seq2SeqForward) -> list[Patch]:
    """What steps need on the model."""
    frames = [one for one in forward.module.modules() if hasattr(type(one), MASK_OF_FRAMES)]
    frames = frames if forward.masks.frames is not None else []
    masks = [Patch(one, MASK_OF_FRAMES, MaskOfTokens(one)) for one in frames]
    return [*masks, *(ForwardPatch(one.module, one) for one in forward.layers)]


@contextmanager
def patched(forward: Seq2SeqForward) -> Iterator[None]:
    """Inside, the model has what steps need."""
    with ExitStack() as undo:
        for patch in patches_of(forward):
            patch.apply()
            undo.callback(patch.undo)
        yield


class Waits(TorchDispatchMode):
    """Sees what a step asks the device for, which no graph can. found: the first such operation."""

    found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.name().partition(".")[0] in WAITS:
            self.found = self.found or func.name()
        return func(*args, **(kwargs or {}))


class Text(NamedTuple):
    """What stock makes of a small text. more: keywords besides its tokens; first: what it returns of its first tokens;
    begun: its cache behind these; wanted: what the steps behind these return.
    """

    more: dict[str, torch.Tensor]
    first: Any
    begun: Any
    wanted: list[Any]


class StepTrial:
    """Compares small texts with stock, and finds out which masks the model reads. Raises NotUnderstood."""

    def __init__(self, forward: Seq2SeqForward):
        model = forward.module
        device, dtype = placement(model)
        generator = torch.Generator().manual_seed(0)
        config = getattr(model.get_encoder(), "config", None)
        width = getattr(config and config.get_text_config(), "hidden_size", None)  # of an encoder of pictures too
        words = getattr(getattr(model.get_decoder(), "get_input_embeddings", bool)(), "weight", None)
        if not isinstance(width, int) or words is None:
            raise NotUnderstood("its encoder's width, or its decoder's table of words, is in another place")
        layers = DynamicCache(config=model.get_decoder().config).layers
        if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
            raise NotUnderstood("its cache keeps other things than keys and values")
        self.forward, forward.width = forward, width
        self.reason: str | None = None  # why the model's own code computes no steps
        self.hidden = torch.randn(ROWS, FRAMES, width, generator=generator, device="cpu").to(device, dtype)
        shape = (ROWS, BEGUN + STEPS)
        self.ids = torch.randint(words.shape[0], shape, generator=generator, device="cpu").to(device)

    def run(self) -> "StepTrial":
        forward = self.forward
        mask = self.ids.new_ones(ROWS, FRAMES)
        mask[1, FRAMES // 2 :] = 0
        plain, hiding = self.stock({}, 1), self.stock({ENCODER_MASK: mask}, STEPS)
        forward.output = type(plain.wanted[0])
        makers = [one for one in forward.module.modules() if hasattr(type(one), MASK_OF_FRAMES)]
        # So few frames may be less than a token, of which such a maker hides none.
        encoder = bool(makers) or not (_same(plain, hiding) and self.ignores_masks(plain))
        frames: Any = MaskOfTokens(makers[0]) if makers and encoder else None
        counts = getattr(forward.module, LENGTHS_OF_FRAMES, None)
        if counts is not None and forward.module.main_input_name == "input_features":  # models of texts have it too
            frames = MaskByLengths(counts)
        self.texts, forward.masks = [plain, hiding], forward.masks._replace(encoder=encoder, frames=frames)
        if not encoder:
            beside = self.stock({ENCODED: encoded(self.hidden, mask)}, STEPS)
            forward.masks = forward.masks._replace(beside=not _same(plain, beside))
            self.texts += [beside] if forward.masks.beside else []
        with patched(forward):
            self.reason = self.differs()
            if self.reason is not None and ASKED in self.reason:  # by a range of a table of positions, as in BERT
                forward.counts = self.differs(counts=True) is None
                self.reason = None if forward.counts else self.reason
            forward.whole = self.reason is None
            if forward.whole:
                self.pads()
        return self

    def differs(self, counts: bool = False) -> str | None:
        """Why steps in the model's own code are not as stock's; counts: which is given positions."""
        self.forward.counts = counts
        try:
            for text in self.texts:
                self.compare(text)
        except Exception as error:  # whatever a forward may raise
            known = isinstance(error, NotUnderstood | Unfit)
            return str(error) if known else f"the trial raised {reason_of(error)}"
        return None

    def again(self) -> None:
        """Compares the same texts, by layers that are fused."""
        forward = self.forward
        with patched(forward):
            if not forward.whole:
                self.pads()
            for text in self.texts:
                self.compare(text)
                if forward.reason is not None:
                    raise NotUnderstood(forward.reason)
            forward.begins = FIRST if all(layer.attentions[CROSS].sources for layer in forward.layers) else 0
            if forward.begins and not all(map(self.begins, self.texts)):
                forward.begins = 0
            elif forward.begins and not self.counts_padding():
                forward.begins = 1

    def begins(self, text: Text) -> bool:
        """Whether the first tokens may be steps too."""
        cache = empty_pair(self.forward.module.get_decoder().config)
        try:
            _agree(self.forward.fast(**self.call(text.more, 0, BEGUN, cache)), text.first)
            self.compare(text, cache)
        except Exception as error:  # whatever a forward may raise
            reason_of(error)
            return False
        return True

    def counts_padding(self) -> bool:
        """Whether tokens behind one of padding, which no mask tells of, have the positions that steps give them."""
        before, pad = self.ids, getattr(self.forward.module.get_decoder().config, "pad_token_id", None)
        if pad is None:
            return True
        self.ids = before.clone()
        self.ids[0, 0] = pad
        try:
            return self.begins(self.stock({}, 1))
        except Exception as error:  # a token that it does not have
            reason_of(error)
            return True
        finally:
            self.ids = before

    def prompt(self) -> dict[str, Any]:
        """The keywords of a call that looks at all tokens at once."""
        return {TOKENS: self.ids, ENCODED: encoded(self.hidden), "use_cache": False}

    def call(self, more: dict, begin: int, end: int, cache: Any) -> dict[str, Any]:
        """The keywords of a call with these tokens."""
        given = {TOKENS: self.ids[:, begin:end], ENCODED: encoded(self.hidden)} | more
        given[self.forward.cache_name] = cache
        padding = {MASK: more[MASK][:, :end]} if MASK in more else {}
        return given | padding | {"use_cache": True, "return_dict": True}

    def stock(self, more: dict, steps: int) -> Text:
        with as_written(), within_tables():
            first = self.forward.stock(**self.call(more, 0, BEGUN, None))
            cache = cache_of(first)
            begun = copy.deepcopy(cache)
            places = range(BEGUN, BEGUN + steps)
            wanted = [self.forward.stock(**self.call(more, at, at + 1, cache)) for at in places]
        return Text(more, first, begun, wanted)

    def compare(self, text: Text, begun: Any = None) -> None:
        """begun: its cache, where it was made by us. What the first call of a kind alone waits for is no wait of steps:
        kernels check themselves then on a card that no test ran on.
        """
        begun = copy.deepcopy(text.begun) if begun is None else begun
        again = copy.deepcopy(begun)
        if self._waits(text, begun) and (waited := self._waits(text, again)):
            raise NotUnderstood(f"a step asks the device for a number ({waited})")

    def _waits(self, text: Text, cache: Any) -> str | None:
        """What steps behind this cache wait for. Raises NotUnderstood where they are not as stock's."""
        found = None
        for at, theirs in enumerate(text.wanted, BEGUN):
            with Waits() as waits:
                ours = self.forward.fast(**self.call(text.more, at, at + 1, cache))
            _agree(ours, theirs)
            found = found or waits.found
        return found

    def ignores_masks(self, plain: Text) -> bool:
        """Whether a mask of the encoder's tokens may be of any form, as nobody reads it."""
        try:
            return _same(plain, self.stock({ENCODER_MASK: self.ids.new_ones(ROWS, FRAMES + 1)}, 1))
        except Exception as error:  # as its sizes are those of no tokens
            reason_of(error)
            return False

    def pads(self) -> None:
        """Finds out whether a mask of the decoder's tokens hides the first ones."""
        before, padding = self.forward.masks, torch.ones_like(self.ids)
        padding[1, : BEGUN - 1] = 0
        try:
            if MASK in self.forward.names:
                self.forward.masks = before._replace(own=True)
                padded = self.stock({MASK: padding}, 1)
                self.compare(padded)
                self.texts.append(padded)
        except Exception as error:  # stock refuses it, or takes it in another way
            reason_of(error)
            self.forward.masks = before


def _agree(ours: Any, theirs: Any) -> None:
    """Raises NotUnderstood where outputs have other fields, or logits that differ by more than rounding."""
    if list(ours) != list(theirs):
        raise NotUnderstood("its output has other fields")
    off = relative_rms(ours.logits, theirs.logits)
    if not off <= bound(LOGITS, theirs.logits.dtype):
        raise NotUnderstood(f"a step computes something else: logits are off by {off:.1e}")


def _same(one: Text, other: Text) -> bool:
    return torch.equal(one.wanted[0].logits, other.wanted[0].logits)
