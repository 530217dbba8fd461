"""The whole model, once more, before it is trusted: fused against stock, over a prompt with padding and some steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from accel.errors import reason_of
from accel.libraries.cache import DynamicCache
from accel.llm.generation.arguments import find_arguments
from accel.llm.generation.calling_convention import BY_MASK, IN_ORDER, CallingConvention, Unfit
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.routing import noting, repeating, routed_modules
from accel.llm.generation.teacher_forcing import differing_part
from accel.llm.generation.trial import (
    PADDING,
    Expected,
    fill_prompt,
    fused_layers,
    fused_logits,
    new_store,
    pieces_of,
    short_prompt,
    stock_alone,
    stock_logits,
    trial_inputs,
    trial_lengths,
)
from accel.llm.generation.trial_warmup import warming_up_trial
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.recorder import ROWS, resting
from accel.quantization.module import unrounded


def find_convention(forward: DecoderForward) -> CallingConvention:
    """How the model wants to be called, such that the fused forward gives its logits. Raises NotUnderstood."""
    model = forward.module
    try:
        lengths = trial_lengths(forward)
        # No activation is rounded: numbers next to a half would fall to either side, and the errors of a formula drown.
        with resting(model), unrounded(model):
            try:
                with _warming_up(forward, lengths, mask=True):
                    wanted, output = stock_logits(forward, lengths)
                    alone = stock_alone(forward, lengths)
            except NotUnderstood:
                raise
            except Exception as error:  # the model's own, such as of attention that wants another kind of cache
                raise NotUnderstood(f"could not be tried: {reason_of(error)}") from error
            return _convention(forward, lengths, wanted, alone, output)
    except (NotUnderstood, Unfit) as reason:
        raise NotUnderstood(str(reason)) from reason


@contextmanager
def _warming_up(forward: DecoderForward, lengths: tuple, mask: bool) -> Iterator[None]:
    """What the model launches, with a mask or without one, compiles while what is inside runs."""
    forward.convention = CallingConvention(dict, mask, None)
    with warming_up_trial(forward, lengths):
        del forward.convention
        forward.seen = None
        yield


def _convention(
    forward: DecoderForward, lengths: tuple, wanted: Expected, alone: Expected, output: type
) -> CallingConvention:
    errors: list[str] = []
    far: list[torch.Tensor] = []
    for mask in (True, False):
        if not mask:
            with _warming_up(forward, lengths, mask):
                pass
        forward.convention = CallingConvention(output, mask, None)
        try:
            with fused_layers(forward):
                fused = partial(fused_logits, forward, lengths)
                with wanted.routed():
                    got, prompt = fused(), lengths[0] - PADDING
                if wanted.agrees(got):
                    apart = None if wanted.near(got) else differing_part(forward, lengths, fused)
                    if apart is None:
                        own = _own_positions(forward, lengths, mask, output, alone)
                        found = CallingConvention(
                            output, mask, own, pads_prompts=_pads_prompts(forward, lengths, wanted)
                        )
                        return find_arguments(forward, found)
                    errors.append(apart)
                    far.append(got)
                elif wanted.first(prompt).near(got[:, :prompt]):
                    errors.append("steps after a prompt hang on how much the cache holds")
                else:
                    far.append(got)
        except Exception as error:  # a model that makes something else of its mask
            errors.append(reason_of(error))
        finally:
            del forward.convention
            forward.seen = None
    if far:
        errors.insert(0, wanted.told(min(far, key=wanted.off)))
    raise NotUnderstood(f"the whole model computes something else than its parts: {'; '.join(dict.fromkeys(errors))}")


def _own_positions(forward: DecoderForward, lengths: tuple, mask: bool, output: type, wanted: Expected) -> str | None:
    """What positions the model counts for itself where it is given a mask alone."""
    for positions in (IN_ORDER, BY_MASK):
        forward.convention = CallingConvention(output, mask, positions)
        ids, padding, _ = trial_inputs(forward, short_prompt(lengths))
        try:
            with wanted.routed():
                got = forward.fast(input_ids=ids, attention_mask=padding, use_cache=True).logits
        except Exception as error:  # a model that wants positions of every row
            reason_of(error)
            continue
        if wanted.agrees(got[:, PADDING:]):
            return positions
    return None


def _pads_prompts(forward: DecoderForward, lengths: tuple, wanted: Expected) -> bool:
    """Whether a prompt filled up on the right, and the step after it, come out as without the filling.

    Not with experts that stock code computes: it groups tokens on the host. Not without position_ids: nobody could keep
    the filling's within the tables that a model may have.
    """
    fused = [one.module for one in forward.experts]
    if wanted.median or not all(any(one in fused for one in whole.modules()) for whole in routed_modules(forward)):
        return False
    if not {"position_ids", "logits_to_keep"} <= set(forward.names):
        return False
    try:
        with noting(ROWS, wanted.choices.notes) as choices:
            plain = _begun(forward, lengths, fill=False)
        with repeating(choices):
            full = _begun(forward, lengths, fill=True)
    except (
        NotUnderstood,
        TypeError,
        ValueError,
        IndexError,
        RuntimeError,
    ):
        # It slices its hidden states in a way of its own.
        return False
    return all(Expected(one, choices, moved=wanted.moved).agrees(got) for one, got in zip(plain, full, strict=True))


def _begun(forward: DecoderForward, lengths: tuple, fill: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a prompt's last token and of the step after it; fill: as a graph is captured from it."""
    store = new_store(forward, DynamicCache())
    prompt, step = (tuple(piece.values()) for piece in pieces_of(forward, (short_prompt(lengths), 1)))
    tokens, mask, positions = prompt
    if fill:
        first = fill_prompt(forward, store, tokens, positions, mask)
    else:
        first = forward.run(store, tokens, positions, mask, 1)
    tokens, mask, positions = step
    return first, forward.run(store, tokens, positions, mask, 1)
