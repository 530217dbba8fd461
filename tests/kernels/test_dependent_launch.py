"""Of kernels that start early, every program waits for the kernel in front before it ends: else the next kernel, which
waits for this one alone, could overtake that.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import accel_kernels

ROOT = Path(accel_kernels.__file__).parent
WAIT = "gdc_wait"


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(ROOT.rglob("*_triton.py")):
        for one in ast.walk(ast.parse(path.read_text())):
            if isinstance(one, ast.FunctionDef) and one.name.endswith("_kernel") and _waits(one):
                yield f"{path.stem}:{one.name}", one


def _waits(tree: ast.AST) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == WAIT for one in ast.walk(tree))


def too_early(statements: list[ast.stmt]) -> list[int]:
    """Lines of returns before any wait on their way."""
    found = []
    for one in statements:
        if isinstance(one, ast.If) and "PDL" in ast.unparse(one.test) and any(map(_waits, one.body)):
            return found
        if isinstance(one, ast.Return):
            return [*found, one.lineno]
        if isinstance(one, ast.If):
            found += too_early(one.body) + too_early(one.orelse)
    return found


def test_no_program_ends_without_waiting():
    found = {name: too_early(kernel.body) for name, kernel in kernels()}
    assert len(found) >= 20, sorted(found)
    assert not any(found.values()), {name: lines for name, lines in found.items() if lines}


def test_a_program_that_does_would_be_seen():
    source = "def k(PDL):\n    if empty:\n        return\n    if PDL:\n        gl.gdc_wait()\n    store()"
    assert too_early(ast.parse(source).body[0].body) == [3]
