"""The code that calling a block of a diffusion transformer runs, and the attention backend that diffusers' code asks
for.
"""

from accel.libraries.diffusion import attention_backends
from accel.patching.code import CalledCode, ClassCode, CodeTable


class BlockCode(CalledCode):
    """All that is written in the classes of a block, the functions that a call runs, and diffusers' attention backends.

    A plan calls none of it: it holds what these functions were seen to compute.
    """

    def find(self) -> list[CodeTable]:
        return [*ClassCode(self.kinds).tables, *super().find(), *_backend_tables()]

    def entries(self) -> list[object]:
        return list(attention_backends().values())


def _backend_tables() -> list[CodeTable]:
    found = attention_backends()
    return [CodeTable("attention backends", found, tuple(found), dict(found))] if found else []
