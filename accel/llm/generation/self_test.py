"""The whole model, once more, before it is trusted: fused against stock, over a prompt with padding and some steps."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from accel_kernels.warmup import warmup
from transformers import DynamicCache

from accel.errors import reason_of
from accel.llm.analysis.compare import off
from accel.llm.generation.arguments import find_arguments
from accel.llm.generation.calling_convention import BY_MASK, IN_ORDER, CallingConvention
from accel.llm.generation.decoder import DecoderForward, Unfit
from accel.llm.generation.prefill import STEP, bucket_for, pad_to_bucket
from accel.llm.kv_cache.cache import adopt
from accel.llm.kv_cache.store import Shape, Store
from accel.llm.recording.errors import NotUnderstood
from accel.llm.recording.inputs import table_of_positions, within_positions
from accel.llm.recording.recorder import example_ids, resting
from accel.llm.runtime.layer import LayerForward
from accel.patching.patch import ForwardPatch
from accel.quantization.activation_quantization import rounding
from accel.quantization.module import dequantizing, unrounded
from accel.tolerances import LOGITS, bound

PROMPT, PADDING, STEPS = 9, 3, (1, 1, 3)
LONGER = 320  # tokens of a prompt that is more than a few rows
PADDED = (STEP // 4, STEP // 2, LONGER, LONGER + STEP)  # of prompts in graphs: few; many, and a multiple of 128
WIDE = (9, 17, 33)  # rows, for tiles of 16, of 32 and of 64
TILED = (640, 2304)  # tokens of prompts whose rounded rows are multiplied by tiles of other sizes
LONGEST = 150  # a window up to here is filled, to see it at work


def find_convention(forward: DecoderForward) -> CallingConvention:
    """How the model wants to be called, such that the fused forward gives its logits. Raises NotUnderstood."""
    model = forward.module
    try:
        lengths = trial_lengths(forward)
        # No activation is rounded: numbers next to a half would fall to either side, and the errors of a formula drown.
        with resting(model), unrounded(model):
            with dequantizing(model):  # what is fused is compared with torch's own products
                try:
                    wanted, output = stock_logits(forward, lengths)
                    alone = _alone(forward, lengths)
                except NotUnderstood:
                    raise
                except Exception as error:  # the model's own, such as of attention that wants another kind of cache
                    raise NotUnderstood(f"could not be tried: {reason_of(error)}") from error
            return _convention(forward, lengths, wanted, alone, output)
    except (NotUnderstood, Unfit) as reason:
        raise NotUnderstood(str(reason)) from reason


def trial_lengths(forward: DecoderForward) -> tuple[int, ...]:
    """Tokens of a trial's prompt and steps; fewer where the model has fewer positions. Raises NotUnderstood."""
    windows = [layer.spec.attention.sees for layer in forward.layers]
    prompt = max([PROMPT, *(window + 2 for window in windows if window is not None and window < LONGEST)])
    lengths = within_positions(forward.module, (prompt, *STEPS))
    if not lengths[0]:
        raise NotUnderstood("too few positions to try it")
    return lengths


def _short(lengths: tuple[int, ...]) -> int:
    """Tokens of a prompt that need not fill a window."""
    return min(PROMPT, lengths[0])


def _convention(
    forward: DecoderForward, lengths: tuple, wanted: torch.Tensor, alone: torch.Tensor, output: type
) -> CallingConvention:
    errors = []
    for mask in (True, False):
        forward.convention = CallingConvention(output, mask, None)
        try:
            with fused_layers(forward):
                _warm_up(forward, lengths)
                got, prompt = _fast(forward, lengths), lengths[0] - PADDING
                if _alike(_chooses(forward), got, wanted):
                    own = _own_positions(forward, lengths, mask, output, alone)
                    found = CallingConvention(output, mask, own, fills=_fills(forward, lengths))
                    return find_arguments(forward, found, partial(_alike, _chooses(forward)))
            if _alike(_chooses(forward), got[:, :prompt], wanted[:, :prompt]):
                errors.append("steps after a prompt hang on how much the cache holds")
            else:
                errors.append(f"logits are off by {_off(got, wanted, _chooses(forward)):.1e}")
        except Exception as error:  # a model that makes something else of its mask
            errors.append(reason_of(error))
        finally:
            del forward.convention
            forward.seen = None
    raise NotUnderstood(f"the whole model computes something else than its parts: {'; '.join(dict.fromkeys(errors))}")


