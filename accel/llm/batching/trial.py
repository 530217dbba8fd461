"""Whether the engine can batch requests of a model: tried once, before the first request."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from accel.errors import Unfit, reason_of
from accel.libraries.cache import DynamicCache, new_cache
from accel.llm.batching.engine import Engine
from accel.llm.batching.limits import Limits, sets_of
from accel.llm.batching.scheduler import StepPlan
from accel.llm.batching.step import MOST_PREFILLS, head_size
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.mixed import MixedForward
from accel.llm.generation.routing import Choices, noting, repeating, routed_modules, routing_modules
from accel.llm.generation.trial import Expected, expected, plainly
from accel.llm.kv_cache.shape import BLOCK
from accel.llm.pipeline.forward import SpreadForward
from accel.llm.recording.inputs import example_ids, within_positions
from accel.llm.recording.resting import resting
from accel.offload.call_hooks import one_call
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
    engine = _engine(forward)
    apart = engine.scheduler.apart  # else some tokens would be computed as those of answers, and not as alone
    steps, plans = engine.steps, [_step_plan(ids.cpu().numpy(), *step, apart) for step in pairwise(lengths)]
    if engine.allocator.states is not None:
        for plan in plans:
            plan.slots = engine.allocator.states.step(plan.rows)
    run_alone = partial(_alone, ids, lengths, partial(_fused_logits, forward))
    steps.warm_up([*plans, *_large()], run_alone)
    with noting(1, modules) as found:
        alone = run_alone()
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
    moves = expected(forward, partial(_alone, ids, lengths, partial(_stock_logits, forward))).moves()
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


def _alone(ids: torch.Tensor, lengths: np.ndarray, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Each text in a call of its own. run: gives all logits of tokens (1, n)."""
    texts = zip(ids, lengths[1:].T, strict=True)
    return torch.stack([run(text[None, : ends[-1]])[0, ends - 1] for text, ends in texts])


def _fused_logits(forward: DecoderForward, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None] if "position_ids" in forward.names else None
    with one_call(forward.module, tokens.numel()):
        return forward.run(forward.adopt(DynamicCache()), tokens, positions, None, 0)


def _stock_logits(forward: DecoderForward, tokens: torch.Tensor) -> torch.Tensor:
    with plainly(forward):
        given = forward.given_cache(new_cache(forward.module))
        return forward.reference(input_ids=tokens, **given).logits


def _engine(forward: DecoderForward) -> Engine:
    """With room for both texts, each in its row."""
    engine = Engine(forward, Limits(rows=2, context=BLOCK, blocks=2 * len(sets_of(forward)), share=False))
    for row in (0, 1):
        engine.allocator.open(row, [0])
        engine.allocator.extend(row, BLOCK)
    engine.kv_cache.upload(*engine.allocator.changes())
    return engine


def _large() -> list[StepPlan]:
    """To compile what they launch: steps of so many tokens that no graph is made for them, all sequences of one row.

    They are of prompts with a decode and without, and one of decodes alone, of so many that none shares its keys.
    Decodes draw, prompts where there are no decodes.
    """
    plans = []
    for ones, prompts in ((1, MOST_PREFILLS), (0, MOST_PREFILLS), (2 * MOST_PREFILLS, 0)):
        new = np.concatenate([np.ones(ones, np.int64), np.full(prompts, BLOCK)])
        rows = np.zeros(len(new), np.int64)
        plans.append(_plan(rows, rows, new, ones, np.zeros(new.sum(), np.int64), np.arange(ones or prompts)))
    return plans


def _step_plan(ids: np.ndarray, before: np.ndarray, after: np.ndarray, prompts: bool) -> StepPlan:
    """Of both texts, a row each; both draw. prompts: all tokens are those of prompts."""
    both, new = np.arange(2), after - before
    tokens = np.concatenate([text[start:end] for text, start, end in zip(ids, before, after, strict=True)])
    decodes = int((new == 1).sum()) if before.any() and not prompts else 0
    plan = _plan(both, before, new, decodes, tokens, both)
    plan.prompts = after
    return plan


def _plan(
    rows: np.ndarray, lengths: np.ndarray, new: np.ndarray, decodes: int, tokens: np.ndarray, sources: np.ndarray
) -> StepPlan:
    return StepPlan(rows, lengths, new, decodes, tokens, sources, rows[sources], np.empty(0, np.int64), [], [])
