"""Trials of a whole model before it is used: fused against stock, over a padded prompt and some steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from accel.errors import Unfit, reason_of
from accel.in_flight import listening
from accel.libraries.cache import DynamicCache, new_cache, own_cache
from accel.libraries.generation import ARGUMENTS, OUTPUTS
from accel.llm.generation import trial
from accel.llm.generation.arguments import find_arguments
from accel.llm.generation.calling_convention import BY_MASK, IN_ORDER, CallingConvention
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.mixed import MixedForward
from accel.llm.generation.model_guard import ModelGuard, reading, relevant
from accel.llm.generation.routing import few_chosen, indexers, routed_modules
from accel.llm.generation.shown_cache import counted, empty, watched
from accel.llm.generation.teacher_forcing import differing_part
from accel.llm.generation.trial_warmup import warming_up_trial
from accel.llm.kv_cache.cache import INDEXED, OF_STATES, STOCK
from accel.llm.kv_cache.shape import kv_layers
from accel.llm.recording.inputs import ROWS, within_positions
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.resting import resting
from accel.quantization.module import unrounded

DIFFERS = "the whole model computes something else than its parts"


def find_convention(forward: DecoderForward) -> CallingConvention:
    """How the model is to be called so that the fused forward gives its logits. Raises NotUnderstood."""
    model = forward.module
    try:
        forward.masks_steps, forward.one_by_one = trial.masks_steps(forward), _loses_count(forward)
        lengths = trial.trial_lengths(forward)
        # No activation is rounded: numbers next to a half would fall to either side, and the errors of a formula drown.
        with resting(model), unrounded(model):
            try:
                with _warming_up(forward, lengths, mask=True):
                    wanted, output = trial.stock_logits(forward, lengths)
                    alone = trial.stock_alone(forward, lengths)
            except NotUnderstood:
                raise
            except Exception as error:  # the model's own, such as of attention that wants another kind of cache
                raise NotUnderstood(f"could not be tried: {reason_of(error)}") from error
            return _convention(forward, lengths, wanted, alone, output)
    except (NotUnderstood, Unfit) as reason:
        raise NotUnderstood(str(reason)) from reason


@contextmanager
def _warming_up(forward: DecoderForward, lengths: tuple, mask: bool) -> Iterator[None]:
    """What the model launches, with a mask or without, compiles while the body runs."""
    forward.convention = CallingConvention(dict, mask, None)
    with warming_up_trial(forward, lengths):
        del forward.convention
        forward.seen = None
        yield


def _convention(
    forward: DecoderForward, lengths: tuple, wanted: trial.Expected, alone: trial.Expected, output: type
) -> CallingConvention:
    errors: list[str] = []
    far: list[torch.Tensor] = []
    insists = own_cache(forward.module)
    nothing: Callable = empty if insists is None else partial(empty, kind=insists)
    ways: list[tuple[bool, Callable]] = [(True, nothing), (False, nothing)]
    for mask, shown in ways:
        if not mask:
            with _warming_up(forward, lengths, mask):
                pass
        forward.convention = CallingConvention(output, mask, None, shown=shown)
        try:
            with trial.fused_layers(forward):
                fused = partial(trial.fused_logits, forward, lengths)
                with wanted.routed():
                    got, prompt = fused(), lengths[0] - trial.PADDING
                if wanted.agrees(got):
                    apart = None if wanted.near(got) else differing_part(forward, lengths, fused)
                    if apart is None:
                        if shown is watched:
                            shown = counted
                        forward.convention = convention = CallingConvention(output, mask, None, shown=shown)
                        own = _own_positions(forward, lengths, convention, alone)
                        pads = _pads_prompts(forward, lengths, wanted, got)
                        return find_arguments(forward, replace(convention, positions=own, pads_prompts=pads))
                    errors.append(apart)
                    far.append(got)
                elif wanted.first(prompt).near(got[:, :prompt]):
                    errors.append("steps after a prompt hang on how much the cache holds")
                    if mask and shown is empty:
                        ways.append((True, watched))
                else:
                    far.append(got)
        except Exception as error:  # a model that makes something else of its mask
            errors.append(reason_of(error))
        finally:
            del forward.convention
            forward.seen = None
    if far:
        errors.insert(0, wanted.description(min(far, key=wanted.off)))
    raise NotUnderstood(f"{DIFFERS}: {'; '.join(dict.fromkeys(errors))}")


def _loses_count(forward: DecoderForward) -> bool:
    """Whether the cache that stock leaves behind a prompt does not say how many tokens it holds, and keys are masked by
    that: a cache of a model's own, where the first layer keeps a state beside it.
    """
    if own_cache(forward.module) is None or not kv_layers(forward.shapes()):
        return False
    with resting(forward.module), trial.plainly(forward):
        cache = new_cache(forward.module)
        forward.reference(**next(trial.pieces_of(forward, (trial.PROMPT,))), **forward.given_cache(cache))
    return cache.get_seq_length() != trial.PROMPT


def _own_positions(
    forward: DecoderForward, lengths: tuple, convention: CallingConvention, wanted: trial.Expected
) -> str | None:
    """What positions the model counts for itself where it is given a mask alone."""
    for positions in (IN_ORDER, BY_MASK):
        forward.convention = replace(convention, positions=positions)
        ids, padding, _ = trial.trial_inputs(forward, trial.short_prompt(lengths))
        try:
            with wanted.routed():
                got = forward.fast(input_ids=ids, attention_mask=padding, use_cache=True).logits
        except Exception as error:  # a model that wants positions of every row
            reason_of(error)
            continue
        if wanted.agrees(got[:, trial.PADDING :]):
            return positions
    return None


def _pads_prompts(forward: DecoderForward, lengths: tuple, wanted: trial.Expected, got: torch.Tensor) -> bool:
    """Whether a prompt padded on the right, and the step after it, give what they give without padding: got, fused.

    Not with experts that stock code computes: it groups tokens on the host.
    """
    fused = [one.module for one in forward.experts]
    if wanted.median or not all(any(one in fused for one in whole.modules()) for whole in routed_modules(forward)):
        return False
    if "logits_to_keep" not in forward.names:
        return False
    try:
        with wanted.routed():
            filled = _filled(forward, lengths)
    except (NotUnderstood, TypeError, ValueError, IndexError, RuntimeError):
        return False  # it slices its hidden states in a way of its own
    last, apart = lengths[0] - trial.PADDING - 1, replace(wanted, moved=wanted.rounding, exactly=None)
    plain = (got[:, start : start + one.shape[1]] for start, one in enumerate(filled, last))
    return all(replace(apart, logits=one).agrees(full) for one, full in zip(plain, filled, strict=True))


def _filled(forward: DecoderForward, lengths: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a prompt's last token, filled up as a graph is captured from it, and of the step after it."""
    store = forward.adopt(DynamicCache())
    prompt, step = (
        (piece["input_ids"], piece.get("position_ids"), piece["attention_mask"])
        for piece in islice(trial.pieces_of(forward, lengths), 2)
    )
    return trial.fill_prompt(forward, store, *prompt), forward.run(store, *step, 1)


