"""One request: what is asked for, how far it has come, and what came out."""

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from transformers import GenerationConfig

from accel.libraries.batching import GenerationOutput, RequestStatus

CUT = "cut after"  # how the error of an answer begins that ended at a limit of the engine, short of what was asked for


@dataclass(eq=False)
class Request:
    """A prompt and what is to be done with it. The engine alone writes its state.

    prompt: token ids. max_new_tokens: None for no bound but the room there is. eos: ids that end it, which are part of
    what it gives. sampling: how tokens are chosen, see `accel.llm.batching.sampling`. ends: asked with all tokens of
    prompt and answer after each new one, whether that was the last. children: how many more answers are drawn for the
    same prompt, each a request of its own under `child_id`. settings: by which `sampling` was found.

    tokens, logprobs, timestamps: of the answer so far; the last in seconds of `time.perf_counter`. started, ended:
    seconds as well, -1 before.
    """

    id: str
    prompt: list[int]
    max_new_tokens: int | None
    eos: frozenset[int]
    sampling: Any
    ends: Callable[[Sequence[int]], bool] | None = None
    streaming: bool = False
    record_timestamps: bool = False
    children: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
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

    def child_id(self, number: int) -> str:
        """The id of one of its children, as transformers names them."""
        return f"{self.id}__child#{number}"

    def further(self) -> list["Request"]:
        """Its children."""
        new: dict[str, Any] = {"children": 0, "status": RequestStatus.PENDING, "created": time.perf_counter()}
        return [
            replace(
                self, id=self.child_id(number), sampling=self.sampling.fork(number), tokens=[], logprobs=[],
                timestamps=[], **new,
            )
            for number in range(self.children)
        ]  # fmt: skip

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


Tokens = int | Iterable[int] | None


class Submission(NamedTuple):
    """The arguments of `BatchManager.add_request` beside the prompt."""

    request_id: str | None
    max_new_tokens: int | None
    streaming: bool
    record_timestamps: bool
    eos_token_id: Tokens
    stop_strings: str | Iterable[str] | None
    tokenizer: Any
    settings: dict[str, Any]
    generated: Sequence[int] = ()

    def request(
        self, name: str, prompt: list[int] | Exception, vocabulary: int, config: GenerationConfig, answers: int
    ) -> tuple[Request, Exception | None]:
        """The request that is meant, but for its sampling, and what is wrong with it. config: the defaults.

        prompt: or why it is none. answers: how many are drawn.
        """
        begun = begun_ids(self.generated, vocabulary, answers)
        request = Request(
            id=name,
            prompt=prompt if isinstance(prompt, list) else [],
            max_new_tokens=config.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens,
            eos=token_set(config.eos_token_id if self.eos_token_id is None else self.eos_token_id),
            sampling=None,
            streaming=self.streaming,
            record_timestamps=self.record_timestamps,
            children=answers - 1,
            tokens=begun if isinstance(begun, list) else [],
            settings=self.settings,
        )
        return request, next((one for one in (prompt, begun) if isinstance(one, Exception)), None)


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


def prompt_ids(input_ids: Iterable[int], vocabulary: int) -> list[int] | Exception:
    """Numbers of tokens, or why they are none of this vocabulary."""
    try:
        ids = array("q", input_ids.tolist() if hasattr(input_ids, "tolist") else input_ids)
    except (TypeError, OverflowError) as error:
        return TypeError(f"the prompt is not a list of token ids: {error}")
    if not ids:
        return ValueError("the prompt is empty; give at least one token")
    wrong = next((one for one in (min(ids), max(ids)) if not 0 <= one < vocabulary), None)
    return ids.tolist() if wrong is None else ValueError(f"token {wrong} is not one of the model's {vocabulary}")


def begun_ids(generated: Sequence[int], vocabulary: int, answers: int) -> list[int] | Exception:
    """Tokens that an answer begins with, or why it cannot. answers: how many are drawn for the prompt."""
    if not len(generated):
        return []
    if answers > 1:
        return ValueError(f"generated={generated!r}: num_return_sequences={answers} answers cannot begin alike")
    return prompt_ids(generated, vocabulary)


def token_set(tokens: Tokens) -> frozenset[int]:
    """Negative ones stand for none."""
    if tokens is None:
        return frozenset()
    found = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return frozenset(one for one in ([found] if isinstance(found, int) else found) if one >= 0)


def stand_in(request: Request, number: int) -> Request:
    """What stands for one of its children, until the engine has made that."""
    return replace(request, id=request.child_id(number), children=0, tokens=[], logprobs=[], timestamps=[])


def finish(request: Request, error: str | None = None) -> Request:
    """It ends now, for this reason if it failed."""
    request.error = error
    request.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
    request.ended = time.perf_counter()
    if request.started < 0:
        request.started = request.ended
    return request


def family(request: Request) -> list[Request]:
    """A request, and what stands for its children until the engine has made them."""
    return [request, *(stand_in(request, number) for number in range(request.children))]


def failed(requests: Iterable[Request], reason: str) -> list[Request]:
    """All of them, ended for this reason."""
    return [finish(one, reason) for one in requests]
