"""Whether the engine can batch requests of a model: tried once, before the first request."""

from functools import partial
from itertools import pairwise

import numpy as np
import torch

from accel.errors import reason_of
from accel.libraries.cache import DynamicCache
from accel.llm.batching.limits import sets_of
from accel.llm.batching.sampler import Sampler
from accel.llm.batching.scheduler import StepPlan
from accel.llm.batching.spread import MicroBatchStreams, head_device, step_runner
from accel.llm.batching.step import MOST_PREFILLS, StepRunner, head_size
from accel.llm.generation.calling_convention import Unfit
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.mixed import MixedForward
from accel.llm.generation.routing import Choices, noting, repeating, routed_modules, routing_modules
from accel.llm.generation.trial import Expected, expected, plainly
from accel.llm.kv_cache.block_allocator import BlockAllocator
from accel.llm.kv_cache.cache import adopt
from accel.llm.kv_cache.paged_kv_cache import PagedKVCache
from accel.llm.kv_cache.shape import BLOCK
from accel.llm.pipeline.forward import SpreadForward
from accel.llm.recording.inputs import within_positions
from accel.llm.recording.recorder import example_ids, resting
from accel.tolerances import SHARED_EXPERTS, bound

# (new tokens of the first sequence, of the second) of each step: prompts together, one in two parts beside a step of
# the other, and a step of both.
STEPS = ((5, 3), (1, 4), (1, 1))


def refusal(forward: DecoderForward) -> str | None:
    """Why requests of this model run through stock's own batching; None where the engine gives what it gives alone.

    Tries it with two short texts. Raises errors of memory and of the GPU.
    """
    if isinstance(forward, MixedForward):
        return "some of its layers run stock, and would know nothing of sequences of different lengths"
    if isinstance(forward, SpreadForward) and len({one.device.type for one in forward.stretches}) > 1:
        return "its layers are spread over devices of several kinds"
    if forward.convention.kept_tensors:
        return "it goes on with positions that it counted before, of one batch"
    if forward.log.runs_stock_on_cpu((forward.embeddings(),), {}):
        return "it runs stock on a CPU"
    reason = forward.mode()
    if reason is not None:
        return reason
    if not within_positions(forward.most_positions, tuple(map(max, STEPS)))[0]:
        return "too few positions to try it"
    try:
        with torch.no_grad(), resting(forward.module):
            return _difference(forward)
    except Unfit as unfit:
        return str(unfit)
    except Exception as error:  # of a model that looks at its inputs in a way of its own
        return f"could not be tried: {reason_of(error)}"


def _difference(forward: DecoderForward) -> str | None:
    """What comes out otherwise together, if anything does.

    Logits (2, steps, vocabulary) of the last token of each text in each step are compared, by both ways. Together,
    tokens repeat the experts that they chose alone: to a router that finds two nearly equal, rounding decides.
    """
    ids = example_ids(forward.module, sum(map(max, STEPS)), seed=4)[:2]
    lengths = np.cumsum([[0, 0], *STEPS], axis=0)
    modules, wholes = routing_modules(forward), routed_modules(forward)
    steps, plans = _steps(forward, ids, lengths)
    steps.warm_up([*plans, *_large()], partial(_alone, forward, ids, lengths))
    with noting(1, modules) as found:
        alone = _alone(forward, ids, lengths)
    choices = _by_steps(found, lengths) if wholes and found.cover(wholes) else None
    with noting(1, modules) as own, repeating(choices or Choices(1)):
        together = torch.stack([steps.logits(plan) for plan in plans], dim=1).to(alone.device)
    if together.shape[-1] != head_size(forward):
        return f"logits of {together.shape[-1]} tokens, where its head has {head_size(forward)}"
    if not _near(forward, ids, lengths, Expected(alone, found, bool(wholes) and choices is None), together):
        return "together, texts come out as others"
    if choices is not None and choices.shared(own) < bound(SHARED_EXPERTS, alone.dtype):
        return "together, routers choose other experts"
    return None


def _near(
    forward: DecoderForward, ids: torch.Tensor, lengths: np.ndarray, wanted: Expected, together: torch.Tensor
) -> bool:
    """Whether rounding explains the difference, as far as it moves stock where the model is deep."""
    far = not wanted.near(together)
    if forward.ranks is not None:  # whose heads may have rounded otherwise: stock runs on all of them, or on none
        far = forward.ranks.any(far, together.device)
    if not far:
        return True
    moves = expected(forward, lambda: _stock_alone(forward, ids, lengths)).moves()
    return Expected(wanted.logits, wanted.choices, wanted.median, lambda: moves).agrees(together)


