"""Short convolutions and selective scans: what is taken for one, and what is not."""

import copy
import sys

import pytest
import torch

import accel
from accel.llm.attention.selective_scan import SelectiveScanSpec
from accel.llm.attention.short_convolution import ShortConvolutionSpec
from accel.llm.recording.record import NotUnderstood
from accel.llm.runtime.analyze import formulas
from support.llm.families import make
from support.llm.miniatures.mambas import MAMBAS
from support.llm.outputs import write_alike

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGE = 300.0  # that no number of the first run is beyond


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "kind"), [("lfm2", ShortConvolutionSpec), ("jamba", SelectiveScanSpec)])
def test_each_is_found_in_each_dtype(name, kind, dtype):
    (_, first), (_, second) = formulas(make(name, dtype), {})[:2]
    assert type(first.attention) is kind and type(second.attention) is not kind
    assert first.keeps_state and not second.keeps_state
    if name == "jamba":
        formula = first.attention.formula
        assert formula.anew and None not in formula.part_norms and formula.time == "mamba.dt_proj"
        assert set(first.attention.linears) <= set(first.called)


def changed(function, how):
    def other(x, *args, **kwargs):
        return how(function, x, *args, **kwargs)

    return other


CONVOLUTIONS = {
    "another order": lambda f, x, weight, *more, **kw: f(x, weight.flip(-1), *more, **kw),
    "twice": lambda f, *args, **kw: 2 * f(*args, **kw),
    "another activation": lambda f, *args, **kw: torch.tanh(f(*args, **kw)),
    "held where large": lambda f, *args, **kw: f(*args, **kw).clamp(-LARGE, LARGE),
}
SCANS = {
    "another skip": lambda f, *args, D, **kw: f(*args, D=2 * D, **kw),
    "no gate": lambda f, *args, z, **kw: f(*args, z=None, **kw),
    "steps are held where large": lambda f, x, dt, *more, **kw: f(x, dt.clamp(max=LARGE), *more, **kw),
}


@pytest.mark.parametrize(
    ("name", "function", "how"),
    [("lfm2", "causal_conv1d_fn", how) for how in CONVOLUTIONS]
    + [("jamba", "causal_conv1d_fn", how) for how in CONVOLUTIONS]
    + [("mamba", "mamba_selective_scan", how) for how in SCANS],
)
@pytest.mark.share(3)
def test_another_formula_runs_stock(name, function, how, monkeypatch):
    model = make(MAMBAS[0] if name == "mamba" else name)
    modeling = sys.modules[type(model).__module__]
    way = (CONVOLUTIONS if function == "causal_conv1d_fn" else SCANS)[how]
    monkeypatch.setattr(modeling, function, changed(getattr(modeling, function), way))
    with pytest.raises(NotUnderstood, match="of another formula|where numbers are large"):
        formulas(model, {})


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("lfm2", {"conv_bias": True}, "padding goes through the bias"),
        ("jamba", {"mamba_proj_bias": True}, "padding goes through the bias"),
        ("jamba", {"hidden_act": "gelu"}, "of another formula"),
    ],
)
def test_what_is_not_known_runs_stock_and_writes_the_same(name, change, reason):
    stock = make(name, **change)
    ours, found = accel.optimize(copy.deepcopy(stock)), {}
    formulas(stock, found, some=True)
    assert reason in next(iter(found.values()))
    write_alike(ours, stock, (9, 3))
