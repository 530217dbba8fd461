"""Beam search of encoder-decoder models: stock's own loop makes the first step, this the others.

What stock computes between two steps is `beam_step`. Where no processors come between, a step and that are one CUDA
graph. The host learns a step late that all texts are over, and drops what that step found.
"""

from typing import Any, NamedTuple

import torch
from accel_kernels import BeamRules, BeamTexts, beam_step
from transformers import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList

from accel.errors import reason_of
from accel.libraries.cache import generating_cache
from accel.libraries.generation import AS_IMPORTED, BEAMS, PREPARE, REORDER
from accel.seq2seq.decoder import Seq2SeqForward
from accel.seq2seq.late_check import Teller
from accel.seq2seq.memory_loop import FirstToken, follows
from accel.seq2seq.step_forward import Choice

ROOM = 64  # tokens: rooms of texts are multiples of it, so that graphs hold for others too


class Bounds(NamedTuple):
    """What `BeamTexts` says of a call from its beginning, and the room of its texts."""

    given: torch.Tensor
    most: torch.Tensor
    stops: torch.Tensor
    at_end: torch.Tensor
    at_best: torch.Tensor
    room: int


class GrownBeams(NamedTuple):
    """What a graph does behind the logits of a step, see `Choice`. Equal for equal rules, which its key asks for."""

    rules: BeamRules

    def __call__(self, logits: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return beam_step(logits, packed, rules=self.rules)


class FirstBeams(FirstToken):
    """A model as stock's loop sees it, which ends behind the first step. What that found is kept."""

    running: tuple
    finished: tuple
    hopeful: torch.Tensor
    goes_on: torch.Tensor
    keep: int  # continuations of a text that it looks at

    def _get_running_beams_for_next_iteration(self, **given: Any) -> tuple:
        self.keep = given["topk_log_probs"].shape[1]
        self.running = self.model._get_running_beams_for_next_iteration(**given)
        return self.running

    def _update_finished_beams(self, **given: Any) -> tuple:
        self.finished = self.model._update_finished_beams(**given)
        return self.finished

    def _check_early_stop_heuristic(self, **given: Any) -> torch.Tensor:
        self.hopeful = self.model._check_early_stop_heuristic(**given)
        return self.hopeful

    def _beam_search_has_unfinished_sequences(self, *args: Any) -> torch.Tensor:
        self.goes_on = self.model._beam_search_has_unfinished_sequences(*args)
        return self.goes_on

    def texts(self, length: int, bounds: Bounds) -> BeamTexts:
        """Behind the first step, of so many tokens."""

        def with_room(tensor: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(tensor, (0, bounds.room - tensor.shape[2]), value=-1)

        sequences, scores, origins = self.running
        ended_sequences, ended_scores, ended_origins, ended = self.finished
        return BeamTexts(
            running=with_room(sequences),
            running_origins=with_room(origins),
            sequences=with_room(ended_sequences),
            origins=with_room(ended_origins),
            ended=ended,
            hopeful=self.hopeful,
            length=sequences.new_tensor([length]),
            tokens=sequences[:, :, length - 1],
            order=origins[:, :, 0],
            over=~self.goes_on,
            running_scores=scores,
            scores=ended_scores,
            **{name: getattr(bounds, name) for name in ("given", "most", "stops", "at_end", "at_best")},
        )


class BeamLoop:
    """The rest of one call of beams, over the fixed memory.

    kwargs: of the model, behind the first step; its cache is in the fixed memory as long as no other text takes its
    place. length: tokens so far. clocks: criteria that end all texts by the time.
    """

    def __init__(
        self,
        forward: Seq2SeqForward,
        processors: LogitsProcessorList,
        rules: BeamRules,
        kwargs: dict[str, Any],
        length: int,
        clocks: list[MaxTimeCriteria],
    ):
        self.forward, self.processors, self.rules, self.kwargs = forward, processors, rules, kwargs
        self.clocks, self.blank = clocks, torch.zeros(1, 1, dtype=torch.long, device="cpu")
        self.cache, self.length, self.fused = generating_cache(kwargs), length, True
        self.rows = rules.texts * rules.beams
        names = ("tokens", "order", "over", "most")
        self.tokens, self.order, self.over, self.most = (BeamTexts.place(rules, name) for name in names)

    def run(self, packed: torch.Tensor, steps: int) -> BeamTexts:
        """So many steps at most, but for those behind the end. packed: the texts, behind the first step."""
        tell = Teller(packed, packed.dtype)
        told = tell(packed[self.over], 0)
        for number in range(1, steps + 1):
            if any([bool(one(self.blank, None)) for one in self.clocks]):
                packed[self.most] = 0  # the next token is each text's last
            new = self.next(packed)
            if told.read():  # what a step too many has found is dropped
                break
            packed, told, self.length = new, tell(new[self.over], number), self.length + 1
        return BeamTexts.unpacked(self.rules, packed)

    def in_one(self, packed: torch.Tensor) -> bool:
        """Whether a graph may hold all of a step but the order of the cache."""
        return packed.is_cuda and not self.processors

    def next(self, packed: torch.Tensor) -> torch.Tensor:
        """The texts with one token more, and the cache in their order."""
        choice = Choice(GrownBeams(self.rules), (packed,)) if self.in_one(packed) else None
        made = None if choice is None else self._continued(packed, choice)
        made = self._in_parts(packed) if made is None else made
        order = made[self.order : self.order + self.rows]
        if not self.forward.reordered(self.cache, order, self.rules.beams):
            self.cache.reorder_cache(order)
        return made

    def _in_parts(self, packed: torch.Tensor) -> torch.Tensor:
        ids = BeamTexts.unpacked(self.rules, packed).running[:, :, : self.length].flatten(0, 1)
        scores = torch.nn.functional.log_softmax(self._logits(packed, ids)[:, -1].float(), dim=-1)
        return beam_step(self.processors(ids, scores), packed, rules=self.rules, normalized=True)

    def _continued(self, packed: torch.Tensor, choice: Choice | None) -> Any:
        tokens = packed[self.tokens : self.tokens + self.rows, None]
        try:
            return self.forward.continued(self.cache, tokens, choice) if self.fused else None
        except Exception as error:  # whatever a forward may raise: the call of the model finds the same, and reports it
            reason_of(error)
            self.fused = False
            return None

    def _logits(self, packed: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        found = self._continued(packed, None)
        if found is not None:
            return found
        model = self.forward.module
        return model(**getattr(model, PREPARE)(ids, next_sequence_length=1, **self.kwargs), return_dict=True).logits


def bounds_of(config: Any, criteria: StoppingCriteriaList, ids: torch.Tensor) -> Bounds | None:
    """Of a call whose first step is to be made, for the steps behind it; None where it ends by other criteria."""
    given, penalty = ids.shape[1], config.length_penalty
    longest = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
    ends = [one.eos_token_id.reshape(-1).to(ids) for one in criteria if type(one) is EosTokenCriteria]
    clocks = sum(type(one) is MaxTimeCriteria for one in criteria)  # `BeamLoop` asks them
    if len(longest) + len(ends) + clocks < len(criteria):
        return None
    reached = config.max_length if config.early_stopping == "never" and penalty > 0 else None
    room = -(-config.max_length // ROOM) * ROOM
    try:
        now = [float(max(1, length + 1 - given) ** penalty) for length in range(room)]
        best = now if reached is None else [float((reached - given) ** penalty)] * room
    except OverflowError:
        return None
    factors = torch.tensor([now, best], dtype=torch.float32, device="cpu")
    factors = (factors.reciprocal() if ids.is_cuda else factors).to(ids.device)
    first, most = ids.new_tensor([given, min([*longest, config.max_length + 1])]).split(1)
    return Bounds(first, most, torch.cat([ids.new_empty(0), *ends]), factors[0], factors[1], room)


def known_beams(
    model: Any, config: Any, criteria: StoppingCriteriaList, ids: torch.Tensor, given: dict
) -> Bounds | None:
    """What `beams_fused` is to be given of such a call; None where it is for stock's loop.

    A draw of one step more might find too few candidates left; and stock's loop raises where a text grows too long.
    """
    asked = {name for name in vars(FirstBeams) if name.startswith("_") and not name.startswith("__")}
    known = asked <= {*AS_IMPORTED[BEAMS].__code__.co_names} and not hasattr(model, REORDER)
    seen = getattr(generating_cache(given), "_is_user_defined", False)
    longer = (criteria.max_length or 0) > config.max_length
    if not known or config.do_sample or seen or longer or not follows(model, config, given):
        return None
    return bounds_of(config, criteria, ids)


def beams_fused(
    forward: Seq2SeqForward,
    bounds: Bounds,
    model: Any,
    input_ids: torch.Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """(rows, tokens), what stock's loop gives, of a call that gives tokens alone."""
    first, config = FirstBeams(model), generation_config
    call: dict[str, Any] = {"stopping_criteria": stopping_criteria, "generation_config": config}
    alone = AS_IMPORTED[BEAMS](first, input_ids, logits_processor=logits_processor, **call, **kwargs)
    sequences, length = first.running[0], input_ids.shape[1] + 1
    steps = config.max_length - length
    if steps <= 0:
        return alone
    (texts, beams, _), early = sequences.shape, config.early_stopping is True
    rules = BeamRules(texts, beams, first.keep, bounds.room, len(bounds.stops), early, first.dtype == torch.float32)
    begun = first.texts(length, bounds).packed()
    clocks = [one for one in stopping_criteria if type(one) is MaxTimeCriteria]
    found = BeamLoop(forward, logits_processor, rules, first.kwargs, length, clocks).run(begun, steps)
    returned = config.num_return_sequences
    sequences, origins = (one[:, :returned].flatten(0, 1) for one in (found.sequences, found.origins))
    return sequences[:, : input_ids.shape[1] + int((origins >= 0).sum(1).max())]
