"""Pairs of tiny transformers."""

import pytest

from support.diffusion.transformer_pair import TransformerPair


@pytest.fixture
def pair(request, monkeypatch):
    """Of the class that the test is parametrized with."""
    return TransformerPair(request.param, monkeypatch)
