"""A step of beam search, all of it: stock's arithmetic takes some eighty small operations for it.

The method is that of transformers (`GenerationMixin._beam_search`): of each text `beams` running sequences go on, and
the best `beams` that have ended are kept. Here a text's length is a number on the device, so a CUDA graph can hold it.
"""

from functools import partial
from typing import NamedTuple

import torch

from accel_kernels.op import contiguous_reason, dtype_reason, make_op, random_cases

NEVER = -1.0e9  # the score of what is not to be taken
MOST = 32  # continuations of a text that are kept
ROOM = 64  # tokens: rooms are multiples of it


class BeamRules(NamedTuple):
    """What a graph holds for. texts, beams: how many, of a text; keep: continuations of a text that are looked at.

    room: tokens of a text that there is room for; ends: how many tokens end a sequence; early: whether a text ends when
    `beams` sequences of it have. exact: of equal scores those that torch.topk takes, which on a GPU need not be the
    first: by torch, for models in float32.
    """

    texts: int
    beams: int
    keep: int
    room: int
    ends: int
    early: bool
    exact: bool = False


class BeamTexts(NamedTuple):
    """Running sequences, and the best of those that have ended; rows where nothing has ended yet count for nothing.

    running, sequences: (texts, beams, room) int64, tokens. running_origins, origins: the same, of which row each new
    token came. ended: (texts, beams) bool, of `sequences`. hopeful: (texts,) bool, whether a running one may still
    become better than those that have ended. length: (1,) int64, tokens so far. tokens: (texts, beams) int64, the last
    of each running sequence; order: the same, of which row it came; over: (1,) bool, whether all texts are.

    given, most: (1,) int64, tokens before the first step, and in the end. stops: (ends,) int64, tokens that end a
    sequence. running_scores, scores: (texts, beams) float32. at_end, at_best: (room,) float32, by tokens so far,
    `by_factor` by which scores become those of a sequence that ends now, and those that a running one may reach.
    """

    running: torch.Tensor
    running_origins: torch.Tensor
    sequences: torch.Tensor
    origins: torch.Tensor
    ended: torch.Tensor
    hopeful: torch.Tensor
    length: torch.Tensor
    tokens: torch.Tensor
    order: torch.Tensor
    over: torch.Tensor
    given: torch.Tensor
    most: torch.Tensor
    stops: torch.Tensor
    running_scores: torch.Tensor
    scores: torch.Tensor
    at_end: torch.Tensor
    at_best: torch.Tensor

    def packed(self) -> torch.Tensor:
        """All as one tensor of int64, float32 two to a number: a graph copies each that it is given, and gives."""
        numbers, floats = self[:-FLOATS], self[-FLOATS:]
        whole = torch.cat([one.flatten() for one in floats]).view(torch.int64)
        return torch.cat([*(one.flatten().long() for one in numbers), whole])

    @classmethod
    def place(cls, rules: BeamRules, name: str) -> int:
        """Where a field of int64 begins in what `packed` gives."""
        return sum(sizes(rules)[: cls._fields.index(name)])

    @classmethod
    def unpacked(cls, rules: BeamRules, packed: torch.Tensor) -> "BeamTexts":
        """Views of what `packed` has put together, but for what is bool."""
        texts, beams, rows = rules.texts, rules.beams, rules.texts * rules.beams
        *numbers, floats = packed.split(sizes(rules))
        running, running_origins, sequences, origins = (one.view(texts, beams, -1) for one in numbers[:4])
        ended, hopeful, length, tokens, order, over, given, most, stops = numbers[4:]
        open_scores, scores, at_end, at_best = floats.view(torch.float32).split([rows, rows, rules.room, rules.room])
        return cls(
            running,
            running_origins,
            sequences,
            origins,
            ended.view(texts, beams).bool(),
            hopeful.bool(),
            length,
            tokens.view(texts, beams),
            order.view(texts, beams),
            over.bool(),
            given,
            most,
            stops,
            open_scores.view(texts, beams),
            scores.view(texts, beams),
            at_end,
            at_best,
        )


FLOATS = 4  # fields of float32, behind the others


def sizes(rules: BeamRules) -> list[int]:
    """Numbers of int64 of each field, those of float32 together."""
    rows = rules.texts * rules.beams
    return [*[rows * rules.room] * 4, rows, rules.texts, 1, rows, rows, 1, 1, 1, rules.ends, rows + rules.room]


def _of(tensor, beams):
    """Of each text these beams, (texts, number) int64."""
    return torch.take_along_dim(tensor, beams[:, :, None] if tensor.dim() == 3 else beams, dim=1)


def by_factor(scores, factor):
    """As by a number in Python, by whose reciprocal torch multiplies on a GPU."""
    return scores * factor if scores.is_cuda else scores / factor


def sorted_top(x, k):
    """The k largest and their places, of equals the first, NaN above all."""
    found, places = torch.sort(x, dim=-1, descending=True, stable=True)
    return found[..., :k], places[..., :k]


