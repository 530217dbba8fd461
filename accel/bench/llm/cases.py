"""What is timed in turns: decode steps, prompts, other ways to generate, and decoding far into a long context.

The time of a step is the difference of two generate() calls that write a few and many tokens, by the tokens between:
nothing watches the calls, and what a call costs once is in neither.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel.bench.llm.models import prompt
from accel.bench.llm.traffic import Traffic
from accel.bench.llm.variants import Variant
from accel.bench.timing import Clock, seconds, take_turns
from accel.libraries.cache import cache_given, cache_of
from accel.llm.recording.inputs import example_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_ROUNDS = 7
PROMPTS = (512, 2048, 8192)
CHUNK = 4096  # tokens of a long prompt computed at once
# Tokens of prompts, beyond which decode steps go on from one that was computed before: as a part of the calls whose
# difference is taken, seconds long, it would differ by more than the steps take.
MOST_PROMPT = 32768
PERIOD = 24  # after so many tokens a prompt repeats itself, for prompt lookup to find something
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
MODES: dict[str, dict] = {
    "beam 4": {"num_beams": 4},
    "top-k, top-p": SAMPLING,
    "top-k, top-p, penalty": SAMPLING | {"repetition_penalty": 1.1},
    "4 sequences": SAMPLING | {"num_return_sequences": 4},
    "4 left-padded rows": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 8},
    "assisted": {},
}
Sample = Callable[[], dict[str, float]]  # runs the work once and gives seconds by name


@dataclass(frozen=True)
class TimedCase:
    """One line of the results.

    about: what it is, as it stands in the result. prepare(variant): brings it to where timing starts, and gives the
    sample. figures(median, variant): figures from the medians; raises ValueError where they give none.
    compiled: whether the compiler takes part, which is slow to get ready.
    """

    part: str
    about: dict
    prepare: Callable[[Variant], Sample]
    figures: Callable[[dict[str, float], Variant], dict]
    compiled: bool = False

    @property
    def name(self) -> str:
        return case_name(self.about)


def case_name(about: Mapping) -> str:
    """Of a case, for a reader."""
    return ", ".join(f"{key} {value}" if key != "mode" else str(value) for key, value in about.items())


@torch.no_grad()
def interleaved(
    case: TimedCase, variants: list[Variant], device: torch.device, budget_s: float, fail: Callable[..., None]
) -> dict[str, dict]:
    """Figures of each variant, those that failed left out and told by fail(error, variant=name).

    Each is run twice to warm up; first_s is the first of these. Then they take turns, forwards and backwards, for about
    budget_s seconds, every one at least twice; without seconds, twice.
    """
    named = {variant.name: variant for variant in variants}

    def told(name: str, error: Exception) -> None:
        fail(error, variant=name)

    def warm_up(variant: Variant) -> tuple[Sample, float]:
        sample = case.prepare(variant)
        first = seconds(sample, device)
        sample()
        return sample, first

    made = {name: partial(warm_up, variant) for name, variant in named.items()}
    warm = {name: one for name, [one] in take_turns(made, least=1, most=1, fail=told).items()}
    samples = {name: sample for name, (sample, _) in warm.items()}
    found = take_turns(samples, most=MOST_ROUNDS, clock=Clock(budget_s), fail=told)

    def figures(name: str) -> dict:
        rows = found[name]
        median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        return case.figures(median, named[name]) | {"first_s": round(warm[name][1], 3), "rounds": len(rows)}

    rows = take_turns({name: partial(figures, name) for name in found}, least=1, most=1, fail=told)
    return {name: row for name, [row] in rows.items()}


@dataclass(frozen=True)
class Work:
    """What all cases know: the model measured (stock), how fast the card copies (bytes a second), sizes asked for."""

    stock: "PreTrainedModel"
    traffic: Traffic
    bandwidth: float
    device: torch.device
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    new_tokens: int
    long: int = 0
    long_batches: tuple[int, ...] = (1,)

    @property
    def few(self) -> int:
        return max(3, self.new_tokens // 8)

    @property
    def many(self) -> int:
        return self.few + self.new_tokens

    @property
    def most(self) -> int:
        """Tokens that the model has positions for."""
        return getattr(self.stock.config.get_text_config(), "max_position_embeddings", None) or 2**30

    def steps(self, variant: Variant, inputs: dict, **options: Any) -> dict[str, float]:
        """Seconds of a call that writes many tokens, and of one decode step."""
        few, many = (
            seconds(partial(variant.generate, inputs, tokens, **options), self.device)
            for tokens in (self.few, self.many)
        )
        return {"call": many, "step": (many - few) / self.new_tokens}

    def rate(self, rows: int, context: int, median: dict[str, float], variant: Variant) -> dict:
        """Milliseconds a step, tokens a second, and which share of the least possible time that is."""
        tokens = context + (self.few + self.many) // 2
        less = variant.saved + variant.saved_experts * self.traffic.hit(rows)
        less += (1 - variant.kept) * self.traffic.cache(rows, tokens)
        moved = self.traffic.step_bytes(rows, tokens) - less
        found = speed(rows, median, variant)
        return found | {"share_of_bandwidth": round(moved / self.bandwidth / found["ms_step"] * 1e3, 4)}


def speed(rows: int, median: dict[str, float], variant: Variant) -> dict:
    """Milliseconds a step, and tokens a second. Raises ValueError where longer calls took no longer than short ones."""
    step = median["step"]
    if step <= 0:
        raise ValueError("calls that wrote more tokens took no longer: the machine is busy, or new_tokens too few")
    return {"ms_step": round(step * 1e3, 4), "tok_s": round(rows / step, 1), "call_ms": round(median["call"] * 1e3, 2)}


def decode(work: Work) -> Iterator[TimedCase]:
    """Every batch at the first context, and one row at the others."""
    first, *others = work.contexts
    for rows, context in [(rows, first) for rows in work.batches] + [(1, context) for context in others]:
        known = rows * context > MOST_PROMPT
        about: dict[str, object] = {"batch": rows, "context": context, "new tokens": work.new_tokens}
        about |= {"prompt": "computed before"} if known else {}
        compiled = context == first and rows in work.batches[:2] and not known
        prepare = partial(_decode_steps, work, rows, context, known)
        yield TimedCase("decode", about, prepare, partial(work.rate, rows, context), compiled)


def _decode_steps(work: Work, rows: int, context: int, known: bool, variant: Variant) -> Sample:
    _room(work, context, work.many + known)
    if known:  # anew for each sample: caches of all variants side by side would fill the memory
        return lambda: _from_past(work, rows, context, variant)()
    inputs = prompt(work.stock, rows, context)
    return lambda: work.steps(variant, inputs)


def prefill(work: Work) -> Iterator[TimedCase]:
    """A prompt of one row: the forward that generate() begins with, and a generate() of one token."""
    for tokens in (tokens for tokens in PROMPTS if tokens < work.most):
        yield TimedCase("prefill", {"tokens": tokens}, partial(_prompt, work, tokens), partial(_rate, work, tokens))


def _prompt(work: Work, tokens: int, variant: Variant) -> Sample:
    inputs = prompt(work.stock, 1, tokens)

    def sample() -> dict[str, float]:
        return {
            "forward": seconds(lambda: variant.model(**inputs, use_cache=True, logits_to_keep=1), work.device),
            "call": seconds(lambda: variant.generate(inputs, 1), work.device),
        }

    return sample


def _rate(work: Work, tokens: int, median: dict[str, float], variant: Variant) -> dict:
    config = work.stock.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    flops = work.traffic.flops(tokens, width, work.stock.dtype.itemsize)
    return {
        "ms": round(median["forward"] * 1e3, 3),
        "tflop_s": round(flops / median["forward"] / 1e12, 2),
        "call_ms": round(median["call"] * 1e3, 3),
    }


def modes(work: Work) -> Iterator[TimedCase]:
    """Other ways to generate, from a prompt of the first context."""
    for mode in MODES:
        about = {"mode": mode, "context": work.contexts[0]}
        yield TimedCase("modes", about, partial(_mode, work, mode), partial(speed, 4 if mode.startswith("4 ") else 1))


def _mode(work: Work, mode: str, variant: Variant) -> Sample:
    context, options = work.contexts[0], MODES[mode]
    _room(work, context, work.many)
    inputs = prompt(work.stock, 1, context)
    if mode == "4 left-padded rows":
        inputs = example_inputs(work.stock, 4, context)
    if mode == "prompt lookup":
        inputs["input_ids"] = inputs["input_ids"][:, torch.arange(context) % PERIOD]
    if mode == "assisted":
        if variant.assistant is None:
            raise ValueError(f"{variant.name} has no model to assist it")
        options = options | {"assistant_model": variant.assistant()}

    def sample() -> dict[str, float]:
        torch.manual_seed(0)
        return work.steps(variant, inputs, **options)

    return sample


def long(work: Work) -> Iterator[TimedCase]:
    """Rows that go on from a long past, which was computed in chunks; the past is cut back after each call."""
    past = min(work.long, work.most - work.many - 1)
    for rows in work.long_batches if past > 0 else ():
        about = {"batch": rows, "context": past, "new tokens": work.new_tokens}
        yield TimedCase("long", about, partial(_from_past, work, rows, past), partial(work.rate, rows, past))


def _from_past(work: Work, rows: int, past: int, variant: Variant) -> Sample:
    """Steps of rows that go on from so many tokens, which are computed now, in chunks."""
    ids = prompt(work.stock, rows, past + 1)["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    # By generate(), which says how many tokens there will be: room for them is made once, and no more.
    started = variant.model.generate(
        **{name: tensor[:, :past] for name, tensor in inputs.items()},
        **({"do_sample": False} | variant.options),
        max_new_tokens=work.many,
        prefill_chunk_size=max(1, CHUNK // rows),
        return_dict_in_generate=True,
    )
    cache = cache_of(started)
    given = cache_given(type(work.stock).prepare_inputs_for_generation, cache)
    cache.crop(past - cache.get_seq_length())

    def timed(tokens: int) -> float:
        taken = seconds(lambda: variant.generate(inputs, tokens, **given), work.device)
        cache.crop(past - cache.get_seq_length())
        return taken

    def sample() -> dict[str, float]:
        few, many = timed(work.few), timed(work.many)
        return {"call": many, "step": (many - few) / work.new_tokens}

    return sample


def _room(work: Work, context: int, new: int) -> None:
    """Raises ValueError where the model has no positions for these tokens; beyond them a GPU would only crash."""
    if context + new > work.most:
        raise ValueError(f"{context} and {new} tokens are more than the {work.most} positions of this model")
