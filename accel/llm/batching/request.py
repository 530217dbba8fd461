"""One request: what is asked for, how far it has come, and what came out."""

import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from accel.libraries.attention import MASK
from accel.libraries.batching import GenerationOutput, RequestStatus

# The adapter of each prompt of the `generate_batch` that runs, which stock would not hand on.
BY_PROMPT: ContextVar[Sequence[str | None] | None] = ContextVar("accel_adapters_by_prompt", default=None)
IDS = "input_ids"
CUT = "cut after"  # how the error of an answer begins that ended at a limit of the engine, short of what was asked for


@dataclass(eq=False)
class Request:
    """A prompt and what is to be done with it. The engine alone writes its state.

    prompt: token ids. max_new_tokens: None for no bound but the room there is. eos: ids that end it, which are part of
    what it gives. sampling: how tokens are chosen, see `accel.llm.batching.sampling`. stopping_criterion: asked with
    all tokens of prompt and answer after each new one, whether that was the last. children: further answers to the same
    prompt, until the engine has begun them. settings: from which `sampling` was made. adapter: of peft, by its name,
    None for those that are active; number: by which the engine knows it. given: what a call of the model is given
    beside the prompt, as pictures; positions: of the prompt then, shift: how far tokens behind it are from their place.

    tokens, logprobs, timestamps: of the answer so far; the last in seconds of `time.perf_counter`. started, ended:
    seconds as well, -1 before.
    """

    id: str
    prompt: list[int]
    max_new_tokens: int | None
    eos: frozenset[int]
    sampling: Any
    stopping_criterion: Callable[[Sequence[int]], bool] | None = None
    streaming: bool = False
    record_timestamps: bool = False
    children: list["Request"] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    number: int = 0
    given: dict[str, Any] = field(default_factory=dict)
    positions: torch.Tensor | None = None
    shift: int = 0
    status: RequestStatus = RequestStatus.PENDING
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)
    error: str | None = None
    created: float = field(default_factory=time.perf_counter)
    started: float = -1
    ended: float = -1

    @property
    def finished(self) -> bool:
        """Whether nothing more will come of it: it ended, or failed."""
        return self.status >= RequestStatus.FINISHED

    @property
    def family(self) -> list["Request"]:
        """The request and its children."""
        return [self, *self.children]

    def with_children(self, count: int) -> "Request":
        """The same request, which now has so many children, named as transformers names them."""
        self.children = [
            replace(
                self, id=f"{self.id}__child#{number}", sampling=self.sampling and self.sampling.fork(number),
                children=[], tokens=[], logprobs=[], timestamps=[],
            )
            for number in range(count)
        ]  # fmt: skip
        return self

    def output(self) -> GenerationOutput:
        """What a caller of `generate_batch` gets of it; a copy, so that what follows does not change it."""
        return GenerationOutput(
            request_id=self.id,
            prompt_ids=self.prompt,
            generated_tokens=self.tokens[:],
            logprobs=self.logprobs[:],
            error=self.error,
            status=self.status,
            created_time=self.created,
            lifespan=(self.started, self.ended),
            timestamps=self.timestamps[:] if self.record_timestamps else None,
        )


def was_cut(output: GenerationOutput) -> bool:
    """Whether the answer ended at a limit of the engine, with fewer tokens than were asked for."""
    return output.error is not None and output.error.startswith(CUT)


def finish(request: Request, error: str | None = None) -> Request:
    """The request ends now, for this reason if it failed."""
    request.error = error
    request.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
    request.ended = time.perf_counter()
    if request.started < 0:
        request.started = request.ended
    return request


def failed(requests: Iterable[Request], reason: str) -> list[Request]:
    """All of these requests, ended for this reason."""
    return [finish(one, reason) for one in requests]


class PicturePrompt(list[int]):
    """Token ids, and what a call of the model is `given` beside them."""

    given: Mapping[str, Any]


def prompt_of(one: Any) -> Any:
    """A prompt without padding, of the arguments of generate() for one text; anything else as it is. Raises ValueError
    where there are several.
    """
    if not isinstance(one, Mapping):
        return one
    given = {name: value for name, value in one.items() if value is not None}
    ids, shown = torch.as_tensor(given.pop(IDS)), given.pop(MASK, None)
    if ids.dim() != 1 and ids.shape[:-1] != (1,):
        raise ValueError(f"{IDS} of the shape {tuple(ids.shape)}: give each prompt by itself")
    if shown is not None:
        shown = torch.as_tensor(shown).flatten().bool()
        row = (1, ids.shape[-1])
        by_token = {name for name, value in given.items() if getattr(value, "shape", None) == row}
        given |= {name: given[name][:, shown.to(given[name].device)] for name in by_token}
        ids = ids.flatten()[shown.to(ids.device)]
    made = PicturePrompt(ids.flatten().tolist())
    made.given = given
    return made


class StopStrings:
    """Whether the last token of an answer completes one of these strings.

    tokenizer: decodes the answer, as a list of ids. prompt: how many tokens stand before the answer. Raises ValueError
    without strings or a tokenizer, naming what was given.
    """

    def __init__(self, strings: str | Iterable[str], tokenizer: Any, prompt: int):
        self.strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if not all(isinstance(one, str) and one for one in self.strings):
            raise ValueError(f"stop_strings={strings!r}: give strings that are not empty")
        if not hasattr(tokenizer, "decode"):
            raise ValueError(f"tokenizer={tokenizer!r}: stop_strings={strings!r} need the model's tokenizer")
        self.tokenizer, self.prompt = tokenizer, prompt
        self.longest = max(map(len, self.strings))

    def __call__(self, tokens: Sequence[int]) -> bool:
        """tokens: of prompt and answer."""
        answer = tokens[self.prompt :]
        # A string ends in the last token, so it begins within as many tokens as it has bytes.
        text = self.tokenizer.decode(answer[-(4 * self.longest + 1) :])
        return any(one in text for one in self.strings)


def checked_ids(input_ids: Iterable[int], vocabulary: int) -> list[int]:
    """Token ids as a list. Raises TypeError or ValueError where they are none, or not of this vocabulary."""
    try:
        ids = array("q", input_ids.tolist() if hasattr(input_ids, "tolist") else input_ids)
    except (TypeError, OverflowError) as error:
        raise TypeError(f"the prompt is not a list of token ids: {error}") from error
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    wrong = next((one for one in (min(ids), max(ids)) if not 0 <= one < vocabulary), None)
    if wrong is not None:
        raise ValueError(f"token {wrong} is not one of the model's {vocabulary}")
    return ids.tolist()


def token_set(tokens: Any) -> frozenset[int]:
    """tokens: an id, several, a tensor of ids, or None. Negative ones stand for none."""
    found = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    ids = [] if found is None else [found] if isinstance(found, int) else found
    return frozenset(one for one in ids if one >= 0)
