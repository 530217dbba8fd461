"""A process that runs pytest again and again, each time in a fork of itself that has imported the libraries already.

Reads lines of JSON, [arguments of pytest, a file for what it prints]; answers each with its exit code. What a fork had
to import from outside of the working directory, this process imports too, for the forks after it.
"""

import gc
import importlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py has it: before triton is imported
HERE = str(Path.cwd())


def imported() -> list[str]:
    """Modules from outside of the working directory, but for the parts of pytest."""
    found = ((name, getattr(module, "__file__", None)) for name, module in sys.modules.copy().items())
    others = ((name, file) for name, file in found if not name.startswith(("_pytest", "pytest")))
    return [name for name, file in others if file and not file.startswith(HERE)]


def run(arguments: list[str], printed: str, modules: str) -> int:
    """Of a fork: its exit code."""
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        return int(pytest.main(arguments))
    finally:
        Path(modules).write_text("\n".join(imported()))


for line in sys.stdin:
    arguments, printed = json.loads(line)
    modules = printed + ".modules"
    gc.freeze()
    fork = os.fork()
    if not fork:
        sys.exit(run(arguments, printed, modules))
    _, status = os.waitpid(fork, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
    if Path(modules).exists():
        for name in Path(modules).read_text().split():
            if name not in sys.modules:
                with suppress(Exception):  # what cannot be imported by itself
                    importlib.import_module(name)
