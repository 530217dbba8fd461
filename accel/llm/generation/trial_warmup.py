"""Compiles what a model launches before it is tried or used: one run in which launches only compile, in parallel."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import torch
from accel_kernels import argmax
from accel_kernels.warmup import Warmup

from accel.errors import reason_of
from accel.libraries.cache import DynamicCache
from accel.llm.generation import trial
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.layer_forward import LayerForward
from accel.llm.generation.prefill import STEP
from accel.llm.kv_cache.shape import LayerShape
from accel.llm.recording.resting import resting
from accel.quantization.activation_quantization import rounding_linears

LONGER = 320  # tokens of a prompt that is more than a few rows
PADDED = (STEP // 4, STEP // 2, LONGER, LONGER + STEP)  # of prompts in graphs: few; many, and a multiple of 128
SEVERAL = 3  # tokens of a step that is no decode
WIDE = (9, 17, 33)  # rows, for tiles of 16, of 32 and of 64
TILED = (640, 2304)  # tokens of prompts whose rounded rows are multiplied by tiles of other sizes


def warm_up(forward: DecoderForward) -> None:
    """Compiles what a tried forward launches over another kind of store, or with rounded activations."""
    with (
        resting(forward.module),
        warming_up_trial(forward, trial.trial_lengths(forward), TILED if rounding_linears(forward.module) else ()),
    ):
        forward.seen = None


@contextmanager
def warming_up_trial(forward: DecoderForward, lengths: tuple, longer: tuple = ()) -> Iterator[None]:
    """Compiles, while the body runs, what the trial and later calls launch: one row, long prompts, large batches."""
    kernels = Warmup()
    try:
        if forward.shapes()[0].device.type == "cuda":
            with trial.fused_layers(forward), kernels.launches():
                _run_through(forward, lengths, longer)
    except Exception as error:  # shows again in the trial
        reason_of(error)
    try:
        yield
    finally:
        try:
            kernels.wait()
        except Exception as error:
            reason_of(error)


def _run_through(forward: DecoderForward, lengths: tuple, longer: tuple) -> None:
    with _one_of_a_kind(forward):
        trial.fused_logits(forward, lengths)
        ids, _, positions = trial.trial_inputs(forward, max((*PADDED, *longer)) + 1)
        short, most = trial.short_prompt(lengths), forward.most_positions
        if short < lengths[0]:  # of a trial that fills a window; this one is called without positions, too
            padded, hidden, _ = trial.trial_inputs(forward, short)
            trial.written(forward, [{"input_ids": padded, "attention_mask": hidden}])
        positions %= short  # a model with a table of positions may have fewer than that
        counted = positions[:1] if "position_ids" in forward.names else None
        fit = {length for length in (*PADDED, LONGER, *longer) if counted is not None or not most or length < most}
        few = [(1, short, (1, SEVERAL)), *((1, length, (1,)) for length in (LONGER, *longer) if length in fit)]
        prompts = [*few, *((rows, short, (1,)) for rows in WIDE)]
        for rows, prompt, steps in prompts:
            store = forward.adopt(DynamicCache())
            ends = list(accumulate((0, prompt, *steps)))
            for piece in map(slice, ends, ends[1:]):
                given = None if counted is None else counted[:, piece]
                mask = ids.new_ones(rows, piece.stop) if rows > 1 else None
                tokens = ids[:1, piece].repeat(rows, 1)
                logits = forward.run(store, tokens, given, mask, 1 if "logits_to_keep" in forward.names else 0)
                argmax(logits[:, -1])  # what a greedy step chooses
        if "logits_to_keep" in forward.names:
            for length in filter(fit.__contains__, PADDED):
                for mask in (None, ids.new_ones(1, length)):
                    store = forward.adopt(DynamicCache())
                    given = None if counted is None else counted[:, :length]
                    trial.fill_prompt(forward, store, ids[:1, :length], given, mask)


@contextmanager
def _one_of_a_kind(forward: DecoderForward) -> Iterator[None]:
    """Inside, a layer that launches the same kernels as an earlier one only passes its input on."""
    forward.ready(stack=False)
    kinds, shapes = set(), list(forward.shapes())
    lent = {layer.spec.attention.index for layer in forward.layers if layer.spec.attention and layer.spec.borrows}
    for layer in forward.layers:
        places = layer.spec.places
        # The first layer is given words, which are no wider than weights.
        first = layer is forward.layers[0] and layer.spec.widths.wide
        kind = _kind(layer, [shapes[place] for place in places]), first
        again = kind in kinds and lent.isdisjoint(places)
        layer.repeats = again and forward.ranks is None  # exchanges run in a dry run too, as many on every rank
        if again:
            layer.bound = _passed_on
        for place in places if again else ():
            shapes[place] = shapes[place].nothing
        kinds.add(kind)
    stored, forward.stored = forward.stored, (*forward.stored[:2], tuple(shapes))
    try:
        yield
    finally:
        forward.stored = stored
        forward.seen = None  # to be bound anew


def _kind(layer: LayerForward, kept: list[LayerShape]) -> tuple:
    """What decides which kernels a layer launches: its formula, but for its place, its weights and what it keeps."""
    spec = layer.spec
    mlp = None if spec.mlp is None else replace(spec.mlp, settings=())
    formula = vars(spec) | {"attention": None, "mlp": mlp, "settings": ()}
    attention = None if spec.attention is None else spec.attention.kernel_key()
    tensors = (*layer.module.named_parameters(), *layer.module.named_buffers())
    weights = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
    return repr(formula), attention, repr(weights), tuple(kept)


def _passed_on(kernels: object, step: object, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
    return x
