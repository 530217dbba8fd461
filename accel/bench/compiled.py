"""torch.compile beside accel: the whole method of a module, or the blocks of it that repeat."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accel.bench.diffusion.case import Case


@contextmanager
def fresh_inductor_cache() -> Iterator[None]:
    """torch.compile inside compiles anew, so that the seconds it takes are those of a first run."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="accel-inductor-", ignore_cleanup_errors=True) as folder:
        os.environ.update(dict.fromkeys(names, folder))
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def compiled_step(case: Case, module: nn.Module, inputs: list[dict]) -> Callable[[int], torch.Tensor]:
    """step(i) is call number i of the module, which is changed."""
    if case.compiled == "blocks":
        compile_blocks(module)
        return lambda i: case.call(module, inputs[i % len(inputs)])
    function = torch.compile(getattr(module, case.entry), mode="reduce-overhead")

    def step(i: int) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return case.run(function, inputs[i % len(inputs)])

    return step


def compile_blocks(module: Any) -> None:
    """`compile_repeated_blocks(fullgraph=False)` of diffusers.

    Of a class that names no such blocks, those that it wants kept together on one device are compiled the same way.
    """
    if getattr(module, "_repeated_blocks", None):
        module.compile_repeated_blocks(fullgraph=False)
        return
    names = getattr(module, "_no_split_modules", None) or ()
    blocks = [child for child in module.modules() if type(child).__name__ in names]
    if not blocks:
        raise ValueError(f"{type(module).__name__} names no blocks that repeat")
    for block in blocks:
        block.compile(fullgraph=False)
