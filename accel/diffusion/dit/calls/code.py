"""The code that calling a block of a diffusion transformer runs, and the attention backend that diffusers' code asks
for.
"""

import sys
from typing import Any

from accel.patching.code import CalledCode, ClassCode, CodeTable


class BlockCode(CalledCode):
    """All that is written in the classes of a block, the functions that a call runs, and diffusers' attention backends.

    A plan calls none of it: it holds what these functions were seen to compute.
    """

    def find(self) -> list[CodeTable]:
        return [*ClassCode(self.kinds).tables, *super().find(), *_backend_tables()]

    def entries(self) -> list[object]:
        return list(_backends().values())


def active_backend() -> object:
    """The attention backend for processors without their own: by `attention_backend(...)` or the environment."""
    return getattr(_registry(), "_active_backend", None)


def _registry() -> Any:
    return getattr(sys.modules.get("diffusers.models.attention_dispatch"), "_AttentionBackendRegistry", None)


def _backends() -> dict:
    found = getattr(_registry(), "_backends", None)
    return found if isinstance(found, dict) else {}


def _backend_tables() -> list[CodeTable]:
    found = _backends()
    return [CodeTable("attention backends", found, tuple(found), dict(found))] if found else []
