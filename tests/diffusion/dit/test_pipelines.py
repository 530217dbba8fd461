"""Pipelines of diffusion transformers, their devices and their memory."""

import copy

import numpy as np
import pytest
import torch
from accel_kernels.rowwise.rowwise import rowwise
from torch.utils._python_dispatch import _disable_current_modes

import accel
from accel.diffusion.dit.executable import Executable
from accel.diffusion.dit.recorder import tensors_in
from support.compatibility.diffusers_calls import inputs
from support.compatibility.tiny_diffusers_models import build
from support.compatibility.transformer_pipelines import PIPELINES
from support.diffusion.outputs import in_dtype
from support.diffusion.programs import Formula, Planned
from support.llm.held_out import LiveBytes

FAR = 3e-5  # of the largest number: sums in another order, over steps and layers, and a decoder


def drawn(pipeline, given):
    output = pipeline(**given, generator=torch.Generator().manual_seed(5), output_type="np")
    return np.asarray(output.frames if hasattr(output, "frames") else output.images)


@pytest.mark.share(12)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.turns(2)
def test_a_pipeline_draws_what_stock_draws(name, monkeypatch):
    runs, run = [], Executable.__call__
    monkeypatch.setattr(Executable, "__call__", lambda self, *given: runs.append(1) or run(self, *given))
    pipeline, calls = PIPELINES[name]()
    stock = copy.deepcopy(pipeline)
    wanted = [drawn(stock, given) for given in calls]
    assert all(np.isfinite(one).all() and one.std() > 0.01 for one in wanted)
    accel.optimize(pipeline, cpu="fuse")
    for given, one in zip(calls * 2, wanted * 2, strict=True):  # other sizes in turn
        runs.clear()
        np.testing.assert_allclose(drawn(pipeline, given), one, rtol=0, atol=FAR * np.abs(one).max())
        assert len(runs) >= 2
    assert accel.report(pipeline).fallbacks == []
    accel.restore(pipeline)
    assert all(np.array_equal(drawn(pipeline, given), one) for given, one in zip(calls, wanted, strict=True))


B, S, T, H, D = 2, 6, 2, 2, 8


def turned(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.device), sin.to(x.device)
    return (x.float() * cos + torch.cat([-b, a], dim=-1).float() * sin).to(x.dtype)


def some_rows(x, cos, sin):
    x = x * 2 + 1
    x[:, :, T:] = turned(x[:, :, T:], cos[T:], sin[T:])
    return x


def moved_with_the_dtype(x, cos, sin):
    return x * cos.to(x) + 1 + sin.type_as(x)


def a_number_on_the_cpu(x, cos, sin):
    return ((x * 2 + 1) * cos[0, 0] + x.float()) * 3 + sin.amax()


def worked_on_before(x, cos, sin):
    return (x + (cos.exp() * 2 + sin.sin()).to(x.device)) * 3


def lanes_from_the_cpu(x, cos, sin):
    out = torch.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * 2 - x[..., 1::2]
    out[..., 1::2] = (cos * 2 + sin)[..., 1::2].to(x.dtype).expand(B, H, S, D // 2)
    return out * 2 + 1


def rows_from_the_cpu(x, cos, sin):
    out = x * 2
    out[:, :, T:] = (cos + sin)[T:].to(x.dtype).expand(B, H, S - T, D)
    return out * 2, x * 2 + 1


FORMULAS = [turned, some_rows, moved_with_the_dtype, a_number_on_the_cpu, worked_on_before]
COPIES = [lanes_from_the_cpu, rows_from_the_cpu]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("forward", FORMULAS + COPIES, ids=lambda one: one.__name__)
def test_passes_take_tensors_of_one_device(forward, dtype):
    x, tables = torch.randn(B, H, S, D, dtype=dtype), [torch.randn(S, D), torch.randn(S, D)]
    planned = Planned(Formula(forward), x.to("meta"), *tables)
    assert planned.passes
    values = planned.schedule.program.values
    for one in planned.passes:
        assert len({values[number].device for number in one.takes | one.makes}) == 1
    for wanted, got in zip(tensors_in(planned.wanted), tensors_in(planned.got), strict=True):
        assert (wanted.shape, wanted.dtype, wanted.device) == (got.shape, got.dtype, got.device)
    assert Planned(Formula(forward), x, *tables).equal()


TOKENS = 512  # many, for activations to be more than weights


def flux():
    model = build("FluxTransformer2DModel")
    given = inputs(model) | {"hidden_states": torch.randn(2, TOKENS, 16), "img_ids": torch.zeros(TOKENS, 3)}
    return model, given


def sd3():
    model = build("SD3Transformer2DModel")
    return model, inputs(model) | {"hidden_states": torch.randn(2, model.config.in_channels, 16, 16)}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A pass takes the memory of its results alone, as its kernel does."""
    reference = rowwise.reference

    def one_kernel(*args, **kwargs):
        with _disable_current_modes():
            return reference(*args, **kwargs)

    monkeypatch.setitem(vars(rowwise), "reference", one_kernel)


@torch.no_grad()
@pytest.mark.parametrize("made", [flux, sd3], ids=lambda one: one.__name__)
def test_no_call_in_16_bits_takes_more_memory_than_stock(made, as_on_a_gpu):
    model, given = made()
    model, given = model.bfloat16(), in_dtype(given, torch.bfloat16)

    def peak():
        with LiveBytes(model) as live:
            model(**given)
        return live.peak

    stock = peak()
    accel.optimize(model, cpu="fuse")
    first, *later = [peak() for _ in range(4)]
    assert accel.report(model).fallbacks == []
    assert first <= stock and max(later) < stock and len(set(later)) == 1, (stock, first, later)
