"""Scripts of benchmarks/, which is no package."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def script(monkeypatch):
    """Imports one: they find each other beside themselves, as scripts do."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module
