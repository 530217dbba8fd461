"""Whose code something is, and where the libraries keep code under names."""

from collections.abc import Iterator

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
