"""Steps of beams whose bookkeeping is one CUDA graph: in stock some seventy small operations between two tokens.

Stock's loop makes the first step, and keeps its own variables; from the second on the methods it calls give what one
function has computed of all of them. That is stock's arithmetic, with the length of a text as a number on the device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from accel.errors import Unfit
from accel.libraries.cache import generating_cache
from accel.libraries.generation import AS_IMPORTED, BEAMS, PREPARE, logits_alone
from accel.seq2seq.decoder import Seq2SeqForward
from accel.seq2seq.late_check import LateBeams
from accel.seq2seq.memory_loop import follows

ROOM = 64  # tokens: rooms of texts are multiples of it, so that graphs hold for others too
NEVER = -1.0e9  # stock's score of what is not to be taken


class Rules(NamedTuple):
    """What a graph of the bookkeeping holds for. keep: candidates of a text; early: `early_stopping`. room: tokens of a
    text that there is room for; ends: how many tokens end one.
    """

    texts: int
    beams: int
    keep: int
    room: int
    ends: int
    early: bool | str


class Texts(NamedTuple):
    """As stock's loop names them; the first three go on, the next three have ended, or nothing has yet.

    running_sequences, sequences: (texts, beams, room) int64; running_scores, scores: (texts, beams) float32;
    running_indices, indices: (texts, beams, room) int64, of which beam a token came. ended: (texts, beams) bool;
    hopeful: (texts, 1) bool, whether a running beam may still become better than those that have ended.
    """

    running_sequences: torch.Tensor
    running_scores: torch.Tensor
    running_indices: torch.Tensor
    sequences: torch.Tensor
    scores: torch.Tensor
    indices: torch.Tensor
    ended: torch.Tensor
    hopeful: torch.Tensor


class Bounds(NamedTuple):
    """length: (1,) int64, tokens so far; given: (1,), of these before the first step; most: (1,), in the end. ends:
    (number,) int64, tokens that end a text. factors: (2, room) float32, by tokens so far, `by_factor` by which scores
    become those of a text that ends now, and those that a running one may reach.
    """

    length: torch.Tensor
    given: torch.Tensor
    most: torch.Tensor
    ends: torch.Tensor
    factors: torch.Tensor


def one_of_each(texts: Texts, bounds: Bounds) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as one tensor of int64 and one of float32: a graph copies each that it is given, and that it gives."""
    whole = (texts.running_sequences, texts.running_indices, texts.sequences, texts.indices, texts.ended, texts.hopeful)
    numbers = (texts.running_scores, texts.scores, bounds.factors)
    ints = torch.cat([one.flatten().long() for one in (*whole, *bounds[:4])])
    return ints, torch.cat([one.flatten() for one in numbers])


def texts_of(rules: Rules, ints: torch.Tensor, floats: torch.Tensor) -> tuple[Texts, Bounds]:
    """Views of what `one_of_each` has put together, but for what is bool."""
    texts, beams, _, room, number, _ = rules
    rows = texts * beams
    *tokens, ended, hopeful, length, given, most, ends = ints.split([*[rows * room] * 4, rows, texts, 1, 1, 1, number])
    running, indices, sequences, came = (one.view(texts, beams, room) for one in tokens)
    open_, scores, factors = floats.split([rows, rows, 2 * room])
    found = running, open_.view(texts, beams), indices, sequences, scores.view(texts, beams), came
    flags = ended.view(texts, beams).bool(), hopeful.view(texts, 1).bool()
    return Texts(*found, *flags), Bounds(length, given, most, ends, factors.view(2, room))


def _of(tensor: torch.Tensor, beams: torch.Tensor) -> torch.Tensor:
    """Of each text these beams, (texts, number) int64."""
    return torch.take_along_dim(tensor, beams[:, :, None] if tensor.dim() == 3 else beams, dim=1)


