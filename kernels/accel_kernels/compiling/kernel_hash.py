"""The hash by which Triton finds a compiled kernel again, made alike in every process.

Up to Triton 3.8 it leaves out the constants of called functions that have no hash yet, so it depends on the order of
launches. Another process would then compile the kernel anew instead of finding it.
"""

from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any


def hash_callees_first(kernel: Any) -> None:
    """Hashes what a kernel calls, then the kernel. Costs a look at one attribute once that is done."""
    if getattr(kernel, "hash", "") is None:  # an interpreted one has none
        _hash(kernel, set())


def _hash(function: Any, begun: set[int]) -> None:
    begun.add(id(function))
    for callee in _callees(function.fn):
        if id(callee) not in begun and callee.hash is None:
            _hash(callee, begun)
    function.cache_key  # noqa: B018  a property that computes it


def _callees(function: FunctionType) -> Iterator[Any]:
    """The compiled functions that the text of this one names, in its module, around it or in a module it uses."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    around = {name: cell.cell_contents for name, cell in cells}
    named = [around[name] if name in around else function.__globals__.get(name) for name in (*code.co_names, *around)]
    modules = [one for one in named if isinstance(one, ModuleType)]
    inside = [vars(module).get(name) for module in modules for name in code.co_names]
    yield from (one for one in (*named, *inside) if hasattr(type(one), "cache_key") and hasattr(one, "hash"))
