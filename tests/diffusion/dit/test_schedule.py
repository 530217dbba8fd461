"""What lies between two products becomes passes, as few as there can be, that give stock's bits."""

import pytest
import torch
import torch.nn.functional as F

from accel.diffusion.dit.lowering import Window
from accel.diffusion.dit.schedule import GeluProduct
from support.diffusion.programs import Formula, Planned, as_complex, assigned, halves, pairs, rand

B, S, T, H, D = 2, 6, 3, 2, 8
C = H * D


def modulated(x, t, w):
    shift, scale, gate = F.linear(F.silu(t), w).chunk(3, dim=1)
    h = F.layer_norm(x, (C,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
    return x + gate[:, None] * F.linear(h, w[:C])


def table_in_fp32(x, t, w):
    shift, scale = (w[:2][None] + t.float()[:, None]).chunk(2, dim=1)
    return (F.layer_norm(x.float(), (C,), eps=1e-6) * (1 + scale) + shift).type_as(x)


def rms_by_hand(x, w):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return (x * torch.rsqrt(variance + 1e-6)).to(w.dtype) * w


def swiglu(x, w):
    gate, up = F.linear(x, w).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w[:C, : C // 2])


ROTATIONS = [pairs, halves, assigned, as_complex]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotation", ROTATIONS, ids=lambda one: one.__name__)
def test_a_norm_and_a_rotation_are_one_pass_in_either_stream(rotation, dtype):
    """Queries of two streams, each normed by itself, then put together, then turned."""

    def forward(x, y, cos, sin, wx, wy):
        both = torch.cat([rms_by_hand(y, wy), rms_by_hand(x, wx)], dim=1)
        return F.scaled_dot_product_attention(*[rotation(both, cos, sin).transpose(1, 2)] * 3)

    given = [rand(B, S, H, D, dtype=dtype), rand(B, T, H, D, seed=1, dtype=dtype)]
    tables = [rand(1, S + T, 1, D, seed=seed) for seed in (2, 3)]
    module = Formula(forward, wx=rand(D, seed=4, dtype=dtype), wy=rand(D, seed=5, dtype=dtype))
    planned = Planned(module, *given, *tables)
    assert len(planned.passes) == 2 and "cat" not in planned.calls, planned.calls
    if rotation is as_complex and dtype is torch.float32:  # torch rounds once where a product and a sum are one
        torch.testing.assert_close(planned.got, planned.wanted, rtol=2e-6, atol=2e-6)
    else:
        assert planned.equal()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("forward", "weight", "passes", "left"),
    [
        (modulated, (3 * C, C), 2, ["linear", "silu"]),
        (table_in_fp32, (2, C), 1, ["__add__", "float"]),
        (swiglu, (C, C), 1, ["linear"]),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_norms_gates_and_tables(forward, weight, passes, left, dtype):
    given = [rand(B, S, C, dtype=dtype)] + ([rand(B, C, seed=1, dtype=dtype)] if forward is not swiglu else [])
    planned = Planned(Formula(forward, w=rand(*weight, seed=2, dtype=dtype) / 4), *given)
    assert len(planned.passes) == passes and set(planned.calls) <= {*left, "add"}, planned.calls
    assert planned.equal()


def test_a_stream_put_together_and_taken_apart_is_never_written():
    def forward(x, y, w):
        both = torch.cat([y, x], dim=1)
        both = both + F.linear(F.layer_norm(both, (C,)) * 2, w)
        return both[:, :T], both[:, T:]

    planned = Planned(Formula(forward, w=rand(C, C)), rand(B, S, C), rand(B, T, C, seed=1))
    assert planned.calls == ["linear"] and len(planned.passes) == 4 and planned.equal()


def test_what_a_product_gives_is_activated_into_the_place_where_it_is_put_together():
    def forward(x, w):
        return F.linear(torch.cat([x, F.gelu(F.linear(x, w), approximate="tanh")], dim=2), torch.cat([w, w], 1))

    planned = Planned(Formula(forward, w=rand(C, C)), rand(B, S, C))
    products = [unit for unit in planned.schedule.units if isinstance(unit, GeluProduct)]
    assert [one.output.window for one in products] == [Window(-1, C, C)] and planned.equal()


def test_operands_come_in_either_order():
    def forward(x, y):
        h = torch.rsub(x, y) * torch.sub(2.0, x) + torch.div(2.0, y.square() + 1)
        return F.gelu(h) * (2.0 - y) + 2.0 / (x.square() + 1)

    planned = Planned(Formula(forward), rand(B, S, C), rand(B, S, C, seed=2))
    assert len(planned.passes) == 1 and planned.calls == [] and planned.equal()


def test_a_residual_taken_twice_is_written_once():
    def forward(x, w):
        x = x + F.linear(x, w) * 0.5
        return x * 2 + F.linear(F.layer_norm(x, (C,)) + 1, w)

    planned = Planned(Formula(forward, w=rand(C, C)), rand(B, S, C))
    assert sorted(len(one.outputs) for one in planned.passes) == [1, 2] and planned.equal()


def test_only_what_is_returned_is_computed():
    def forward(x, w):
        F.linear(x * 3 + 1, w)
        return F.linear(x * 2 + 1, w)

    planned = Planned(Formula(forward, w=rand(C, C)), rand(B, S, C))
    assert len(planned.passes) == 1 and len(planned.schedule.units) == 2 and planned.equal()


def test_rows_of_odd_width_strided_and_broadcast():
    def forward(x, y):
        x = x.transpose(0, 1)
        return (x * y[:, None] + y[:, None].sigmoid()).float() - x.mean(-1, keepdim=True)

    planned = Planned(Formula(forward), rand(5, 7, 13, dtype=torch.bfloat16), rand(7, 13, dtype=torch.bfloat16))
    assert len(planned.passes) == 1 and planned.equal()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [True, False])
def test_rows_that_are_rotated_in_place_are_put_together(last, dtype):
    """Some rows of normed queries are turned, and assigned where they were."""

    def forward(x, cos, sin, w):
        query = F.layer_norm(x.transpose(1, 2), (D,), w)
        window = slice(T, None) if last else slice(None, S - T)
        query[:, :, window] = halves(query[:, :, window], cos, sin)
        return F.scaled_dot_product_attention(query, query, query)

    tables = [rand(1, 1, S - T, D, seed=seed) for seed in (2, 3)]
    planned = Planned(Formula(forward, w=rand(D, seed=4, dtype=dtype)), rand(B, S, H, D, dtype=dtype), *tables)
    assert planned.calls == ["scaled_dot_product_attention"] and len(planned.passes) == 3 and planned.equal()


def looked_at_through_a_view(x):
    y = x * 2
    z = y[:, 1:]
    y[:, 1:] = z * 3 + 1
    return y * z.sum()


def assigned_twice(x):
    y = x * 2
    y[:, 1:] = y[:, 1:] * 3 + 1
    y[:, :1] = y[:, :1] * 5 + 1
    return y + 1


def writes_into_memory(x):
    y = x * 2
    z = y.view(-1)
    y += 1
    z.mul_(3)
    return (y + 1) * z.view_as(y)


def takes_other_numbers(x):
    return (x * torch.arange(x.shape[1])[:, None] + 1) * x.double().float()


def other_halves(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a.sin() * 2, b.cos() * 2), dim=-1) + torch.cat((b, a), dim=-1)


@pytest.mark.parametrize(
    "forward",
    [writes_into_memory, takes_other_numbers, other_halves, looked_at_through_a_view, assigned_twice],
    ids=lambda f: f.__name__,
)
def test_what_no_pass_can_do_runs_as_it_was_recorded(forward):
    planned = Planned(Formula(forward), rand(3, 4, 16))
    assert planned.equal()


def test_a_pass_runs_in_the_kernel():
    from accel_kernels import rowwise

    module = Formula(modulated, w=rand(3 * C, C) / 4)
    planned = Planned(module, rand(B, S, C), rand(B, C, seed=1), kernel=rowwise.triton)
    torch.testing.assert_close(planned.got, planned.wanted, rtol=2e-6, atol=2e-6)
