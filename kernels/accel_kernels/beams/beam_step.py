"""A step of beam search, all of it: stock's arithmetic takes some eighty small operations for it.

The method is that of transformers (`GenerationMixin._beam_search`): of each text `beams` running sequences go on, and
the best `beams` that have ended are kept. Here a text's length is a number on the device, so a CUDA graph can hold it.
"""

from typing import NamedTuple

import torch

from accel_kernels.op import contiguous_reason, dtype_reason, make_op, random_cases

NEVER = -1.0e9  # the score of what is not to be taken
MOST = 32  # continuations of a text that are kept
ROOM = 64  # tokens: rooms are multiples of it


class BeamRules(NamedTuple):
    """What a graph holds for. texts, beams: how many, of a text; keep: continuations of a text that are looked at.

    room: tokens of a text that there is room for; early: whether a text ends when `beams` sequences of it have.
    """

    texts: int
    beams: int
    keep: int
    room: int
    early: bool


class BeamTexts(NamedTuple):
    """Running sequences, and the best of those that have ended; rows where nothing has ended yet count for nothing.

    running, sequences: (texts, beams, room) int64, tokens. running_origins, origins: the same, of which row each new
    token came. ended: (texts, beams) bool, of `sequences`. hopeful: (texts, 1) bool, whether a running one may still
    become better than those that have ended. length: (1,) int64, tokens so far. running_scores, scores: (texts, beams)
    float32.
    """

    running: torch.Tensor
    running_origins: torch.Tensor
    sequences: torch.Tensor
    origins: torch.Tensor
    ended: torch.Tensor
    hopeful: torch.Tensor
    length: torch.Tensor
    running_scores: torch.Tensor
    scores: torch.Tensor

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All as one tensor of int64 and one of float32: a graph copies each that it is given, and that it gives."""
        *numbers, running, scores = self
        return torch.cat([one.flatten().long() for one in numbers]), torch.cat([running.flatten(), scores.flatten()])

    @classmethod
    def unpacked(cls, rules: BeamRules, ints: torch.Tensor, floats: torch.Tensor) -> "BeamTexts":
        """Views of what `packed` has put together, but for what is bool."""
        texts, beams, _, room, _ = rules
        rows = texts * beams
        *tokens, ended, hopeful, length = ints.split([*[rows * room] * 4, rows, texts, 1])
        whole = (one.view(texts, beams, room) for one in tokens)
        scores = (one.view(texts, beams) for one in floats.split(rows))
        return cls(*whole, ended.view(texts, beams).bool(), hopeful.view(texts, 1).bool(), length, *scores)


def _of(tensor, beams):
    """Of each text these beams, (texts, number) int64."""
    return torch.take_along_dim(tensor, beams[:, :, None] if tensor.dim() == 3 else beams, dim=1)


def by_factor(scores, factor):
    """As by a number in Python, by whose reciprocal torch multiplies on a GPU."""
    return scores * factor if scores.is_cuda else scores / factor


def reference(logits, ints, floats, bounds, factors, *, rules, normalized=False):
    """logits: (rows, V), behind the last token of each running sequence; normalized: they are log probabilities.

    ints, floats: the texts, as `BeamTexts.packed`. bounds: (2 + number,) int64: tokens before the first step, tokens
    in the end, and those that end a sequence. factors: (2, room) float32, by tokens so far, `by_factor` by which scores
    become those of a sequence that ends now, and those that a running one may reach.

    Returns the texts with one token more, packed; the new tokens (rows, 1) int64; of which row each came, (rows,)
    int64; and whether all texts are over, () bool.
    """
    texts, (number, beams, keep, _, early) = BeamTexts.unpacked(rules, ints, floats), rules
    scores = logits if normalized else torch.nn.functional.log_softmax(logits.float(), dim=-1)
    words, length, given, ends = logits.shape[1], texts.length, bounds[:1], bounds[2:]
    scores = scores.view(number, beams, words) + texts.running_scores[:, :, None]
    found, places = torch.topk(scores.flatten(1), k=keep)
    origin, token = places // words, places % words
    grown = _of(texts.running, origin).index_copy(2, length, token[:, :, None])
    row = origin + torch.arange(number, device=origin.device)[:, None] * beams
    origins = _of(texts.running_origins, origin).index_copy(2, length - given, row[:, :, None])
    over = (token[:, :, None] == ends).any(-1) | (length + 1 >= bounds[1])

    open_ = found + over.to(torch.float32) * NEVER
    best = torch.topk(open_, k=beams)[1]
    running, running_scores = _of(grown, best), _of(open_, best)

    at_end, at_best = factors.index_select(1, length)
    now = over & (torch.arange(keep, device=over.device) < beams)
    scores = by_factor(found, at_end)
    full = torch.all(texts.ended, dim=-1, keepdim=True) & early
    scores = scores + full.to(torch.float32) * NEVER
    scores = scores + (~texts.hopeful).to(torch.float32) * NEVER
    scores = scores + (~now) * NEVER
    merged = torch.cat((texts.scores, scores), dim=1)
    chosen = torch.topk(merged, k=beams)[1]
    sequences = _of(torch.cat((texts.sequences, grown), dim=1), chosen)
    came = _of(torch.cat((texts.origins, origins), dim=1), chosen)
    ended = _of(torch.cat((texts.ended, now), dim=1), chosen)
    scores = _of(merged, chosen)

    worst = torch.where(ended, torch.min(scores, dim=1, keepdim=True)[0], NEVER)
    hopeful = texts.hopeful & torch.any(by_factor(running_scores[:, :1], at_best) > worst, dim=-1, keepdim=True)
    stop = ~torch.any(hopeful) | (torch.all(ended) & early) | torch.all(over)
    now_running = running, _of(origins, best), sequences, came, ended, hopeful, length + 1, running_scores, scores
    return *BeamTexts(*now_running).packed(), _of(token, best).view(-1, 1), _of(row, best).flatten(), stop


def supports(logits, ints, floats, bounds, factors, *, rules, normalized=False) -> str | None:
    if logits.dim() != 2 or len(logits) != rules.texts * rules.beams or logits.stride(1) != 1:
        return f"logits of shape {tuple(logits.shape)}, or not contiguous rows"
    if rules.keep > MOST or rules.keep > logits.shape[1]:
        return f"{rules.keep} continuations of a text, more than {MOST} or than there are words"
    if logits.shape[1] * rules.beams >= 2**31:
        return "more words of all beams than an int32 counts"
    if any(one.dtype != torch.int64 for one in (ints, bounds)):
        return "texts that are not int64"
    if any(one.dtype != torch.float32 for one in (floats, factors)):
        return "scores that are not float32"
    if any(one.device != logits.device for one in (ints, floats, bounds, factors)):
        return "texts on another device than logits"
    return contiguous_reason(texts=ints, scores=floats, bounds=bounds, factors=factors) or dtype_reason(logits)


@random_cases
def _case(rand, texts, beams, words, length, room=ROOM, ends=1, early=False, normalized=False, wide=1, done=0.4):
    """A search in which a share of `done` of the kept sequences has ended."""
    rules = BeamRules(texts, beams, max(2, 1 + ends) * beams, room, early)
    logits = rand(texts * beams, wide * words, spread=3.0)[:, :words]
    logits = torch.log_softmax(logits.float(), -1) if normalized else logits

    def tokens():
        found = (rand.uniform(texts, beams, room) * words).long()
        found[:, :, length:] = -1
        return found

    scores = -rand.uniform(texts, beams).cumsum(1) * length
    ended = rand.uniform(texts, beams) < done
    best = torch.where(ended, -rand.uniform(texts, beams), NEVER).sort(descending=True)[0]
    ended = best > NEVER / 2
    hopeful = ~ended.all(1, keepdim=True) | (rand.uniform(texts, 1) < 0.5)
    whole = tokens(), tokens(), tokens(), tokens(), ended, hopeful
    ints, floats = BeamTexts(*whole, torch.tensor([length], device=rand.device), scores, best).packed()
    bounds = torch.tensor([2, room, *range(ends)], device=rand.device)
    factors = torch.arange(1, room + 1, device=rand.device, dtype=torch.float32).repeat(2, 1)
    factors = factors.reciprocal() if factors.is_cuda else factors
    return (logits, ints, floats, bounds, factors), {"rules": rules, "normalized": normalized}


CASES = (
    _case("one", 1, 1, 97, 2, small=True),
    _case("early", 3, 3, 131, 9, early=True, ends=3, wide=2, small=True),
    _case("last", 2, 4, 2500, 63, normalized=True, small=True),
    _case("ended", 2, 2, 64, 70, room=128, ends=0, done=1.0, early=True, small=True),
    _case("marian", 4, 4, 58101, 30),
    _case("nllb", 4, 5, 256206, 99, room=256, normalized=True),
)

beam_step = make_op("beam_step", reference, supports, CASES)
