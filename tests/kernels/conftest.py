"""Kernels run in Triton's interpreter, and what compiles them ends with the tests."""

import pytest

from support.kernels import compiler, interpreter, numbers

interpreter.prepare()


@pytest.fixture(scope="session", autouse=True)
def compiling_ends():
    yield
    compiler.end()


@pytest.fixture
def poisoned(monkeypatch):
    numbers.poisoned(monkeypatch)