def reference(logits, packed, *, rules, normalized=False, top=sorted_top):
    """logits: (rows, V), behind the last token of each running sequence; normalized: they are log probabilities.

    packed: the texts, as `BeamTexts.packed` gives them. Returns them with one token more.
    """
    texts, (number, beams, keep, _, _, early, _) = BeamTexts.unpacked(rules, packed), rules
    scores = logits if normalized else torch.nn.functional.log_softmax(logits.float(), dim=-1)
    words, length = logits.shape[1], texts.length
    scores = scores.view(number, beams, words) + texts.running_scores[:, :, None]
    found, places = top(scores.flatten(1), keep)
    origin, token = places // words, places % words
    grown = _of(texts.running, origin).index_copy(2, length, token[:, :, None])
    row = origin + torch.arange(number, device=origin.device)[:, None] * beams
    origins = _of(texts.running_origins, origin).index_copy(2, length - texts.given, row[:, :, None])
    over = (token[:, :, None] == texts.stops).any(-1) | (length + 1 >= texts.most)

    open_ = found + over.to(torch.float32) * NEVER
    best = top(open_, beams)[1]
    running_scores = _of(open_, best)

    now = over & (torch.arange(keep, device=over.device) < beams)
    scores = by_factor(found, texts.at_end.index_select(0, length))
    full = torch.all(texts.ended, dim=-1, keepdim=True) & early
    scores = scores + full.to(torch.float32) * NEVER
    scores = scores + (~texts.hopeful[:, None]).to(torch.float32) * NEVER
    scores = scores + (~now) * NEVER
    merged = torch.cat((texts.scores, scores), dim=1)
    chosen = top(merged, beams)[1]
    ended, scores = _of(torch.cat((texts.ended, now), dim=1), chosen), _of(merged, chosen)

    worst = torch.where(ended, torch.min(scores, dim=1, keepdim=True)[0], NEVER)
    possible = by_factor(running_scores[:, :1], texts.at_best.index_select(0, length))
    hopeful = texts.hopeful & torch.any(possible > worst, dim=-1)
    stop = ~torch.any(hopeful) | (torch.all(ended) & early) | torch.all(over)
    return texts._replace(
        running=_of(grown, best),
        running_origins=_of(origins, best),
        sequences=_of(torch.cat((texts.sequences, grown), dim=1), chosen),
        origins=_of(torch.cat((texts.origins, origins), dim=1), chosen),
        ended=ended,
        hopeful=hopeful,
        length=length + 1,
        tokens=_of(token, best),
        order=_of(row, best),
        over=stop,
        running_scores=running_scores,
        scores=scores,
    ).packed()


quick = partial(reference, top=torch.topk)  # of equals any, as stock's


def supports(logits, packed, *, rules, normalized=False) -> str | None:
    if rules.exact:
        return "of equals those that torch takes"
    if logits.dim() != 2 or len(logits) != rules.texts * rules.beams or logits.stride(1) != 1:
        return f"logits of shape {tuple(logits.shape)}, or not contiguous rows"
    if rules.keep > MOST or rules.keep > logits.shape[1]:
        return f"{rules.keep} continuations of a text, more than {MOST} or than there are words"
    if logits.shape[1] * rules.beams >= 2**31:
        return "more words of all beams than an int32 counts"
    if packed.dtype != torch.int64 or packed.device != logits.device or packed.shape != (sum(sizes(rules)),):
        return f"texts of {packed.dtype}, of shape {tuple(packed.shape)}, or on another device than logits"
    return contiguous_reason(texts=packed) or dtype_reason(logits)


@random_cases
def _case(rand, texts, beams, words, length, room=ROOM, ends=1, early=False, normalized=False, wide=1, done=0.4):
    """A search in which a share of `done` of the kept sequences has ended."""
    rules = BeamRules(texts, beams, max(2, 1 + ends) * beams, room, ends, early)
    logits = rand(texts * beams, wide * words, spread=3.0)[:, :words]
    logits = torch.log_softmax(logits.float(), -1) if normalized else logits

    def tokens():
        found = (rand.uniform(texts, beams, room) * words).long()
        found[:, :, length:] = -1
        return found

    def number(*value):
        return torch.tensor(value, device=rand.device)

    scores = -rand.uniform(texts, beams).cumsum(1) * length
    ended = rand.uniform(texts, beams) < done
    best = torch.where(ended, -rand.uniform(texts, beams), NEVER).sort(descending=True)[0]
    ended = best > NEVER / 2
    hopeful = ~ended.all(1) | (rand.uniform(texts) < 0.5)
    factors = torch.arange(1, room + 1, device=rand.device, dtype=torch.float32)
    factors = factors.reciprocal() if factors.is_cuda else factors
    whole, last = (tokens(), tokens(), tokens(), tokens()), tokens()[:, :, 0]
    bounds = number(2), number(room), torch.arange(ends, device=rand.device)
    made = BeamTexts(
        *whole, ended, hopeful, number(length), last, last, number(0), *bounds, scores, best, factors, factors
    )
    return (logits, made.packed()), {"rules": rules, "normalized": normalized}


CASES = (
    _case("one", 1, 1, 97, 2, small=True),
    _case("early", 3, 3, 131, 9, early=True, ends=3, wide=2, small=True),
    _case("last", 2, 4, 2500, 63, normalized=True, small=True),
    _case("ended", 2, 2, 64, 70, room=128, ends=0, done=1.0, early=True, small=True),
    _case("marian", 4, 4, 58101, 30),
    _case("nllb", 4, 5, 256206, 99, room=256, normalized=True),
)

beam_step = make_op("beam_step", reference, supports, CASES, on_cpu=quick, instead=quick)
