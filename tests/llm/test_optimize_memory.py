"""What optimizing holds for a moment: as much for a deep model as for a shallow one, beyond the model itself.

The warmup of the kernels, which a CPU has no use for, runs here all the same: on a GPU it holds the most.
"""

from contextlib import contextmanager

import pytest

import accel
from accel.llm.analysis.analyze import formulas
from accel.llm.generation import self_test
from accel.llm.generation import trial_warmup as check
from accel.llm.recording import window
from accel.llm.runtime.attention_kinds import KINDS
from support.everything import EVERYTHING
from support.llm.families import available, make
from support.llm.live_bytes import LiveBytes

# By the name that each has for its depth.
FAMILIES = (
    ("llama", "num_hidden_layers"),
    ("gemma2", "num_hidden_layers"),
    ("phi3", "num_hidden_layers"),
    ("gpt2", "n_layer"),
    ("bloom", "n_layer"),
)
OPTIONS = ({}, {"kv_cache": "int8"})
DEPTHS = (3, 7)
TOKEN_BYTES = 2 * 4 * 16 * 4  # keys and values of a token of at most 4 heads of 16 in fp32
SMALL = 512  # bytes a layer: places of keys and values, scales


@pytest.fixture(autouse=True)
def few_positions(monkeypatch):
    """A window is looked for among a million positions on the CPU, whatever the model: it would hide all else."""
    monkeypatch.setattr(window, "QUERIES", (3, 77))


@pytest.fixture
def warmups(monkeypatch):
    """Those that ran, as they do on a GPU but for the compiler."""
    runs = []

    @contextmanager
    def warming_up(forward, lengths, longer=()):
        runs.append(lengths)
        with check.fused_layers(forward):
            check._run_through(forward, lengths, longer)
        yield

    for module in (self_test, check):
        monkeypatch.setattr(module, "warming_up_trial", warming_up)
    return runs


def model(family: str, **depth):
    if not available(family):
        pytest.skip(f"this transformers has no {family}")
    return make(family, **depth)


@pytest.mark.parametrize(
    ("family", "name", "options"),
    [(*family, options) for i, family in enumerate(FAMILIES) for j, options in enumerate(OPTIONS)
     if EVERYTHING or (i + j) % 2 == 0],
    ids=str,
)  # fmt: skip
@pytest.mark.share(4)
def test_a_deep_model_needs_no_more_than_a_shallow_one(family, name, options, warmups):
    """A record of every layer, or room for keys and values in every layer while only one of a kind runs, is more."""
    peaks = []
    for depth in DEPTHS:
        one = model(family, **{name: depth})
        with LiveBytes(one) as live:
            accel.optimize(one, **options)
        peaks.append(live.peak)
        assert set(accel.report(one).fallbacks) == set() and "forward" in vars(one)
    assert len(warmups) >= 2 * (1 + bool(options))
    scores = 2 * 7 * TOKEN_BYTES if options else 0  # by which it is judged what may be rounded
    assert peaks[1] - peaks[0] <= (DEPTHS[1] - DEPTHS[0]) * (SMALL + scores), peaks


@pytest.mark.parametrize(("family", "name"), FAMILIES)
@pytest.mark.share(2)
def test_layers_are_forgotten_one_by_one(family, name):
    """What stays of a layer until the run ends are the keys and values in stock's own cache."""
    peaks = []
    for depth in DEPTHS:
        one, known = model(family, **{name: depth}), {}
        with LiveBytes(one) as live:
            found = formulas(one, known, KINDS)
        peaks.append(live.peak)
        assert len(found) == len(known) == depth
        assert all(layer.calls == [] and layer.stored is layer.attended is None for layer, _ in found)
    assert peaks[1] - peaks[0] <= (DEPTHS[1] - DEPTHS[0]) * (SMALL + 2 * 7 * TOKEN_BYTES), peaks
