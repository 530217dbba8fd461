"""What a caller hands in: strings that end an answer, looked for where they end."""

import pytest

from accel.llm.batching.submission import StopStrings
from support.llm.batching.engines import alone, engine_of, finished, request
from support.llm.calls import tokenizer


class Letters:
    """One token a letter; two tokens make an umlaut."""

    def decode(self, ids):
        return "".join(map(chr, ids)).replace("~a", "ä")


def ids(text):
    return list(map(ord, text))


@pytest.mark.parametrize(
    ("strings", "answer", "ends"),
    [
        ("stop", "do not stop", True),
        ("stop", "do not sto", False),
        (("x", "no st"), "do no st", True),
        ("ä", "b~a", True),
        ("ä", "b~", False),
        ("prompt", "", False),  # what stands before the answer is none of it
    ],
)
def test_strings_end_an_answer(strings, answer, ends):
    prompt = "prompt"
    assert StopStrings(strings, Letters(), len(prompt))(ids(prompt + answer)) is ends


@pytest.mark.parametrize(
    ("strings", "given", "message"),
    [
        ("", Letters(), "stop_strings=''"),
        ([3], Letters(), r"stop_strings=\[3\]"),
        ("a", None, "need the model's tokenizer"),
    ],
)
def test_what_is_no_string_or_no_tokenizer(strings, given, message):
    with pytest.raises(ValueError, match=message):
        StopStrings(strings, given, 0)


def test_as_generate_has_it(pair_of):
    model, stock = pair_of("llama")
    words = tokenizer()
    free = alone(stock, [5, 6, 7], 20)
    strings = [words.decode(free[8:10])]
    wanted = alone(stock, [5, 6, 7], 20, stop_strings=strings, tokenizer=words)
    one = request("a", [5, 6, 7], 20, ends=StopStrings(strings, words, 3))
    finished(engine_of(model), [one])
    assert one.tokens == wanted and len(wanted) < 20
