"""Runs in which a whole model is tried: stock and fused over one text, with one routing for both."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor, nn

from accel.comparison import agree, relative_rms_by_token
from accel.errors import reason_of
from accel.libraries.cache import DynamicCache, cache_of, new_cache
from accel.llm.generation.calling_convention import TOLD
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.prefill import MOST_PROMPT, bucket_for, pad_to_bucket
from accel.llm.generation.routing import Choices, noting, repeating, routed_modules, routing_modules
from accel.llm.kv_cache.shape import kv_layers
from accel.llm.kv_cache.store import Store
from accel.llm.recording.inputs import ROWS, example_ids, within_positions
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.resting import resting
from accel.patching.fast_forward import as_written
from accel.patching.rule import ForwardPatch
from accel.quantization.formats.stored_weight import coarsest
from accel.quantization.module import dequantizing
from accel.tolerances import AS_GOOD, AS_GOOD_SHARE, DRIFT, LAYER_NOISE, LOGITS, MOST_MOVED, bound
from accel.verification.noise import with_rounding
from accel.verification.precision import widened

PROMPT, PADDING, STEPS = 9, 3, (1, 1, 3)
LONGEST = 150  # a window up to here is filled, to see it at work


@dataclass(eq=False)
class Expected:
    """The result of a stock run. logits: (rows, tokens, vocabulary); choices: of its routers, which a fused run takes.

    median: judge the median token of a row, since some choices could not be noted, and rounding may send tokens to
    other experts. moved: how far rounding moves these logits, which takes another stock run; None where unknown.
    dtype: in which the model computes, where the logits are wider. exactly: gives the same run in full precision, or
    None, see `_in_full_precision`.
    """

    logits: Tensor
    choices: Choices
    median: bool = False
    moved: Callable[[], float] | None = None
    dtype: torch.dtype | None = None
    exactly: Callable[..., Tensor | None] | None = None

    def routed(self) -> AbstractContextManager[None]:
        """Inside, routers choose what they chose here."""
        return repeating(self.choices)

    def first(self, tokens: int) -> "Expected":
        """The same of the first tokens."""
        return replace(self, logits=self.logits[:, :tokens], exactly=None)

    def near(self, got: Tensor) -> bool:
        """Whether these logits differ by no more than rounding does in a model of any depth."""
        return self.off(got) <= bound(LOGITS, self.dtype or self.logits.dtype)

    def agrees(self, got: Tensor) -> bool:
        """Whether they differ by no more than rounding, which layer after layer of this model may amplify.

        Ranks that share the model must all ask it of equal logits: stock may run once more for the answer.
        """
        if self.near(got):
            return True
        if self.off(got) <= MOST_MOVED and self.row_off(got) <= DRIFT * self.moves():
            return True
        return self.is_as_good(got)

    @cached_property
    def exact(self) -> Tensor | None:
        """These logits in full precision, where that can be computed."""
        return None if self.exactly is None else self.exactly()

    def is_as_good(self, got: Tensor) -> bool:
        """Whether these logits are as near to full precision as stock's are."""
        if self.row_off(got) > 2 * MOST_MOVED or self.exact is None:
            return False
        own, ours = (by_token(one, self.exact) for one in (self.logits, got))
        return as_good(own, ours, bound(LOGITS, self.dtype or self.logits.dtype))

    def rounding(self) -> float:
        """How far rounding puts a row of these logits, by noise and by full precision."""
        return max(self.moves(), 0.0 if self.exact is None else self.row_off(self.exact))

    def moves(self) -> float:
        """How far rounding moves these logits, as `row_off` measures; 0 where it is not to be known."""
        return 0.0 if self.moved is None else self.moved()

    def description(self, got: Tensor) -> str:
        """How far these logits are off, for a reason."""
        off = f"logits are off by {self.off(got):.1e}"
        if self.moved is None:
            return off
        return f"{off}, a row of them by {self.row_off(got):.1e}, and rounding moves stock's by {self.moves():.1e}"

    def off(self, got: Tensor) -> float:
        """How far the logits of the worse row are apart: of its worst token, or of its median one."""
        rows = by_token(got, self.logits).tolist()
        return max(sorted(row)[len(row) // 2] if self.median else max(row) for row in rows)

    def row_off(self, got: Tensor) -> float:
        """Of the worse row, root mean square of its tokens: how far rounding puts a single one is chance."""
        return float(_row_rms(by_token(got, self.logits)).max())


def by_token(got: Tensor, wanted: Tensor) -> Tensor:
    """`relative_rms_by_token`, and inf where it is no number or the shapes differ."""
    if got.shape != wanted.shape:
        return torch.full((1, 1), float("inf"), device="cpu")
    found = relative_rms_by_token(got, wanted)
    # NaN is no number to compare: max([0, NaN]) is 0.
    return found.masked_fill(found.isnan(), float("inf"))


def as_good(own: Tensor, ours: Tensor, allowed: float) -> bool:
    """Whether errors (rows, tokens) of our logits, or of a layer, are those of stock's in each row, see `AS_GOOD`.

    allowed: the bound of their difference where that is no question.
    """
    if own.shape != ours.shape:
        return False
    pair = own, ours
    (mean, our_mean), (rms, our_rms) = map(_row_means, pair), map(_row_rms, pair)
    near = our_mean <= AS_GOOD * mean + AS_GOOD_SHARE * allowed
    return bool((near & (our_rms <= DRIFT * rms + AS_GOOD_SHARE * allowed) & (mean <= MOST_MOVED)).all())


def _row_means(found: Tensor) -> Tensor:
    return found.clamp_min(1e-6).log().mean(-1).exp()


def _row_rms(found: Tensor) -> Tensor:
    return found.square().mean(-1).sqrt()


def expected(forward: DecoderForward, run: Callable[[], Tensor]) -> Expected:
    """The logits that run() gives of stock, (ROWS, tokens, vocabulary).

    It may run again later, so its result must not depend on what is patched then. Where choices of routers cannot be
    repeated, noise would measure other experts, and not rounding.
    """
    with noting(ROWS, routing_modules(forward)) as choices:
        logits, dtype = run(), coarsest(forward.module, forward.embeddings().dtype)
    if not choices.cover(routed_modules(forward)):
        return Expected(logits, choices, median=True, dtype=dtype)
    stock = Expected(logits, choices, dtype=dtype)
    stack = forward.module.get_submodule(forward.stack)

    @cache
    def moved() -> float:
        try:
            with stock.routed(), with_rounding(stack.children(), LAYER_NOISE, dtype):
                return stock.row_off(run())
        except Exception as error:  # of layers that are called in a way of their own: the bound of any model holds
            reason_of(error)
            return 0.0

    alone = forward.partial or forward.ranks is not None
    exactly = None if alone else partial(_in_full_precision, forward, choices, run)
    return replace(stock, moved=moved, exactly=exactly)


def _in_full_precision(
    forward: DecoderForward,
    choices: Choices,
    run: Callable[[], Tensor],
    around: Callable[[nn.Module], AbstractContextManager] = nullcontext,
) -> Tensor | None:
    """What run() gives of a float32 twin with these choices, inside of `around`; None where there is no twin."""
    model, dtype = forward.module, forward.embeddings().dtype
    try:
        with widened(forward, dtype) as twin, repeating(choices.carried(model, twin)), around(twin):
            return run()
    except Exception as error:  # of code that counts on a dtype
        reason_of(error)
        return None


def trial_lengths(forward: DecoderForward) -> tuple[int, ...]:
    """Tokens of a trial's prompt and steps; fewer where the model has fewer positions. Raises NotUnderstood."""
    windows = [layer.spec.window for layer in forward.layers]
    prompt = max([PROMPT, *(window + 2 for window in windows if window is not None and window < LONGEST)])
    steps = tuple(min(step, most_new(forward)) for step in STEPS)
    lengths = within_positions(forward.most_positions, (prompt, *steps))
    if not lengths[0]:
        raise NotUnderstood("too few positions to try it")
    return lengths


def most_new(forward: DecoderForward) -> int:
    """Tokens that stock can be given behind others."""
    return 1 if forward.one_by_one else max(STEPS)


def short_prompt(lengths: tuple[int, ...]) -> int:
    """Tokens of a prompt that need not fill a window."""
    return min(PROMPT, lengths[0])


def trial_inputs(forward: DecoderForward, tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, a mask with the second row's first tokens hidden, and the positions counted by it."""
    ids = example_ids(forward.module, tokens, seed=seed)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return ids, mask, (mask.cumsum(1) - 1).clamp_min(0)


def pieces_of(forward: DecoderForward, lengths: tuple, seed: int = 1) -> Iterator[dict]:
    """What a prompt and the steps behind it, of these lengths, are called with; padding in front of the second row."""
    ids, mask, positions = trial_inputs(forward, sum(lengths), seed)
    end = 0
    for length in lengths:
        start, end = end, end + length
        shown = mask[:, :end] if (forward.masks_steps and not forward.one_by_one) or not start else None
        given = {"input_ids": ids[:, start:end], "attention_mask": shown}
        if "position_ids" in forward.names:
            given["position_ids"] = positions[:, start:end].contiguous()
        yield given


def masks_steps(forward: DecoderForward) -> bool:
    """Whether stock may be given a mask of all tokens with those that stand behind others.

    Some models multiply the new tokens by it, and are called without one there: Mamba, where no layer has keys.
    """
    if kv_layers(forward.shapes()) or not forward.places:
        return True
    prompt, step = pieces_of(forward, (PROMPT, 1))
    found = []
    with resting(forward.module), plainly(forward):
        for mask in (None, trial_inputs(forward, PROMPT + 1)[1]):
            given = forward.given_cache(new_cache(forward.module))
            forward.reference(**prompt, **given)
            try:
                found.append(forward.reference(**step | {"attention_mask": mask}, **given).logits)
            except Exception as error:  # of shapes that do not fit
                reason_of(error)
                return False
    return agree(*found)


def logits_over_pieces(forward: DecoderForward, call: Callable, pieces: Iterable[dict]) -> Tensor:
    """The logits of call, stock's or the fused forward's, for pieces one after another over one new cache."""
    given = forward.given_cache(new_cache(forward.module))
    return torch.cat([call(**piece, **given).logits for piece in pieces], dim=1)


def stock_logits(forward: DecoderForward, lengths: tuple) -> tuple[Expected, type]:
    """The logits of all pieces but the padding's, and the class they came in."""
    kinds: list[type] = []
    return expected(forward, lambda: _stock_pieces(forward, lengths, kinds)), kinds[-1]


def _stock_pieces(forward: DecoderForward, lengths: tuple, kinds: list[type]) -> Tensor:
    """kinds: the class of each output is added there."""
    store, found = new_cache(forward.module), []
    with plainly(forward):
        for piece in pieces_of(forward, lengths):
            output = forward.reference(**piece, **forward.given_cache(store))
            known = ("logits", *(name for name in TOLD if output.get(name) is piece.get(name)))
            extra = [name for name, value in output.items() if name not in known and value is not cache_of(output)]
            if extra:
                raise NotUnderstood(f"its output has {', '.join(extra)}")
            found.append(output.logits)
            kinds.append(type(output))
    return torch.cat(found, dim=1)[:, PADDING:]  # what a hidden token computes is anybody's guess


@contextmanager
def plainly(forward: DecoderForward) -> Iterator[None]:
    """Inside, the model is stock, whatever is fused, and its quantized products are torch's own."""
    with as_written(), dequantizing(forward.module):
        yield


def stock_alone(forward: DecoderForward, lengths: tuple) -> Expected:
    """Stock logits where a mask is given, but no positions."""
    ids, mask, _ = trial_inputs(forward, short_prompt(lengths))

    def run() -> Tensor:
        given = forward.given_cache(new_cache(forward.module))
        with plainly(forward):
            return forward.reference(input_ids=ids, attention_mask=mask, **given).logits[:, PADDING:]

    return expected(forward, run)


def fused_logits(forward: DecoderForward, lengths: tuple) -> Tensor:
    """Those of the trial's pieces, one behind the other, by fused layers."""
    forward.ready(stack=False)
    return written(forward, pieces_of(forward, lengths))[:, PADDING:]


def written(forward: DecoderForward, pieces: Iterable[dict]) -> Tensor:
    """The logits of all pieces, one after another, by fused layers."""
    if forward.partial:
        return logits_over_pieces(forward, forward.fast, pieces)
    store = forward.adopt(DynamicCache())
    named = ((piece["input_ids"], piece.get("position_ids"), piece["attention_mask"]) for piece in pieces)
    return torch.cat([forward.run(store, *given, 0) for given in named], dim=1)


def fill_prompt(
    forward: DecoderForward, store: Store, tokens: Tensor, positions: Tensor | None, mask: Tensor | None
) -> Tensor:
    """The logits of a prompt that is filled up to the size of a graph."""
    rows, new = tokens.shape
    most = None if "position_ids" in forward.names else forward.most_positions
    bucket = min(bucket_for(rows, new) or new, most or MOST_PROMPT)
    store.reserve(rows, bucket)
    store.set_padding_mask(mask)
    tokens, positions, last = pad_to_bucket(tokens, positions, bucket)
    logits = forward.eager(store, True, tokens, positions, store.metadata, last)
    store.advance(new)
    return logits


@contextmanager
def fused_layers(forward: DecoderForward) -> Iterator[None]:
    """Inside, the layers have their fused forwards, and the experts and routers in them."""
    attentions = (one for layer in forward.layers for one in layer.inner)
    fused = (*forward.layers, *attentions, *forward.experts, *forward.routers)
    with ExitStack() as undo:
        for patch in [ForwardPatch(one.module, one) for one in fused]:
            patch.apply()
            undo.callback(patch.undo)
        yield
