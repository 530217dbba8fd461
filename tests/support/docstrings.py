"""A lint of docstrings: what they name exists, nothing public is without one, and sentences are short.

    python tests/support/docstrings.py [FOLDER ...]

Prints a line for each fault, and ends with 1 where there is any.
"""

import ast
import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_WORDS = 30
LONG = 200  # characters of a string, which is text then
ITEM = re.compile(r"(?:[.;]\s+|\n\s*\n)([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")
QUOTED = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")
NAMING = frozenset(("id", "attr", "arg", "name"))
Function = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)  # asked of every node: a union takes longer


def names_in(tree: ast.AST) -> set[str]:
    """All that a tree names: variables, attributes, parameters, keywords, definitions, words of short strings."""
    found: set[str] = set()
    nodes = list(ast.walk(tree))
    told = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in told and len(node.value) < LONG:
                found.update(re.findall(r"\w+", node.value))
        else:
            for field in NAMING.intersection(node._fields):
                if isinstance(one := getattr(node, field), str):
                    found.update(one.split("."))
    return found


def told(node: Function | ast.ClassDef) -> bool:
    """Whether it has a docstring; or a decorator that is given a sentence; or is a part of what has one.

    That is a kernel, whose launcher has its arguments, or what an operation supports.
    """
    given = [one for call in node.decorator_list if isinstance(call, ast.Call) for one in call.args]
    if any(isinstance(one, ast.Constant) and " " in str(one.value) for one in given):
        return True
    compiled = any(getattr(one, "attr", "") == "jit" for one in ast.walk(ast.Module(node.decorator_list, [])))
    return compiled or node.name in ("supports", "main") or ast.get_docstring(node) is not None


def takes_more(owner: ast.AST) -> bool:
    """Whether some of its arguments or attributes are named elsewhere: of a base class, or as `**kwargs`."""
    if isinstance(owner, Function):
        return owner.args.kwarg is not None
    return isinstance(owner, ast.ClassDef) and bool(owner.bases)


def sentences(text: str) -> list[str]:
    plain = re.sub(r"`[^`]*`", "code", text)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=    )", plain)
    return [one for part in parts for one in re.split(r"(?<=[.!?;:])\s+", part.strip()) if one]


def faults(path: Path, known: set[str], tree: ast.Module | None = None) -> Iterator[str]:
    tree = tree or ast.parse(path.read_text(encoding="utf-8"))
    for owner in [tree, *(node for node in ast.walk(tree) if isinstance(node, DEFINITIONS))]:
        text = ast.get_docstring(owner)
        line = getattr(owner, "lineno", 1)
        name = getattr(owner, "name", path.stem)
        if text is None:
            continue
        items = [one for item in ITEM.finditer(text) for one in item.group(1).split(", ")]
        if items:  # else nobody asks for all its names
            own = names_in(owner) | (known if takes_more(owner) else set())
            for one in items:
                if not {one, f"{one}_ptr"} & own:
                    yield f"{path}:{line}: {name} tells of {one!r}, which it does not have"
        for quoted in QUOTED.finditer(text):
            if gone := [one for one in quoted.group(1).removesuffix(".py").split(".") if one not in known]:
                yield f"{path}:{line}: {name} names {gone[0]!r}, which is nowhere"
        for sentence in sentences(text):
            if len(sentence.split()) > MOST_WORDS:
                yield f"{path}:{line}: {name}: a sentence of {len(sentence.split())} words: {sentence[:60]}"
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") and not told(node):
            yield f"{path}:{node.lineno}: {node.name} has no docstring"


if __name__ == "__main__":
    gc.disable()  # trees are no garbage, and to look through them takes as long as to read them
    folders = [Path(one) for one in sys.argv[1:] or ("accel", "kernels")]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    known = {part for file in files for part in (file.stem, file.parent.name)}.union(*map(names_in, trees.values()))
    found = [fault for file, tree in trees.items() for fault in faults(file, known, tree)]
    if found:
        print("\n".join(found))
    sys.exit(bool(found))