def _own_positions(
    forward: DecoderForward, lengths: tuple, mask: bool, output: type, wanted: torch.Tensor
) -> str | None:
    """What positions the model counts for itself where it is given a mask alone."""
    for positions in (IN_ORDER, BY_MASK):
        forward.convention = CallingConvention(output, mask, positions)
        ids, padding, _ = _inputs(forward, _short(lengths))
        try:
            got = forward.fast(input_ids=ids, attention_mask=padding, use_cache=True).logits
        except Exception as error:  # a model that wants positions of every row
            reason_of(error)
            continue
        if _off(got[:, PADDING:], wanted, _chooses(forward)) <= bound(LOGITS, wanted.dtype):
            return positions
    return None


def _fills(forward: DecoderForward, lengths: tuple) -> bool:
    """Whether a prompt filled up on the right, and the step after it, come out as without the filling.

    Not with experts: they group tokens on the host, and would group the filling with the others. Not without
    position_ids: nobody could keep the filling's within the tables that a model may have.
    """
    if _chooses(forward) or not {"position_ids", "logits_to_keep"} <= set(forward.names):
        return False
    try:
        plain, full = (_begun(forward, lengths, fill) for fill in (False, True))
    except (TypeError, ValueError, IndexError, RuntimeError):  # it slices its hidden states in a way of its own
        return False
    limit = bound(LOGITS, plain[0].dtype)
    pairs = list(zip(full, plain, strict=True))
    return all(got.shape == wanted.shape and _off(got, wanted, False) <= limit for got, wanted in pairs)


