"""How a request's tokens are chosen: from a generation configuration and a request's own settings."""

import copy
import itertools
import math
import threading
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import (
    GenerationConfig,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from accel.errors import LOG
from accel.libraries.generation import processors

UINT64 = 2**64 - 1
CHILD_SALT = 0x5851F42D4C957F2D  # keeps the seeds of children apart from those of requests
INT32 = 2**31 - 1


class Sampling(NamedTuple):
    """How tokens are chosen for one request, in this order.

    host: processors that have no form on the GPU, and all that stand before them; called with the request's own ids
    (1, L) and scores (1, V) in fp32. None without any. Then, on the GPU: penalty, the repetition penalty, 1 is off;
    temperature, 0 is greedy, and nothing after it counts; top_k, 0 is off; top_p, 1 is off; min_p, 0 is off. seed: 64
    bits, signed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: float = 1.0
    seed: int = 0
    host: LogitsProcessorList | None = None

    @property
    def greedy(self) -> bool:
        """Whether the largest score is taken."""
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p leave something out."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def nucleus(self) -> bool:
        """Whether top-p or min-p do so without top-k, for which `sample` has kernels of its own."""
        return self.filtered and self.top_k == 0

    def fork(self, number: int) -> "Sampling":
        """For another answer to the same prompt: a seed and processors of its own. Before the first token."""
        return self._replace(seed=mix_seed(self.seed ^ CHILD_SALT, number), host=copy.deepcopy(self.host))


def mix_seed(seed: int, number: int) -> int:
    """Signed 64 bits in which every bit of both counts: SplitMix64 by Steele, Lea and Flood 2014."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & UINT64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & UINT64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & UINT64
    return to_int64(z ^ z >> 31)


def to_int64(bits: int) -> int:
    """The int64 of the same 64 bits."""
    return (bits + 2**63 & UINT64) - 2**63


class Setting(NamedTuple):
    """What a request may ask for: the type that is valid, in words, and the least and the largest value."""

    kind: type
    valid: str
    least: float = -math.inf
    most: float = math.inf
    above: bool = False  # whether the least is not valid itself

    def checked(self, name: str, value: object) -> Any:
        """The value as it is meant. Raises TypeError or ValueError, which name the value and what is valid."""
        if isinstance(value, bool) is not (self.kind is bool) or not isinstance(value, self.kind):
            raise TypeError(f"{name}={value!r} is of type {type(value).__name__}; valid is {self.valid}")
        if self.kind is bool:
            return value
        number: float = int(value) if self.kind is Integral else float(value)  # type: ignore[call-overload, arg-type]
        inside = self.least < number if self.above else self.least <= number
        if not (inside and number <= self.most and abs(number) < math.inf):
            raise ValueError(f"{name}={value!r} is out of range; valid is {self.valid}")
        return number


SETTINGS = {
    "do_sample": Setting(bool, "True or False"),
    "temperature": Setting(Real, "a number above 0 (for greedy decoding do_sample=False)", 0.0, above=True),
    "top_k": Setting(Integral, "a whole number, 0 for all tokens", 0),
    "top_p": Setting(Real, "a number from 0 to 1", 0.0, 1.0),
    "min_p": Setting(Real, "a number from 0 to 1", 0.0, 1.0),
    "repetition_penalty": Setting(Real, "a number above 0, 1 for none", 0.0, above=True),
    "seed": Setting(Integral, "a whole number from -2**63 to 2**64 - 1", -(2**63), 2**64 - 1),
}
OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
IGNORED = ("filter_value", "min_tokens_to_keep")  # as stock does, with a warning


class SamplingDefaults:
    """How the tokens of a manager's requests are chosen where they do not say.

    The processors are those of `model._get_logits_processor`, which `generate()` asks too, here for each request with
    its own prompt and settings. So those that look at the prompt's length are right too, and none is dropped.

    Seeds: a request's own; or from `continuous_batching_config.seed` and the number of sampling requests before; or,
    where that is None, from one number of torch's default generator, which `torch.manual_seed` decides. It is drawn
    when the first request samples.

    device: where processors on the host get their scores; None for that of the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        continuous_batching_config: Any = None,
        device: torch.device | None = None,
    ) -> None:
        self.model, self.generation_config = model, generation_config
        self.device = device
        self._seed: int | None = getattr(continuous_batching_config, "seed", None)
        if self._seed is not None:
            self._seed = SETTINGS["seed"].checked("seed", self._seed)
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._ends: tuple[list[int], torch.Tensor | None] = ([], None)  # of the last request, and on the device
        self._usual: Sampling | None = None  # of a request without settings, where no processor is on the host

    def request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        generation_config: GenerationConfig | None = None,
        **given: Any,
    ) -> Sampling:
        """How the tokens of one request are chosen. May be called from several threads.

        prompt: token ids. max_new_tokens, eos_token_id: the request's own, for processors that look at them; None means
        those of the configuration, negative ids stand for none. generation_config: of this request in place of the
        manager's. given: temperature, top_k, top_p, min_p, repetition_penalty, do_sample, seed; they go before the
        configuration's.

        Raises ValueError or TypeError for values that are not valid, and names that are not known. So it does for
        settings of sampling where nothing is sampled, beams, and guidance, which needs a second run of the model.
        """
        base = self.generation_config if generation_config is None else generation_config
        settings = checked_settings(given, bool(base.do_sample))
        seed = settings.pop("seed", None)
        usual = not settings and base is self.generation_config
        found = self._usual if usual else None
        if found is None:
            config = copy.copy(base)
            for name, value in settings.items():
                setattr(config, name, value)
            found = self._chosen(config, prompt, max_new_tokens, eos_token_id)
            if usual and found.host is None:
                self._usual = found
        if found.greedy:
            return found
        return found._replace(seed=self._next_seed() if seed is None else to_int64(seed))

    def _chosen(
        self, config: Any, prompt: Sequence[int], most: int | None, eos: int | Iterable[int] | None
    ) -> Sampling:
        """config: a copy, which becomes what generate() would make of it for this prompt. most: new tokens."""
        device = self.device or self.model.device
        if config.num_beams is not None and config.num_beams > 1:
            raise ValueError(f"num_beams={config.num_beams}: continuous batching has no beams; use generate()")
        if most is not None:
            config.max_length = len(prompt) + most
        if config.min_new_tokens is not None:  # which goes before
            config.min_length = len(prompt) + config.min_new_tokens
        eos = config.eos_token_id if eos is None else eos
        ends = [one for one in ([] if eos is None else [eos] if isinstance(eos, int) else eos) if one >= 0]
        known = self._ends
        if ends != known[0]:  # a copy waits for the GPU, and most requests have the same
            self._ends = known = ends, torch.tensor(ends, device=device) if ends else None
        encoder = config.encoder_repetition_penalty not in (None, 1.0) or config.encoder_no_repeat_ngram_size
        chain = processors(
            self.model,
            config,
            known[1],
            input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.tensor([list(prompt)], device=device) if encoder else None,
            device=str(device),
        )
        return split_chain(chain, bool(config.do_sample))

    def _next_seed(self) -> int:
        with self._lock:
            if self._seed is None:
                self._seed = int(torch.randint(2**63 - 1, (), device="cpu"))
            return mix_seed(self._seed, next(self._numbers))


def checked_settings(given: dict[str, Any], sample: bool) -> dict[str, Any]:
    """Settings of a request, as they are meant. sample: whether it samples unless it says so. Raises as `request`."""
    unknown = sorted(given.keys() - SETTINGS.keys() - set(IGNORED))
    if unknown:
        raise ValueError(f"unknown settings of a request: {', '.join(unknown)}; known are {', '.join(SETTINGS)}")
    for name in given.keys() & set(IGNORED):
        LOG.warning("%s=%r of a request is ignored", name, given[name])
    settings = {name: SETTINGS[name].checked(name, value) for name, value in given.items() if name in SETTINGS}
    for name in OF_SAMPLING:
        if name in settings and not settings.get("do_sample", sample):
            raise ValueError(
                f"{name}={given[name]!r} changes nothing without sampling; leave it out, or do_sample=True"
            )
    return settings


def split_chain(chain: Iterable[LogitsProcessor], sample: bool) -> Sampling:
    """Processors in transformers' order, cut in two: the GPU does what stands after the last one that it cannot do.

    Raises ValueError for guidance.
    """
    host = list(chain)
    if any(isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor) for one in host):
        raise ValueError("guidance_scale needs a second run of the model for each token; use generate()")
    if host and type(host[-1]) is LogitNormalization:
        host.pop()  # changes neither what is drawn nor log probabilities
    found: dict[str, Any] = {"temperature": 1.0 if sample else 0.0}
    order, last = list(ON_GPU.values()), len(ON_GPU)
    while host:
        name = ON_GPU.get(type(host[-1]))
        if name is None or order.index(name) >= last or not (sample or name == "penalty") or not _is_plain(host[-1]):
            break
        last, found[name] = order.index(name), min(getattr(host.pop(), name), INT32)
    return Sampling(**found, host=LogitsProcessorList(host) if host else None)


# By exact type the field of Sampling that does the same, named as the processor's attribute; in transformers' order,
# which is that of the GPU.
ON_GPU: MappingProxyType[type, str] = MappingProxyType(
    {
        RepetitionPenaltyLogitsProcessor: "penalty",
        TemperatureLogitsWarper: "temperature",
        TopKLogitsWarper: "top_k",
        TopPLogitsWarper: "top_p",
        MinPLogitsWarper: "min_p",
    }
)


def _is_plain(one: Any) -> bool:
    """Whether a processor has no settings that the GPU does not know."""
    return (
        not getattr(one, "prompt_ignore_length", None)
        and getattr(one, "filter_value", -math.inf) == -math.inf
        and getattr(one, "min_tokens_to_keep", 1) == 1
    )
