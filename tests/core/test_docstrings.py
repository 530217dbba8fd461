"""Docstrings name what is there, nothing public is without one, and their sentences are short."""

import subprocess
import sys
from pathlib import Path

import pytest

from support import docstrings

ROOT = Path(__file__).parents[2]
PLANTED = {
    "tells of 'gone'": 'def f(x):\n    """What it does.\n\n    gone: a parameter of before.\n    """\n',
    "names 'lost_helper'": 'def f(x):\n    """As `lost_helper` has it."""\n',
    "has no docstring": "def f(x):\n    return x\n",
    "a sentence of 31 words": f'def f(x):\n    """{"word " * 31}"""\n',
}


@pytest.mark.share(1)
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault, tmp_path):
    (tmp_path / "one.py").write_text('"""A file."""\n\n\n' + PLANTED[fault])
    command = [sys.executable, str(ROOT / "tests/support/docstrings.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and fault in done.stdout and len(done.stdout.splitlines()) == 1


def test_what_is_right_passes(tmp_path):
    text = 'class A(Base):\n    """own: of the base. As `f` has it."""\n\n\n'
    text += 'def f(x, **more):\n    """x: (N, K).\n\n    other: of more.\n    """\n    return more["other"]\n'
    (tmp_path / "one.py").write_text('"""A file."""\n\n\n' + text)
    assert [*docstrings.faults(tmp_path / "one.py", {"own", "f", "other"})] == []