def _begun(forward: DecoderForward, lengths: tuple, fill: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a prompt's last token and of the step after it; fill: as a graph is captured from it."""
    store = _store(forward, DynamicCache())
    prompt, step = (tuple(piece.values()) for piece in pieces_of(forward, (_short(lengths), 1)))
    tokens, mask, positions = prompt
    if fill:
        first = _filled(forward, store, tokens, positions, mask)
    else:
        first = forward.run(store, tokens, positions, mask, 1)
    tokens, mask, positions = step
    return first, forward.run(store, tokens, positions, mask, 1)


def _store(forward: DecoderForward, cache: DynamicCache) -> Store:
    store = adopt(cache, forward.shapes())
    if isinstance(store, str):
        raise NotUnderstood(store)
    return store


def _filled(
    forward: DecoderForward, store: Store, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    rows, new = tokens.shape
    bucket = bucket_for(rows, new) or new
    store.reserve(rows, bucket)
    store.set_padding_mask(mask)
    tokens, positions, last = pad_to_bucket(tokens, positions, bucket)
    logits = forward.eager(store, True, tokens, positions, store.metadata, last)
    store.advance(new)
    return logits


def _inputs(forward: DecoderForward, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, a mask with the second row's first tokens hidden, and the positions counted by it."""
    ids = example_ids(forward.module, tokens, seed=1)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return ids, mask, (mask.cumsum(1) - 1).clamp_min(0)


def pieces_of(forward: DecoderForward, lengths: tuple) -> Iterator[dict]:
    ids, mask, positions = _inputs(forward, sum(lengths))
    end = 0
    for length in lengths:
        start, end = end, end + length
        given = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
        if "position_ids" in forward.names:
            given["position_ids"] = positions[:, start:end].contiguous()
        yield given


def stock_logits(forward: DecoderForward, lengths: tuple) -> tuple[torch.Tensor, type]:
    """The logits of all pieces but the padding's, and the class they came in."""
    cache, found = DynamicCache(config=forward.module.config), []
    for piece in pieces_of(forward, lengths):
        output = forward.reference(**piece, past_key_values=cache, use_cache=True, return_dict=True)
        extra = [name for name, value in output.items() if name not in ("logits", "past_key_values")]
        if extra:
            raise NotUnderstood(f"its output has {', '.join(extra)}")
        found.append(output.logits)
    return torch.cat(found, dim=1)[:, PADDING:], type(output)  # what a hidden token computes is anybody's guess


def _alone(forward: DecoderForward, lengths: tuple) -> torch.Tensor:
    """Stock logits where a mask is given, but no positions."""
    ids, mask, _ = _inputs(forward, _short(lengths))
    cache = DynamicCache(config=forward.module.config)
    output = forward.reference(
        input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, return_dict=True
    )
    return output.logits[:, PADDING:]


def _fast(forward: DecoderForward, lengths: tuple) -> torch.Tensor:
    forward.ready(stack=False)
    return written(forward, pieces_of(forward, lengths))[:, PADDING:]


def written(forward: DecoderForward, pieces: Iterable[dict]) -> torch.Tensor:
    """The logits of all pieces, one after another."""
    cache, found = DynamicCache(), []
    for piece in pieces:
        store = _store(forward, cache)
        found.append(forward.run(store, piece["input_ids"], piece.get("position_ids"), piece["attention_mask"], 0))
    return torch.cat(found, dim=1)


def warm_up(forward: DecoderForward) -> None:
    """Compiles what a forward launches that has been tried, but over another kind of store, or rounding activations."""
    with resting(forward.module), fused_layers(forward):
        _warm_up(forward, trial_lengths(forward), TILED if rounding(forward.module) else ())
    forward.seen = None


def _warm_up(forward: DecoderForward, lengths: tuple, longer: tuple = ()) -> None:
    """Compiles side by side what the trial and the user's calls launch: one row, a longer prompt, larger batches."""
    if forward.shapes()[0].device.type != "cuda":
        return
    try:
        with warmup():
            _run_through(forward, lengths, longer)
    except Exception as error:  # shows again in the trial
        reason_of(error)


def _run_through(forward: DecoderForward, lengths: tuple, longer: tuple) -> None:
    with _one_of_a_kind(forward):
        _fast(forward, lengths)
        ids, _, positions = _inputs(forward, max((*PADDED, *longer)) + 1)
        short, most = _short(lengths), table_of_positions(forward.module)
        positions %= short  # a model with a table of positions may have fewer than that
        fit = [length for length in (LONGER, *longer) if "position_ids" in forward.names or not most or length < most]
        prompts = [(1, length) for length in (short, *fit)] + [(rows, short) for rows in WIDE]
        for rows, prompt in prompts:
            store = _store(forward, DynamicCache())
            for piece in (slice(0, prompt), slice(prompt, prompt + 1)):
                given = positions[:1, piece] if "position_ids" in forward.names else None
                mask = ids.new_ones(rows, piece.stop) if rows > 1 else None
                tokens = ids[:1, piece].repeat(rows, 1)
                forward.run(store, tokens, given, mask, 1 if "logits_to_keep" in forward.names else 0)
        if {"position_ids", "logits_to_keep"} <= set(forward.names):
            for length in PADDED:
                for mask in (None, ids.new_ones(1, length)):
                    store = _store(forward, DynamicCache())
                    _filled(forward, store, ids[:1, :length], positions[:1, :length], mask)


@contextmanager
def _one_of_a_kind(forward: DecoderForward) -> Iterator[None]:
    """Inside, a layer that launches what another does passes its input on, and nothing is stored for it."""
    forward.ready(stack=False)
    kinds, shapes = set(), list(forward.shapes())
    for layer in forward.layers:
        index = layer.spec.attention.index
        kind = _kind(layer, shapes[index])
        if kind in kinds:
            layer.bound, shapes[index] = _passed_on, shapes[index]._replace(heads=0)
        kinds.add(kind)
    stored, forward.stored = forward.stored, (*forward.stored[:2], tuple(shapes))
    try:
        yield
    finally:
        forward.stored = stored
        forward.seen = None  # to be bound anew


def _kind(layer: LayerForward, kept: Shape) -> tuple:
    """What decides which kernels a layer launches: its formula, but for its place, its weights and what it keeps."""
    spec = layer.spec
    formula = vars(spec) | {"attention": None, "mlp": replace(spec.mlp, settings=()), "settings": ()}
    tensors = (*layer.module.named_parameters(), *layer.module.named_buffers())
    weights = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
    return repr(formula), spec.attention.kernel_key(), repr(weights), kept


def _passed_on(kernels: object, step: object, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
    return x


@contextmanager
def fused_layers(forward: DecoderForward) -> Iterator[None]:
    """Inside, the layers have their fused forwards."""
    patches = [ForwardPatch(layer.module, layer) for layer in forward.layers]
    done = []
    try:
        for patch in patches:
            patch.apply()
            done.append(patch)
        yield
    finally:
        for patch in reversed(done):
            patch.undo()


def _chooses(forward: DecoderForward) -> bool:
    """Whether rounding may send tokens to other experts, whose results then have little in common."""
    return any(not layer.spec.mlp.first for layer in forward.layers)


def agrees(forward: DecoderForward, got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether these logits differ by no more than rounding."""
    return _alike(_chooses(forward), got, wanted)


def _alike(chooses: bool, got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return _off(got, wanted, chooses) <= bound(LOGITS, wanted.dtype)


def _off(got: torch.Tensor, wanted: torch.Tensor, chooses: bool) -> float:
    """How far the logits of the worse row are apart; of its median token where tokens may go astray."""
    errors = [[off(*token) for token in zip(*row, strict=True)] for row in zip(got, wanted, strict=True)]
    # NaN is no number to compare: max([0, NaN]) is 0.
    errors = [[error if error == error else float("inf") for error in row] for row in errors]
    return max(sorted(row)[len(row) // 2] if chooses else max(row) for row in errors)
