"""What steps of encoder-decoder models have run."""

import pytest

from accel.seq2seq.decoder import Seq2SeqForward
from accel.seq2seq.fixed_memory import CROSS
from accel.seq2seq.memory_attention import BoundMemoryAttention
from support.noted import noted
from support.objects.seq2seq import FAMILIES


@pytest.fixture
def steps(monkeypatch):
    """The rows of each step, once a model is optimized."""
    return lambda: noted(monkeypatch, Seq2SeqForward, "step", lambda forward, holding, tokens, *_: len(tokens))


@pytest.fixture
def attended(monkeypatch):
    """For each attention that a fused layer has computed, whether it is to what the encoder gave."""
    return noted(monkeypatch, BoundMemoryAttention, "attended", lambda bound, *_: bound.spec.part == CROSS)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param
