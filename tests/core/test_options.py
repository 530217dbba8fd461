"""Options of optimize: keywords or an object, each with a message that says what is valid."""

import contextlib
import dataclasses
import inspect
import re
from typing import get_type_hints

import pytest

import accel


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"atention": "auto"}, TypeError, "unknown option 'atention'; valid options: attention, layout, graphs"),
        ({"attention": "fastest"}, ValueError, "attention='fastest' is not one of 'auto', 'cudnn'"),
        ({"layout": "nchw"}, ValueError, "layout='nchw'"),
        ({"graphs": 1}, ValueError, "graphs=1"),
        ({"graph_memory_gb": "4"}, TypeError, "graph_memory_gb='4'"),
        ({"graph_memory_gb": -1}, ValueError, "graph_memory_gb=-1"),
        ({"strict": "yes"}, ValueError, "strict='yes'"),
    ],
)
def test_wrong_options_say_what_is_valid_and_touch_nothing(pair, tiny, options, error, message):
    model, _, _ = pair
    accel.optimize(model)
    before = tiny.snapshot(model)
    with pytest.raises(error) as caught:
        accel.optimize(model, **options)
    assert message in str(caught.value)
    tiny.assert_same_state(before, tiny.snapshot(model))


@pytest.mark.parametrize("function", [accel.optimize, accel.optimized])
def test_the_keywords_are_the_fields_of_options(function):
    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    fields = dataclasses.fields(accel.Options)
    assert [(p.name, p.default) for p in named] == [(field.name, field.default) for field in fields]
    hints, types = get_type_hints(function), get_type_hints(accel.Options)
    assert {p.name: hints[p.name] for p in named} == {field.name: types[field.name] for field in fields}
    assert signature.parameters["options"].default is None


# Of every field a value that is valid by itself and not its default.
OTHER = {
    "attention": "sdpa", "layout": "keep", "graphs": False, "graph_memory_gb": 1.5, "step_cache": 3, "weights": "int8",
    "activations": "int8", "keep_original": False, "kv_cache": "int8", "cpu": "fuse", "parallel": "guidance",
    "strict": True,
}  # fmt: skip


@pytest.mark.share(1)
@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("function", [accel.optimize, accel.optimized])
def test_every_keyword_arrives(function, name, monkeypatch):
    """The options that are chosen, seen where they are handed on to."""
    seen = []

    class Seen(Exception):
        pass

    def parts(obj):
        raise Seen

    choose = accel.options.choose
    monkeypatch.setattr(accel.api, "choose", lambda *given: seen.append(choose(*given)) or seen[-1])
    monkeypatch.setattr(accel.api, "_parts", parts)
    with pytest.raises(Seen), contextlib.ExitStack() as stack:
        stack.enter_context(function(object(), **{name: OTHER[name]}))
    assert OTHER.keys() == {field.name for field in dataclasses.fields(accel.Options)}
    assert seen[-1] == accel.Options(**{name: OTHER[name]}) != accel.Options()


def test_options_are_taken_as_an_object(pair):
    model, _, _ = pair
    options = accel.Options(layout="keep", graphs=False)
    assert accel.optimize(model, options) is model
    assert ("", "channels-last weights", "skipped", 'layout="keep"') in accel.report(model).sites
    with accel.optimized(model, options=options) as same:
        assert ("", "channels-last weights", "skipped", 'layout="keep"') in accel.report(same).sites


@pytest.mark.parametrize(
    "arguments, keywords, message",
    [
        (
            (accel.Options(graphs=False),),
            {"layout": "keep", "strict": True},
            "layout='keep', strict=True beside options",
        ),
        ((accel.Options(),), {"atention": "auto"}, "unknown option 'atention'; valid options: attention, layout"),
        (({"layout": "keep"},), {}, "options={'layout': 'keep'}: give an accel.Options, or its fields as keywords"),
        (("keep",), {}, "options='keep': give an accel.Options"),
    ],
)
def test_options_that_are_no_choice_touch_nothing(pair, tiny, arguments, keywords, message):
    model, _, _ = pair
    before = tiny.snapshot(model)
    for function in (accel.optimize, lambda *a, **k: accel.optimized(*a, **k).__enter__()):
        with pytest.raises(TypeError, match=re.escape(message)):
            function(model, *arguments, **keywords)
        tiny.assert_same_state(before, tiny.snapshot(model))
