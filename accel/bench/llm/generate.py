"""A language model's generate(), stock beside accel: correctness first, then decode steps and prompts in turns.

The time of a step is the difference of two calls that write few and many tokens, by the tokens between: nothing watches
the calls, and what a call costs once is in neither.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import accel
from accel.bench.llm.models import beside, build, prompt
from accel.bench.memory import peak_mb, release
from accel.bench.results import WrongResult, reported
from accel.bench.timing import Clock, seconds, take_turns
from accel.llm.recording.inputs import example_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Models = Mapping[str, "PreTrainedModel"]
PROMPT = 2048  # tokens, or as many as the model has positions for


@torch.no_grad()
def measure_generate(
    name: str,
    device: torch.device,
    batches: list[int],
    contexts: list[int],
    new_tokens: int,
    budget_s: float,
    options: dict[str, str],
) -> Iterator[dict]:
    """A row of figures by stock and by accel with these options, given again whenever it has grown.

    "llm" has milliseconds a step of each batch at the first context and of one row at the others, then of a prompt.

    Raises WrongResult before any figure where accel computes something else or is not undone exactly, and what `build`
    raises.
    """
    model = build(name, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    models = {"stock": beside(model), "accel": model}
    found: dict[str, dict] = {}
    row = _judge(model, device, options) | {"llm": found}
    first, *others = contexts
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**30
    for rows, context in [(rows, first) for rows in batches] + [(1, context) for context in others]:
        key = f"batch {rows}, context {context}"
        if context + 2 * new_tokens > most:  # beyond them a GPU would only crash
            found[key] = {"failed": f"more than the {most} positions of this model"}
            continue
        try:
            found[key] = decode_steps(models, rows, context, new_tokens, budget_s)
        except ValueError as error:
            found[key] = {"failed": str(error)}
        peaks = {way: peak_mb(device, call := partial(_call, one, rows, context), call) for way, one in models.items()}
        yield row | {"peak_mb": row.setdefault("peak_mb", {}) | {key: peaks}}
        release(device)
    tokens = min(PROMPT, most // 2)
    found[f"prompt of {tokens}"] = prompts(models, tokens, budget_s)
    yield row | reported(model)


def _call(model: "PreTrainedModel", rows: int, context: int) -> None:
    _generate(model, prompt(model, rows, context), 8)


def _generate(model: "PreTrainedModel", inputs: dict, tokens: int) -> torch.Tensor:
    """So many new tokens, greedily. Raises ValueError where it stopped before."""
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    if (short := inputs["input_ids"].shape[1] + tokens - out.shape[1]) > 0:
        raise ValueError(f"generate stopped after {tokens - short} of {tokens} tokens")
    return out


def decode_steps(
    models: Models, rows: int, context: int, new_tokens: int, budget_s: float
) -> dict[str, dict[str, float]]:
    """Of each model, in turns for about so many seconds. Raises ValueError where longer calls took no longer."""
    few = max(3, new_tokens // 8)

    def sample(model: "PreTrainedModel") -> tuple[float, float]:
        inputs = prompt(model, rows, context)
        short, long = (
            seconds(partial(_generate, model, inputs, tokens), model.device) for tokens in (few, few + new_tokens)
        )
        return (long - short) / new_tokens, long

    def figures(step: float, call: float) -> dict[str, float]:
        if step <= 0:
            raise ValueError("calls that wrote more tokens took no longer: the machine is busy, or new tokens too few")
        return {"ms_step": round(step * 1e3, 4), "tok_s": round(rows / step, 1), "call_ms": round(call * 1e3, 2)}

    return {name: figures(*medians) for name, medians in _in_turns(models, sample, budget_s).items()}


def prompts(models: Models, tokens: int, budget_s: float) -> dict[str, dict[str, float]]:
    """Milliseconds of a generate() of one token behind a prompt of so many."""

    def sample(model: "PreTrainedModel") -> tuple[float]:
        return (seconds(partial(_generate, model, prompt(model, 1, tokens), 1), model.device),)

    return {name: {"call_ms": round(took * 1e3, 3)} for name, (took,) in _in_turns(models, sample, budget_s).items()}


def _in_turns(
    models: Models, sample: Callable[["PreTrainedModel"], tuple[float, ...]], budget_s: float
) -> dict[str, list[float]]:
    """Medians of what a sample tells of each model, which two samples have warmed up."""
    runs = {name: partial(sample, model) for name, model in models.items()}
    take_turns(runs, least=2, most=2)
    found = take_turns(runs, clock=Clock(budget_s))
    return {name: [statistics.median(one) for one in zip(*samples, strict=True)] for name, samples in found.items()}


def _judge(model: "PreTrainedModel", device: torch.device, options: dict[str, Any]) -> dict:
    """Optimizes the model; raises WrongResult where it computes something else, or is not undone exactly."""
    inputs: dict[str, Any] = example_inputs(model)
    before, again = model(**inputs).logits, model(**inputs).logits
    optimize_s = seconds(lambda: accel.optimize(model, **options), device)
    quality = accel.verify(model, **inputs)
    if not quality.passed:
        raise WrongResult(f"{quality.verdict} ({quality.agreement}); nothing was timed")
    after = accel.restore(model)(**inputs).logits
    equal = torch.equal(before, after) if torch.equal(before, again) else None
    if equal is False:
        raise WrongResult("after accel.restore the logits are not stock's any more")
    accel.optimize(model, **options)
    return {"quality": quality.to_dict(), "restored_bit_equal": equal, "optimize_s": round(optimize_s, 3)} | options
