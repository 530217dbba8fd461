"""Options that are wrong, and errors that are told."""

import ast
import contextlib
import dataclasses
import inspect
import logging
import re
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from accel_kernels.autotune import Choices
from accel_kernels.errors import set_aside
from torch import nn

import accel
from accel.cuda_graphs.runner import GraphRunner
from accel.errors import fatal, logged, out_of_memory, reason_of
from accel.patching.code import ClassCode
from accel.patching.guard import Parts, PartsSnapshot, same
from accel.patching.rule import Rule, Site
from tests.core.test_package import every_node


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
    "padding": "zeros", "memory": "12GB", "host_memory": 0.5,
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


ROOT = Path(__file__).parents[2]
MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
FAULT = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
BUG = ZeroDivisionError("planted")
NAMED = "could not be examined: ZeroDivisionError: planted"


class Incomparable:
    def __init__(self, error: Exception):
        self.error = error

    def __eq__(self, other):
        raise self.error


def raising(error: Exception):
    def work(*args, **kwargs):
        raise error

    return work


def looked_at(error: Exception) -> bool:
    module = nn.Module()
    module.held = Incomparable(error)
    snapshot = PartsSnapshot(None, Parts((module,)), ClassCode([]))
    module.held = Incomparable(error)
    return snapshot.holds()


def warmed_up(error: Exception) -> bool:
    runner = GraphRunner.__new__(GraphRunner)
    runner.warm = set()
    leaves, spec = torch.utils._pytree.tree_flatten(((), {}))
    return runner._warm_up(raising(error), leaves, spec)


# Places where an error decides something, and what they make of a bug; `test_no_error_is_silent` reads all handlers.
SITES = {
    "rule": (lambda e: Rule("faulty", raising(e)).answer(Site("", nn.Identity()), None).reason, NAMED),
    "settings": (lambda e: same(Incomparable(e), Incomparable(e)), False),
    "parts": (looked_at, False),
    "warm-up": (warmed_up, True),
}


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("error", [MEMORY, FAULT], ids=["memory", "fault"])
def test_memory_and_faults_come_out(site, error):
    with pytest.raises(type(error)) as found:
        SITES[site][0](error)
    assert found.value is error


@pytest.mark.parametrize("site", SITES)
def test_a_bug_is_logged_with_its_traceback_and_named(site, caplog):
    run, wanted = SITES[site]
    with caplog.at_level(logging.DEBUG, "accel"):
        found = run(BUG)
    assert wanted in found if isinstance(wanted, str) else found == wanted
    (logged, *_) = [entry for entry in caplog.records if entry.name == "accel" and entry.exc_info]
    assert logged.exc_info[1] is BUG and logged.exc_info[2] is not None


class Trying(Choices):
    def place(self, key):
        raise NotImplementedError


@pytest.mark.parametrize("error", [BUG, MEMORY, RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")])
def test_a_trial_that_fails_is_logged_and_leaves_the_default(error, caplog, monkeypatch):
    """Measuring takes memory that the call itself does not need, and a library may lack an algorithm."""
    chooser = Trying()
    monkeypatch.setattr(chooser, "adopt", lambda key, choice: chooser.choices.update({key: choice}))
    with caplog.at_level(logging.DEBUG, "accel_kernels"):
        assert chooser.decide("key", raising(error), "plain") == "plain"
    assert [entry.exc_info[1] for entry in caplog.records if entry.name == "accel_kernels"] == [error]


def test_a_gpu_that_fails_in_a_trial_ends_the_call():
    with pytest.raises(torch.AcceleratorError):
        Trying().decide("key", raising(FAULT), "plain")
    with pytest.raises(KeyboardInterrupt):
        set_aside(KeyboardInterrupt())


def test_one_helper_tells_what_to_do_after_an_error():
    assert reason_of(BUG) == logged(BUG) == "ZeroDivisionError: planted"
    assert logged(ValueError("first\nsecond")) == "ValueError: first" and logged(ValueError()) == "ValueError"
    assert all(map(fatal, (KeyboardInterrupt(), MEMORY, FAULT, MemoryError())))
    devices = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    assert not any(map(fatal, (BUG, RuntimeError(devices), ValueError("CUDA error"))))
    assert reason_of(MEMORY, memory=True).startswith("OutOfMemoryError: CUDA out of memory")
    assert out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    for error in (FAULT, KeyboardInterrupt()):
        with pytest.raises(type(error)):
            reason_of(error, memory=True)


HELPERS = {"reason_of", "logged", "set_aside", "fail"}  # fail: of benchmarks, where an error is a row


def called(call: ast.Call) -> str | None:
    """What stands in front of the brackets, behind the last dot."""
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def silent(path: Path) -> list[int]:
    """Lines of handlers of every error that neither raise it nor hand it to a helper."""
    lines = []
    for node in every_node(path):
        if isinstance(node, ast.Call) and called(node) == "suppress":
            lines += [node.lineno for kind in node.args if ast.unparse(kind) in ("Exception", "BaseException")]
        if isinstance(node, ast.ExceptHandler) and (
            node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
        ):
            inside = list(ast.walk(ast.Module(node.body, [])))
            helpers = {called(call) for call in inside if isinstance(call, ast.Call)} & HELPERS
            kept = any(isinstance(n, ast.Assign) and ast.unparse(n) == "self.error = error" for n in inside)
            if not helpers and not kept and not any(isinstance(n, ast.Raise) for n in inside):
                lines.append(node.lineno)
    return lines


def test_no_error_is_silent(tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text("try:\n    work()\nexcept Exception:\n    pass\nwith suppress(Exception):\n    work()\n")
    assert silent(planted) == [3, 5] or silent(planted) == [5, 3]
    paths = [path for top in ("accel", "kernels") for path in (ROOT / top).rglob("*.py")]
    assert not {str(path.relative_to(ROOT)): lines for path in paths if (lines := silent(path))}
