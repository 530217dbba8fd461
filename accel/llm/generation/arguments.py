"""Which arguments besides tokens, mask and positions a fused model may ignore or pass on, found by trial against stock.

Multimodal models take positions of several parts (time, height, width), marks that tell tokens of images from text, and
keep counts for the next call.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from accel.errors import of_a_kernel, reason_of
from accel.libraries.cache import new_cache
from accel.libraries.generation import FRAMES, GRIDS, MARKS, POSITIONS
from accel.llm.generation.calling_convention import ALL, ANY, GRID, NEW, CallingConvention, Kept
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.trial import PADDING, expected, logits_over_pieces, most_new, pieces_of, plainly
from accel.llm.recording.inputs import example_ids, within_positions
from accel.llm.recording.position_table import within_tables
from accel.llm.recording.resting import resting

PIECES = (9, 1, 3)  # tokens of a prompt, a step and a longer one


def find_arguments(forward: DecoderForward, convention: CallingConvention) -> CallingConvention:
    """The convention with what else the model takes. Its layers are fused now."""
    parts, changed = _counted(forward) if "position_ids" in forward.names else ((), {})
    names = [(name, form) for name in MARKS for form in (NEW, ALL)]
    names += [*((name, GRID) for name in GRIDS), *((name, ANY) for name in FRAMES)]
    names = [(name, form) for name, form in names if name in forward.names]
    # All is allowed while it is tried.
    forward.convention = replace(
        convention, position_parts=parts, unused_in_steps=frozenset(names), unused_if_zero=frozenset(MARKS)
    )

    lengths = within_positions(forward.most_positions, (*PIECES[:2], min(PIECES[2], most_new(forward))))
    pieces = list(pieces_of(forward, lengths, seed=2))

    def agrees(change: Callable[[dict], dict]) -> bool:
        return _agrees(forward, [change(piece) for piece in pieces])

    def changes_nothing(name: str, form: str) -> bool:
        return all(_agrees(forward, _stepping(pieces, name, form, mark)) for mark in (0, 1))

    def uncounted(piece: dict) -> dict:
        return {name: value for name, value in piece.items() if name != "position_ids"}

    # Behind a prompt whose positions are given: a model that counts 1, 2, 3 .. would not show it otherwise.
    from_zero = "position_ids" not in forward.names or _agrees(forward, [pieces[0], *map(uncounted, pieces[1:])])
    counts = from_zero and agrees(lambda piece: {"input_ids": piece["input_ids"]})
    # Some count 0, 1, 2 .. in a step too, whatever the mask says.
    in_steps = counts or (from_zero and agrees(uncounted))
    return replace(
        convention,
        positions=convention.positions if in_steps else None,
        unmasked_alike=counts
        or agrees(lambda piece: {n: value for n, value in piece.items() if n != "attention_mask"}),
        counts_positions=counts,
        position_parts=tuple(n for n in parts if agrees(partial(_in_parts, parts=n))),
        unused_in_steps=frozenset((name, form) for name, form in names if changes_nothing(name, form)),
        unused_if_zero=frozenset(
            name for name in MARKS if name in forward.names and agrees(partial(_blank, name=name))
        ),
        kept_tensors=_kept(forward, pieces[0], changed) if changed else (),
    )


def _counted(forward: DecoderForward) -> tuple[tuple[int, ...], dict]:
    """The possible numbers of parts of positions that generate() counts, and the tensors that counting leaves in the
    model, by (path of the module, name). The model is as before.
    """
    model = forward.module
    count = getattr(model, POSITIONS, None)
    if count is None:
        return (), {}
    ids = example_ids(model, within_positions(forward.most_positions, PIECES)[0])
    modules = dict(model.named_modules())
    with resting(model):
        before = {path: dict(vars(module)) for path, module in modules.items()}
        try:
            positions = count(ids, {"attention_mask": torch.ones_like(ids)})
        except Exception as error:  # a model that counts in a way of its own: generate() will tell the user
            reason_of(error)
            return (), {}
        changed = {
            (path, name): value
            for path, module in modules.items()
            for name, value in vars(module).items()
            if type(value) is torch.Tensor and before[path].get(name) is not value
        }
    if type(positions) is not torch.Tensor or positions.dim() != 3:
        return (), changed
    return tuple(sorted({3, positions.shape[0]})), changed


def _in_parts(piece: dict, parts: int) -> dict:
    """No two parts are equal, and none is larger than the usual positions."""
    positions = piece["position_ids"]
    return piece | {"position_ids": torch.stack([positions // (part + 1) for part in range(parts)])}


def _stepping(pieces: list[dict], name: str, form: str, mark: int) -> list[dict]:
    """A prompt, and a step that is told `mark`."""
    prompt, step = pieces[:2]
    like = {NEW: step["input_ids"], ALL: step["attention_mask"]}.get(form, step["input_ids"].expand(-1, 3))
    return [prompt, step | {name: torch.full_like(like, mark)}]


def _blank(piece: dict, name: str) -> dict:
    return piece | {name: torch.zeros_like(piece["input_ids"])}


def _agrees(forward: DecoderForward, pieces: list[dict]) -> bool:
    """Whether fused calls, in turn over one cache, give stock's logits. Raises errors of compiling kernels."""

    def stock() -> torch.Tensor:
        with plainly(forward), within_tables():
            return logits_over_pieces(forward, forward.reference, pieces)[:, PADDING:]

    try:
        wanted = expected(forward, stock)
        with wanted.routed():
            got = logits_over_pieces(forward, forward.fast, pieces)[:, PADDING:]
    except Exception as error:  # not a call that can be had, or not one that can be had fast
        if of_a_kernel(error):
            raise
        reason_of(error)
        return False
    return wanted.agrees(got)


def _kept(forward: Any, piece: dict, changed: dict) -> tuple[Kept, ...]:
    """Tensors that counting leaves in the model, and no call with positions reads. piece: a prompt."""
    model = forward.module

    def run() -> Any:
        cache = new_cache(model)
        return forward.reference(**piece, **forward.given_cache(cache))

    wanted, found = run().logits, []
    for (path, name), value in changed.items():
        with resting(model):
            setattr(model.get_submodule(path), name, odd := torch.full_like(value, 5))
            output = run()
            if torch.equal(output.logits, wanted):
                field = next((field for field, held in output.items() if held is odd), None)
                found.append(Kept(path, name, field))
    return tuple(found)