def try_partial(forward: MixedForward) -> None:
    """Compares some layers' forward with stock, over a padded prompt, steps, and no mask. Raises NotUnderstood."""
    model = forward.module
    indexed = {layer.spec.place: layer.spec.keeps_more for layer in forward.layers}
    for place, layer in enumerate(DynamicCache(config=model.config).layers):
        known = (*STOCK, *OF_STATES, *(INDEXED if indexed.get(place) else ()))
        if place in forward.places and type(layer) not in known:
            raise NotUnderstood(f"layer {place} keeps more than keys and values")
        if forward.places and place not in forward.places and type(layer) is STOCK[1]:
            raise NotUnderstood(f"layer {place} is not understood, and drops what its window has passed")
    if forward.biased:
        raise NotUnderstood("biases by distance, and not all layers are understood")
    forward.masks_steps = trial.masks_steps(forward)
    lengths = trial.trial_lengths(forward)

    def unmasked(call: Callable, rows: int = ROWS) -> torch.Tensor:
        pieces = ({"input_ids": piece["input_ids"][:rows]} for piece in trial.pieces_of(forward, lengths))
        return trial.logits_over_pieces(forward, call, pieces)

    def stock_unmasked() -> torch.Tensor:
        with trial.plainly(forward):
            return unmasked(forward.reference)

    def compare() -> None:
        wanted, _ = trial.stock_logits(forward, lengths)
        bare = trial.expected(forward, stock_unmasked)
        fused = partial(trial.fused_logits, forward, lengths)
        with trial.fused_layers(forward):
            with wanted.routed():
                got = fused()
            with bare.routed():
                plain = unmasked(forward.fast)
            if wanted.logits.is_cuda:  # what one row launches is compiled now, and not in a user's call
                unmasked(forward.fast, rows=1)
            agrees = wanted.agrees(got) and bare.agrees(plain)
            apart = differing_part(forward, lengths, fused) if agrees and not wanted.near(got) else None
        if not agrees or apart is not None:
            raise NotUnderstood(": ".join(filter(None, (DIFFERS, apart))))

    forward.apart = True
    try:
        with resting(model), unrounded(model):
            compare()
            if any(indexers(forward)):
                with few_chosen(forward):
                    compare()
    except NotUnderstood:
        raise
    except Exception as error:  # whatever a forward may raise
        raise NotUnderstood(f"could not be tried: {reason_of(error)}") from error
    finally:
        forward.apart, forward.seen = False, None


def guard_of(forward: DecoderForward) -> ModelGuard:
    """What stock reads in a prompt and a step, of which the fused forward does not ask.

    Where all layers are fused, modules around them are shown an empty cache and a mask made up; between stock layers
    they are shown what stock would show them.
    """
    pieces = list(trial.pieces_of(forward, within_positions(forward.most_positions, (trial.PROMPT, 1))))
    with resting(forward.module):
        with reading(forward.module) as stock, _calls_noted(forward) as around:
            whole = forward.partial or forward.keeps_state or own_cache(forward.module) is not None
            cache = new_cache(forward.module) if whole else DynamicCache()
            with trial.plainly(forward):
                for piece in pieces:
                    forward.reference(**piece, **forward.given_cache(cache))
        with trial.fused_layers(forward):
            forward.apart = True
            try:
                with reading(forward.module) as fused:
                    forward.ready()
                    trial.written(forward, pieces)
            finally:
                forward.apart = False
    forward.seen = None
    shown = () if forward.partial else around - {""}
    return ModelGuard(forward.module, relevant(stock, fused, (*ARGUMENTS, *OUTPUTS)), shown)


@contextmanager
def _calls_noted(forward: DecoderForward) -> Iterator[set[str]]:
    """Inside, notes the paths of modules that are called, but for those inside layers."""
    whole = [layer.module for layer in forward.layers if not layer.inner]
    inside = {module for layer in whole for module in layer.modules() if module is not layer}
    found: set[str] = set()
    outside = ((path, module) for path, module in forward.module.named_modules() if module not in inside)
    with listening(((module, lambda *_, path=path: found.add(path)) for path, module in outside), before=True):
        yield found
