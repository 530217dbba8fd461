"""Fields of a request over HTTP, looked at before transformers' handlers use them: a client's mistake is status 400.

Stock converts fields where it needs them, and what that raises is told as status 500, without a reason.
"""

from collections.abc import Callable
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any

from fastapi import HTTPException
from jinja2 import TemplateError
from transformers import GenerationConfig

from accel.errors import logged
from accel.libraries.server import checking, logger
from accel.llm.batching.sampling import OF_SAMPLING, SETTINGS, Setting

ADAPTER: ContextVar[str | None] = ContextVar("adapter", default=None)  # that this task's request names
TOKENS = Setting(Integral, "a whole number above 0", 1, 2**31 - 1)
ONE = Setting(Integral, "1, as one answer is given", 1, 1)
NUMBERS = {
    "max_tokens": TOKENS,
    "max_completion_tokens": TOKENS,
    "max_output_tokens": TOKENS,
    "temperature": Setting(Real, "a number of 0 or above, 0 for greedy decoding", 0.0),
    "top_p": SETTINGS["top_p"],
    "seed": SETTINGS["seed"],
    "frequency_penalty": Setting(Real, "a number above -1", -1.0, above=True),
    "presence_penalty": Setting(Real, "a number"),
    "n": ONE,
    "best_of": ONE,
    "stream": SETTINGS["do_sample"],
}
BIAS = Setting(Real, "a number for each token id")
TEXTS = ("adapter", "model", "prompt", "suffix", "generation_config", "instructions")
TEXT_PARTS = ("text", "input_text", "output_text")


def refusing(handler: type) -> type:
    """A handler of transformers' server that refuses what makes no sense with status 400 and a sentence."""

    class Refusing(checking(handler, check_config)):  # type: ignore[misc]
        async def handle_request(self, body: dict, request_id: str) -> Any:
            try:
                check_fields(body)
                ADAPTER.set(body.pop("adapter", None))  # which stock would refuse
                return await super().handle_request(body, request_id)
            except (ValueError, TypeError, TemplateError) as error:
                logger.warning(f"request {request_id} is refused: {logged(error)}", exc_info=True)
                raise HTTPException(400, logged(error)) from error
            except KeyError as error:
                logger.warning(f"request {request_id} is refused: it lacks {error}", exc_info=True)
                raise HTTPException(400, f"the request, or a part of it, lacks {error}") from error

    Refusing.__name__ = Refusing.__qualname__ = handler.__name__
    return Refusing


def check_fields(body: dict[str, Any]) -> None:
    """Raises TypeError or ValueError, which name the value and what is valid. Other fields are stock's to refuse."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in given.keys() & NUMBERS:
        NUMBERS[name].checked(name, given[name])
    for name in given.keys() & set(TEXTS):
        _require(isinstance(given[name], str), name, given[name], "a string")
    for name, test, valid in FORMS:
        if name in given:
            _require(test(given[name]), name, given[name], valid)
    for token, bias in given.get("logit_bias", {}).items():
        _require(token.isdecimal(), "logit_bias", given["logit_bias"], "an object of numbers by token ids")
        given["logit_bias"][token] = float(BIAS.checked(f"logit_bias of {token}", bias))  # stock takes no whole numbers


def check_config(config: GenerationConfig, batched: bool) -> None:
    """Raises TypeError or ValueError for values that no request can have, and an adapter where it cannot."""
    if (adapter := ADAPTER.get()) is not None and not batched:
        raise ValueError(f"adapter={adapter!r}: only a server with --continuous-batching gives requests their own")
    if config.max_new_tokens is not None:
        TOKENS.checked("max_new_tokens", config.max_new_tokens)
    for name in ("repetition_penalty", *(OF_SAMPLING if config.do_sample else ())):
        if (value := getattr(config, name, None)) is not None:
            SETTINGS[name].checked(name, value)


def _require(valid: bool, name: str, value: object, what: str) -> None:
    if not valid:
        shown = repr(value)
        raise ValueError(f"{name}={shown if len(shown) < 200 else shown[:200] + '...'}; valid is {what}")


def _stops(value: object) -> bool:
    return all(isinstance(one, str) and one for one in (value if isinstance(value, list) else [value]))


def _objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _messages(value: object) -> bool:
    return bool(value) and _objects(value) and all(map(_message, value))  # type: ignore[call-overload]


def _items(value: object) -> bool:
    return bool(value) and _objects(value) and all("role" not in one or _message(one) for one in value)  # type: ignore[attr-defined]


def _message(one: dict) -> bool:
    content, calls = one.get("content"), one.get("tool_calls")
    parts = content if isinstance(content, list) else []
    return (
        isinstance(one.get("role"), str)
        and (content is None or isinstance(content, str | list))
        and all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in parts)
        and all(isinstance(part.get("text"), str) for part in parts if part["type"] in TEXT_PARTS)
        and (calls is None or _objects(calls))
    )


FORMS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("stop", _stops, "a string that is not empty, or a list of such"),
    ("messages", _messages, "a list of objects, each with a role, and as content a string or a list of typed parts"),
    ("input", lambda value: isinstance(value, str) or _items(value), "a string, or a list of messages and typed parts"),
    ("tools", _objects, "a list of objects"),
    ("chat_template_kwargs", lambda value: isinstance(value, dict), "an object"),
    ("logit_bias", lambda value: isinstance(value, dict), "an object of numbers by token ids"),
)
