"""Whose code something is, and where the libraries keep code under names."""

import sys
from collections.abc import Iterator
from functools import cache

import torch

GRADIENTS = {"gradient_checkpointing", "_gradient_checkpointing_func"}  # settings that are read with gradients alone
KERNEL = "kernel_layer_name"  # of a class: by which the package `kernels` finds another forward for it


def comes_from(one: object, *libraries: str) -> bool:
    """Whether a class, a function, or the class of an object stands in a module of one of these libraries."""
    return (getattr(one, "__module__", None) or "").partition(".")[0] in libraries


def function_tables(registry: object) -> Iterator[dict]:
    """The functions by name that a registry of transformers holds: for itself, and for all registries of its class."""
    for name in ("_local_mapping", "_global_mapping"):
        if isinstance(found := getattr(registry, name, None), dict):
            yield found


def lacks_kernel(module: object) -> bool:
    """Whether these are a linear or experts of transformers in float8, which a kernel of the Hub multiplies, and none
    can be loaded; or a linear with 4 bits of torchao, which the package mslk multiplies, and it is missing.
    """
    kind = type(module)
    weight = getattr(module, "_parameters", {}).get("weight")
    if type(weight).__name__ == "Int4Tensor" and comes_from(type(weight), "torchao"):
        return not hasattr(torch.ops.mslk, "bf16i4bf16_rowwise")
    if kind.__name__ not in ("FP8Linear", "FP8Experts") or not comes_from(kind, "transformers"):
        return False
    return getattr(sys.modules[kind.__module__], "_FINEGRAINED_FP8", None) is None and not _loads_kernels()


@cache
def _loads_kernels() -> bool:
    from transformers.utils.import_utils import is_kernels_available

    return is_kernels_available()