def by_factor(scores: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """As by a number in Python, by whose reciprocal torch multiplies on a GPU."""
    return scores * factor if scores.is_cuda else scores / factor


def advanced(
    rules: Rules, candidates: torch.Tensor, ints: torch.Tensor, floats: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The texts with one token more, as of `one_of_each`, and whether any goes on, () bool. candidates: (texts, beams
    times the vocabulary) float32, scores of all continuations. ints, floats: the texts as they are.
    """
    (texts, bounds), beams, early = texts_of(rules, ints, floats), rules.beams, rules.early
    words, length = candidates.shape[1] // beams, bounds.length
    found, places = torch.topk(candidates, k=rules.keep)
    origin, token = places // words, places % words
    grown = _of(texts.running_sequences, origin).index_copy(2, length, token[:, :, None])
    first = torch.arange(len(origin), device=origin.device)[:, None] * beams
    indices = _of(texts.running_indices, origin)
    indices = indices.index_copy(2, length - bounds.given, (origin + first)[:, :, None])
    ends = (token[:, :, None] == bounds.ends).any(-1) | (length + 1 >= bounds.most)

    open_ = found + ends.to(torch.float32) * NEVER
    best = torch.topk(open_, k=beams)[1]
    running = _of(grown, best), _of(open_, best), _of(indices, best)

    at_end, at_best = bounds.factors.index_select(1, length)
    now = ends & (torch.arange(rules.keep, device=ends.device) < beams)
    scores = by_factor(found, at_end)
    full = torch.all(texts.ended, dim=-1, keepdim=True) & (early is True)
    scores = scores + full.to(torch.float32) * NEVER
    scores = scores + (~texts.hopeful).to(torch.float32) * NEVER
    scores = scores + (~now) * NEVER
    merged = torch.cat((texts.scores, scores), dim=1)
    chosen = torch.topk(merged, k=beams)[1]
    sequences = _of(torch.cat((texts.sequences, grown), dim=1), chosen)
    came = _of(torch.cat((texts.indices, indices), dim=1), chosen)
    ended = _of(torch.cat((texts.ended, now), dim=1), chosen)
    scores = _of(merged, chosen)

    worst = torch.where(ended, torch.min(scores, dim=1, keepdim=True)[0], NEVER)
    hopeful = texts.hopeful & torch.any(by_factor(running[1][:, :1], at_best) > worst, dim=-1, keepdim=True)
    goes_on = torch.any(hopeful) & ~(torch.all(ended) & (early is True)) & ~torch.all(ends)
    made = Texts(*running, sequences, scores, came, ended, hopeful)
    return *one_of_each(made, bounds._replace(length=length + 1)), goes_on


class FusedBeams(LateBeams):
    """A model as stock's loop of beams sees it, whose steps are `advanced`. texts: behind the last of them."""

    texts: Texts | None = None
    held: tuple[torch.Tensor, torch.Tensor]  # what they are, as it is handed on
    asked: tuple[torch.Tensor, dict[str, Any]]
    running: tuple
    finished: tuple
    unread: torch.Tensor
    further: torch.Tensor | None = None  # whether any text goes on

    def __init__(self, forward: Seq2SeqForward, ids: torch.Tensor, config: Any, bounds: Bounds):
        super().__init__(forward.module, ids, config.max_length)
        self.forward, self.bounds, self.early = forward, bounds, config.early_stopping

    def prepare_inputs_for_generation(self, ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        self.asked = ids, kwargs
        return {}

    def __call__(self, **_: Any) -> Any:
        ids, kwargs = self.asked
        try:
            found = self.forward.continued(generating_cache(kwargs), ids[:, -1:])
        except Unfit:  # the call of the model finds the same, and reports it
            found = None
        if found is not None:
            return logits_alone(found)
        return self.model(**getattr(self.model, PREPARE)(ids, **kwargs), return_dict=True)

    def _get_top_k_continuations(self, **given: Any) -> tuple:
        if self.texts is None:
            return self.model._get_top_k_continuations(**given)
        candidates = given["accumulated_log_probs"]
        rows, room = self.texts.scores.shape, self.bounds.factors.shape[1]
        rules = Rules(rows[0], rows[1], given["beams_to_keep"], room, len(self.bounds.ends), self.early)
        *held, self.further = self.advanced(rules, candidates)
        self.held = held[0], held[1]
        self.texts = texts_of(rules, *self.held)[0]
        self.unread = candidates.new_zeros(len(candidates) * rules.keep, dtype=torch.bool)
        return (given["running_sequences"],) * 3  # of which only the criteria are shown something

    def advanced(self, rules: Rules, candidates: torch.Tensor) -> Any:
        runner, eager, call = self.forward.runner, partial(advanced, rules), (candidates, *self.held)
        if runner is None or not candidates.is_cuda:
            return eager(*call)
        replayed = runner.begin(call, {}, rules, at_once=True) if self.forward.course.left else None
        return runner(eager, call, {}, rules) if replayed is None else replayed.outputs

    def _reorder_cache(self, cache: Any, order: torch.Tensor) -> Any:
        if hasattr(self.model, "_reorder_cache"):
            return self.model._reorder_cache(cache, order)
        if not self.forward.reordered(cache, order):
            cache.reorder_cache(order)
        return cache

    def asked_of(self, criteria: StoppingCriteriaList) -> Callable:
        """In their place: what they say of the first step; `advanced` asks them of others, so anything in that form."""

        def ends(ids: torch.Tensor, scores: Any, **given: Any) -> torch.Tensor:
            return criteria(ids, scores, **given) if self.texts is None else self.unread

        return ends

    def _get_running_beams_for_next_iteration(self, **given: Any) -> tuple:
        if self.texts is None:
            self.running = self.model._get_running_beams_for_next_iteration(**given)
            return self.running
        return self.texts[:3]

    def updated(self, given: dict[str, Any]) -> tuple:
        if self.texts is None:
            self.finished = super().updated(given)
            return self.finished
        return self.texts[3:7]

    def _check_early_stop_heuristic(self, **given: Any) -> torch.Tensor:
        if self.texts is None:
            hopeful = self.model._check_early_stop_heuristic(**given)
            self.texts = Texts(*map(self.with_room, (*self.running, *self.finished, hopeful)))
            self.held = one_of_each(self.texts, self.bounds)
        return self.texts.hopeful

    def with_room(self, tensor: torch.Tensor) -> torch.Tensor:
        more = 0 if tensor.dim() < 3 else self.bounds.factors.shape[1] - tensor.shape[2]
        return torch.nn.functional.pad(tensor, (0, more), value=-1)

    def goes_on(self, *args: Any) -> torch.Tensor:
        return super().goes_on(*args) if self.further is None else self.further


def bounds_of(config: Any, criteria: StoppingCriteriaList, ids: torch.Tensor) -> Bounds | None:
    """Of a call whose first step is to be made, for the steps behind it; None where it ends by other criteria."""
    given, penalty = ids.shape[1], config.length_penalty
    longest = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
    ends = [one.eos_token_id.reshape(-1).to(ids) for one in criteria if type(one) is EosTokenCriteria]
    if len(longest) + len(ends) < len(criteria):
        return None
    reached = config.max_length if config.early_stopping == "never" and penalty > 0 else None
    room = -(-config.max_length // ROOM) * ROOM
    try:
        now = [float(max(1, length + 1 - given) ** penalty) for length in range(room)]
        best = now if reached is None else [float((reached - given) ** penalty)] * room
    except OverflowError:
        return None
    factors = torch.tensor([now, best], dtype=torch.float32, device="cpu")
    most = min([*longest, config.max_length + 1])
    length, before, most_ = ids.new_tensor([given + 1, given, most]).split(1)
    factors = factors.reciprocal() if ids.is_cuda else factors
    return Bounds(length, before, most_, torch.cat([ids.new_empty(0), *ends]), factors.to(ids.device))


def fused_beams(
    model: Any, config: Any, criteria: StoppingCriteriaList, ids: torch.Tensor, given: dict
) -> Bounds | None:
    """What `beams_advanced` is to be given of such a call; None where it is for stock's methods."""
    known = {PREPARE, *(name for name in vars(FusedBeams) if name.startswith("_") and not name.startswith("__"))}
    asked = known <= {*AS_IMPORTED[BEAMS].__code__.co_names}
    return bounds_of(config, criteria, ids) if asked and follows(model, config, given) else None


def beams_advanced(
    forward: Seq2SeqForward,
    bounds: Bounds,
    model: Any,
    input_ids: torch.Tensor,
    *,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Stock's loop of beams, of a call that gives tokens alone."""
    view = FusedBeams(forward, input_ids, generation_config, bounds)
    call = {"stopping_criteria": view.asked_of(stopping_criteria), "generation_config": generation_config}
    return AS_IMPORTED[BEAMS](view, input_ids, **call, **kwargs)