def _by_steps(alone: Choices, lengths: np.ndarray) -> Choices | None:
    """Choices of each text in a call of its own as those of steps, text after text; None where calls were others."""
    found = Choices(1)
    for module, notes in alone.notes.items():
        if [len(index) for index, _ in notes] != lengths[-1].tolist():
            return None
        index, shares = zip(*notes, strict=True)
        steps = list(pairwise(lengths))
        found.notes[module] = [(_step_of(index, *step), _step_of(shares, *step)) for step in steps]
    return found


def _step_of(texts: tuple[torch.Tensor, ...], before: np.ndarray, after: np.ndarray) -> torch.Tensor:
    return torch.cat([text[start:end] for text, start, end in zip(texts, before, after, strict=True)])


def _alone(forward: DecoderForward, ids: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    rows = []
    for text, ends in zip(ids, lengths[1:].T, strict=True):
        store = adopt(DynamicCache(), forward.shapes())
        assert not isinstance(store, str)
        tokens = text[None, : ends[-1]]
        places = torch.arange(tokens.shape[1], device=ids.device)[None]
        logits = forward.run(store, tokens, places if "position_ids" in forward.names else None, None, 0)
        rows.append(logits[0, ends - 1])
    return torch.stack(rows)


def _stock_alone(forward: DecoderForward, ids: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    """The same of stock, each text in a call of its own."""
    rows = []
    for text, ends in zip(ids, lengths[1:].T, strict=True):
        given = forward.given_cache(DynamicCache(config=forward.module.config))
        with plainly(forward):
            rows.append(forward.reference(input_ids=text[None, : ends[-1]], **given).logits[0, ends - 1])
    return torch.stack(rows)


def _steps(forward: DecoderForward, ids: torch.Tensor, lengths: np.ndarray) -> tuple[StepRunner, list[StepPlan]]:
    """What runs them together, and what it is to run."""
    shapes, sets = forward.shapes(), sets_of(forward)
    blocks = 2 * len(sets) + 1
    allocator = BlockAllocator(sets, blocks, 2, 1, share=False)
    kv_cache = PagedKVCache(shapes, sets, blocks, 2, 1)
    assert lengths.max() <= BLOCK
    for row in (0, 1):
        allocator.open(row, [0])
        allocator.extend(row, BLOCK)
    kv_cache.upload(*allocator.changes())
    sampler = Sampler(2, head_size(forward), head_device(forward))
    steps = step_runner(forward, kv_cache, sampler, 2, None, MicroBatchStreams(kv_cache.tables, 1))
    return steps, [_plan(ids, before, after) for before, after in pairwise(lengths)]


def _large() -> tuple[StepPlan, ...]:
    """To compile what they launch: steps of so many tokens that no graph is made for them.

    They are of prompts with a decode and without, and one of decodes alone, of so many that none shares its keys.
    """
    prompts, decodes = MOST_PREFILLS, 2 * MOST_PREFILLS
    return tuple(
        _blank(np.concatenate([np.ones(ones, np.int64), np.full(prefills, BLOCK)]), ones)
        for ones, prefills in ((1, prompts), (0, prompts), (decodes, 0))
    )


def _blank(news: np.ndarray, decodes: int) -> StepPlan:
    """So many new tokens of each sequence, all of one row; decodes draw, prompts where there are no decodes."""
    rows, none, drawn = np.zeros(len(news), np.int64), np.empty(0, np.int64), np.arange(decodes or len(news))
    tokens = np.zeros(news.sum(), np.int64)
    return StepPlan(rows, rows, news, decodes, tokens, drawn, rows[drawn], none, [], [])


def _plan(ids: torch.Tensor, before: np.ndarray, after: np.ndarray) -> StepPlan:
    both, none = np.arange(2), np.empty(0, np.int64)
    tokens = [row[start:end] for row, start, end in zip(ids.cpu().numpy(), before, after, strict=True)]
    news = after - before
    decodes = int((news == 1).sum()) if before.any() else 0
    return StepPlan(both, before, news, decodes, np.concatenate(tokens), both, both, none, [], [])
