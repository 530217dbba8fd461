"""Triton's interpreter, a third faster: it looks through the whole language for what to replace but once a launch.

Left alone, it does so again in every call of a function inside a kernel, and finds everything replaced. And it makes
its table of numpy's types anew for each number it looks up.
"""

import functools
import importlib.util
import inspect
import os
from types import SimpleNamespace

import pytest

from support.kernels import compiler, routing

NOTHING = SimpleNamespace(restore=lambda: None)


def replace_once() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang

    @functools.cache
    def languages(function) -> list:
        """The modules of the language that a function sees, by the interpreter's own rule."""
        return [value for value in function.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]

    def once(function):
        fresh = any(tl.core.is_builtin(language.load) for language in languages(function))
        return replace(function) if fresh else NOTHING

    interpreter._patch_lang = once


def look_up_once() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    look_up = interpreter._get_np_dtype

    @functools.cache
    def named(name: str):
        return look_up(tl.dtype(name))

    def numpy_type(kind):
        kind = kind.scalar
        return look_up(kind) if isinstance(kind, tl.pointer_type) else named(kind.name)

    interpreter._get_np_dtype = numpy_type


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    replace_once()
    look_up_once()


@pytest.fixture(scope="session", autouse=True)
def compiling_ends():
    yield
    compiler.end()


@pytest.fixture
def poisoned(monkeypatch):
    routing.poisoned(monkeypatch)
