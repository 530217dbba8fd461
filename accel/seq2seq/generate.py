"""generate() of encoder-decoder models: stock's loop, told a step late that it has ended; Whisper's times of words.

Whisper asks for times of words by the probabilities of all attentions of all steps, each of them on the CPU. Where
nobody else sees them, its few heads that align are computed once, over all tokens, when these are known.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from accel.libraries.cache import ENCODED, MASK, encoded
from accel.libraries.generation import (
    AS_IMPORTED,
    BEAMS,
    CACHE,
    FALLBACK,
    FOR_OTHER_LOOPS,
    LOOP,
    PREPARE,
    SPLIT,
    called_by_speech_pipeline,
    decoding_method,
    merged_config,
    with_growing_cache,
)
from accel.llm.generation.loop.hooks import GenerateCall, GenerateHook, steps_replay
from accel.patching.fast_forward import as_written
from accel.patching.rule import Patch
from accel.seq2seq.beams import beams_fused, known_beams
from accel.seq2seq.decoder import Seq2SeqForward
from accel.seq2seq.late_check import LATE_LOOP, unseen
from accel.seq2seq.memory_loop import follows, tokens_late
from accel.seq2seq.processors import FirstRow, quicker

MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
KEPT = {"sequences", "sequences_scores", "scores", "logits", "beam_indices"}  # what a call reads that returns no more
AT_A_TIME = 2**30  # bytes of probabilities


class Notes:
    """Of the call that a thread is in. plain: nobody sees more of it than tokens and their times. heads: those that
    align tokens with sounds, as (layer, head), if their probabilities are to be computed behind the loop.
    """

    plain = False
    heads: list[list[int]] | None = None


class Decoding:
    """What generate() of a model goes on with when it has prepared a call."""

    def __init__(self, forward: Seq2SeqForward, notes: Notes):
        self.forward, self.notes = forward, notes

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **kwargs: Any,
    ) -> Any:
        method = decoding_method(model, generation_config)
        processors, first = quicker(logits_processor), FirstRow()
        if self.notes.heads is not None and (generation_config.num_beams or 1) > 1:
            processors.append(first)
        alone = method in (AS_IMPORTED[LOOP], AS_IMPORTED[BEAMS]) and unseen(model, processors, stopping_criteria)
        if alone and method is AS_IMPORTED[LOOP] and follows(model, generation_config, kwargs):
            method = partial(tokens_late, self.forward)
        elif LATE_LOOP is not None and alone and method is AS_IMPORTED[LOOP]:
            method = LATE_LOOP
        elif alone and method is AS_IMPORTED[BEAMS]:
            known = known_beams(model, generation_config, stopping_criteria, input_ids, kwargs)
            method = method if known is None else partial(beams_fused, self.forward, known)
        call = {"logits_processor": processors, "stopping_criteria": stopping_criteria}
        call |= {"generation_config": generation_config}
        unwatched = self.forward.unwatched() if alone else nullcontext()
        with self.forward.told_beams(kwargs, generation_config), unwatched:
            result = method(model, input_ids, **call, **kwargs)
        if self.notes.heads is not None:
            found = self._aligned(model, result, first.seen, kwargs)
            result.cross_attentions = ((found,) * model.config.decoder_layers,)
        return result

    def _aligned(self, model: Any, result: Any, seen: list[torch.Tensor], kwargs: dict[str, Any]) -> torch.Tensor:
        """Probabilities of the heads that align, (rows of the loop, heads, tokens, of the encoder), where stock reads
        them. seen: tokens of the loop's first row at each step, which is read for texts that have ended.
        """
        tokens, indices = result.sequences[:, :-1], getattr(result, "beam_indices", None)
        rows = len(kwargs[ENCODED].last_hidden_state)
        found = self._probabilities(
            model, tokens, torch.arange(len(tokens), device=tokens.device) * rows // len(tokens), kwargs
        )
        if indices is None:
            return found
        given = tokens.shape[1] - indices.shape[1]  # tokens before the first step's last one
        indices = torch.cat((indices[:, :1].expand(-1, given), indices), 1)
        texts, places = (indices >= 0).nonzero(as_tuple=True)
        by_row = found.new_zeros(rows, *found.shape[1:])
        by_row[indices[texts, places], :, places] = found[texts, :, places]
        beams: list[int] = []
        for place in (indices < 0).any(0).nonzero().flatten().tolist()[::-1]:
            mine = seen[place - given].tolist()
            if beams[: place + 1] != mine:
                beams = mine
                other = self._probabilities(model, tokens.new_tensor([beams]), tokens.new_zeros(1), kwargs)
            by_row[0, :, place] = other[0, :, place]
        return by_row

    def _probabilities(
        self, model: Any, tokens: torch.Tensor, rows: torch.Tensor, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Of the heads that align, (texts, heads, tokens, of the encoder), by stock's own code. rows: of the loop, in
        which a text's encoder output and mask are.
        """
        heads, hidden, mask = self.notes.heads or [], kwargs[ENCODED].last_hidden_state, kwargs.get(MASK)
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, tokens.shape[1] - mask.shape[1]), value=1)
        config = model.config
        each = config.decoder_layers * config.decoder_attention_heads * tokens.shape[1] * hidden.shape[1]
        most, found = max(1, AT_A_TIME // (each * hidden.element_size())), []
        for texts, part in zip(tokens.split(most), rows.to(hidden.device).split(most), strict=True):
            given = {ENCODED: encoded(hidden[part]), "use_cache": False}
            given |= {} if mask is None else {MASK: mask[part]}
            given = getattr(type(model), PREPARE)(model, texts, **given)
            with as_written():
                seen = self.forward.stock(**given, output_attentions=True, return_dict=True).cross_attentions
            found.append(torch.stack([seen[layer][:, head] for layer, head in heads], 1))
        return torch.cat(found)


def _named(hook: GenerateHook, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    given = hook.arguments(args, kwargs)
    return given.get("kwargs", {}) | given


def generate(hook: GenerateHook, *args: Any, **kwargs: Any) -> Any:
    """Has stock go on with `Decoding`, for a call that leaves it to stock what comes next."""
    model, notes, given = hook.module, hook.notes, _named(hook, args, kwargs)
    config = merged_config(model, given)
    mine = vars(model).get("forward") is hook.forward and config.get_generation_mode() in MODES
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed or not mine or any(given.get(name) is not None for name in FOR_OTHER_LOOPS):
        return hook.stock(*args, **kwargs)
    before = notes.plain
    segments = given.get("return_segments") and not called_by_speech_pipeline()
    notes.plain = not (segments or config.return_dict_in_generate)
    try:
        return hook.stock(*args, **kwargs, custom_generate=Decoding(hook.forward, notes))
    finally:
        notes.plain = before


def with_fallback(hook: GenerateHook, *args: Any, **kwargs: Any) -> Any:
    """Asks for no attentions if those that align are enough."""
    given, notes = _named(hook, args, kwargs), hook.notes
    config = given["generation_config"]
    heads, words = getattr(config, "alignment_heads", None), getattr(config, "return_token_timestamps", False)
    # Without a cache steps attend for all tokens again; what an encoder gave before may have rows that have ended.
    seen = config.use_cache is False or given.get(ENCODED) is not None
    if not (notes.plain and words and heads) or seen:
        return hook.stock(*args, **kwargs)
    before = config.output_attentions
    notes.heads, config.output_attentions = heads, False
    config.alignment_heads = [[0, number] for number in range(len(heads))]
    try:
        return hook.stock(*args, **kwargs)
    finally:
        notes.heads, config.output_attentions, config.alignment_heads = None, before, heads


def split_rows(hook: GenerateHook, *args: Any, **kwargs: Any) -> Any:
    """Has only that copied to the CPU, row by row, which the call reads; scores stay where they are."""
    given = _named(hook, args, kwargs)
    outputs = given["seek_outputs"]
    if not hook.notes.plain or isinstance(outputs, torch.Tensor):
        return hook.stock(*args, **kwargs)
    kept = {name: value for name, value in outputs.items() if name in KEPT}
    scores = None if "beam_indices" in kept else kept.pop("scores", None)
    few = type(outputs)(**kept)
    few.cross_attentions = outputs.cross_attentions  # an attribute, which is none of its items
    sequences, rows = hook.stock(**given | {"seek_outputs": few})
    if scores is not None:
        for row, one in enumerate(rows):
            one["scores"] = [step[row] for step in scores]
    return sequences, rows


def growing_cache(hook: GenerateHook, *args: Any, **kwargs: Any) -> Any:
    """Has the usual cache made in place of one of fixed size that nobody sees: for this steps come from graphs."""
    forward, config = hook.forward, hook.arguments(args, kwargs).get("generation_config")
    ours = hook.notes.plain and steps_replay(forward) and not forward.declined
    growing = with_growing_cache(hook.module, config) if ours and config is not None else None
    if growing is None:
        return hook.stock(*args, **kwargs)
    return hook.stock_with(args, kwargs, generation_config=growing)


HOOKS = {"generate": generate, FALLBACK: with_fallback, SPLIT: split_rows, CACHE: growing_cache}


def generate_patches(forward: Seq2SeqForward) -> list[Patch]:
    """What has generate() of its model do so."""
    model, call = forward.module, GenerateCall(Notes)
    found = {name: run for name, run in HOOKS.items() if hasattr(type(model), name) and name not in vars(model)}
    return [Patch(model, name, GenerateHook(model, forward, call, name, run)) for name, run in found.items()]
