"""Pairs of tiny transformers."""

import pytest

from support.compatibility.transformer_pair import TransformerPair


@pytest.fixture
def pair(request, monkeypatch):
    """Of the class that the test is parametrized with."""
    return TransformerPair(request.param, monkeypatch)
