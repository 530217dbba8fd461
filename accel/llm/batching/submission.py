"""What a caller hands in to be generated, looked at before it becomes a request."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from accel.llm.batching.request import Request

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
