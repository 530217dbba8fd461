"""Triton's interpreter, a third faster: it looks through the whole language for what to replace but once a launch.

Left alone, it does so again in every call of a function inside a kernel, and finds everything replaced.
"""

import functools
import importlib.util
import inspect
import os
from types import SimpleNamespace

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


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    replace_once()
