"""Linears of one input are one product: its columns are read where they lie, its weights found where they are."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.diffusion.dit.products.weight_stacks import CALLS_BETWEEN_MOVES, WeightStacks
from accel.diffusion.dit.units import StackedProduct
from support.compatibility.transformer_pair import FLUX, SD3
from support.diffusion.programs import Formula, Planned

B, S, H, D = 2, 6, 2, 8
C = H * D
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Attention(nn.Module):
    """As a block has it; `names` of its linears take the same input."""

    def __init__(self, names="qkv", bias=True, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        for name in names:
            setattr(self, name, nn.Linear(C, C, bias, dtype=dtype))
        self.requires_grad_(False)

    def forward(self, x):
        q, k, v = (getattr(self, name)(x).unflatten(-1, (H, D)).transpose(1, 2) for name in "qkv")
        q = F.layer_norm(q, (D,)) * 2
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Feeding(Attention):
    """u is taken by a linear, w by a GELU, y by the caller: each stays a product of its own."""

    def forward(self, x):
        mlp = F.gelu(self.w(x), approximate="tanh")
        return super().forward(x) + self.v(self.u(x)) + self.v(mlp), self.y(x)


def stacks(planned):
    return [len(unit.steps) for unit in planned.schedule.units if isinstance(unit, StackedProduct)]


def into(planned):
    """Whether each of the products writes into rows of a larger tensor."""
    return [unit.output is not None for unit in planned.schedule.units if isinstance(unit, StackedProduct)]


def beside(*tensors):
    """Whether the tensors lie one after the other in one storage."""
    ends = [tensors[0].data_ptr(), *(tensor.data_ptr() + tensor.nbytes for tensor in tensors)]
    return ends[1:-1] == [tensor.data_ptr() for tensor in tensors[1:]]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_keys_and_values_are_one_product(dtype, bias, monkeypatch):
    products = []
    monkeypatch.setattr("support.diffusion.programs.torch_linear", lambda *args: products.append(1) or F.linear(*args))
    module = Attention(bias=bias, dtype=dtype)
    planned = Planned(module, rand(B, S, C, dtype=dtype))
    assert stacks(planned) == [3] and len(products) == 1 and planned.equal()
    assert beside(module.q.weight, module.k.weight, module.v.weight)


def test_what_something_else_takes_stays_by_itself():
    planned = Planned(Feeding("qkvuwy"), rand(B, S, C))
    assert stacks(planned) == [3] and planned.equal()


class Joint(nn.Module):
    """Of an image and a text. how: of what each gives, the queries, keys and values that are put together."""

    def __init__(self, how, dtype=torch.float32, bias=True, first="text"):
        super().__init__()
        self.image, self.text = Attention(bias=bias, dtype=dtype), Attention(bias=bias, dtype=dtype)
        self.text.q.weight.mul_(2)
        self.how, self.first = how, first

    def forward(self, x, y):
        given = [self.how(*(getattr(one, name)(x) for name in "qkv")) for one, x in ((self.text, y), (self.image, x))]
        given = given if self.first == "text" else given[::-1]
        return F.scaled_dot_product_attention(*(torch.cat(pieces, dim=2) for pieces in zip(*given, strict=True)))


def in_heads(*tensors):
    return [one.unflatten(-1, (H, D)).transpose(1, 2) for one in tensors]


def normed_in_heads(q, k, v):
    q, k, v = in_heads(q, k, v)
    return F.layer_norm(q, (D,)) * 2, F.layer_norm(k, (D,)) + 1, v


def shuffled(q, k, v):
    q, k, v = in_heads(q, k, v)
    return k, q, v


def by_columns(q, k, v):
    return [one.view(len(one), H, -1, D) for one in (q, k, v)]


@pytest.mark.parametrize("first", ["text", "image"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("how", "batch", "joined"),
    [
        (in_heads, 1, True),
        (in_heads, 2, True),
        (shuffled, 2, True),
        (normed_in_heads, 1, True),
        (normed_in_heads, 2, False),  # queries and keys are put together by the passes that norm them
        (in_heads, 5, False),
        (by_columns, 1, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_two_products_are_put_together_by_them(how, batch, joined, apart, dtype, first):
    module = Joint(how, dtype, first=first)
    if apart:  # in a buffer of the user's, where each weight is multiplied by itself
        torch.nn.utils.vector_to_parameters(torch.cat([p.flatten() for p in module.parameters()]), module.parameters())
    planned = Planned(module, rand(batch, S, C, dtype=dtype), rand(batch, 3, C, seed=1, dtype=dtype))
    assert into(planned) == ([] if how is by_columns else [joined] * 2) and planned.equal()
    if joined:
        assert planned.calls == ["scaled_dot_product_attention"]
        assert len(planned.passes) == (4 if how is normed_in_heads else 0)


def test_columns_of_one_product_put_together_are_no_rows_of_two():
    """And neither are columns at different places, nor one row."""
    ways = [
        lambda q, k, v: in_heads(torch.cat([q, k], 1), torch.cat([k, v], 1), torch.cat([v, q], 1)),
        lambda q, k, v: in_heads(q, q, k) if q.shape[1] == S else in_heads(k, k, q),
    ]
    for how in ways:
        planned = Planned(Joint(how), rand(1, S, C), rand(1, 3, C, seed=1))
        assert into(planned) == [False, False] and planned.equal()
    planned = Planned(Joint(in_heads), rand(1, S, C), rand(1, 1, C, seed=1))
    assert into(planned) == [False, False] and planned.equal()


def columns_as_rows(self, x):
    return F.scaled_dot_product_attention(*[one(x).view(B, C, S) * 2 for one in (self.q, self.k, self.v)])


def written_in_place(self, x):
    return F.scaled_dot_product_attention(*[one(x).add_(1) for one in (self.q, self.k, self.v)])


def ragged(self, x):
    """Three columns each: rows of the second would begin anywhere."""
    return (F.linear(x, self.q.weight[:3]) * F.linear(x, self.k.weight[:3]) + 1).tanh()


@pytest.mark.parametrize("how", [columns_as_rows, written_in_place, ragged], ids=lambda how: how.__name__)
def test_columns_that_nothing_could_read_where_they_lie(how, monkeypatch):
    monkeypatch.setattr(Attention, "forward", how)
    planned = Planned(Attention(), rand(B, S, C))
    assert not stacks(planned) and planned.equal()


def moved_by_data(linear):
    linear.weight.data = 2 * linear.weight.data


def another(linear):
    linear.weight = nn.Parameter(torch.randn(linear.weight.shape))


CHANGES = [lambda q: q.weight.data.mul_(2), lambda q: q.bias.data.add_(1), moved_by_data, another]


def projections(pair):
    attention = pair.block(pair.ours).attn
    return [attention.to_q.weight, attention.to_k.weight, attention.to_v.weight]


@pytest.mark.parametrize("pair", [FLUX, SD3], indirect=True)
def test_weights_are_moved_once_and_every_change_is_seen(pair):
    assert not beside(*projections(pair))
    before = pair.agree()
    assert beside(*projections(pair))
    keys = list(pair.ours.state_dict())
    for change in CHANGES:
        for name in ("to_k", "to_q"):
            pair.change(lambda m, change=change, name=name: change(getattr(pair.block(m).attn, name)))
            after = pair.agree()
            assert not torch.equal(after, before)
            before = after
    assert not beside(*projections(pair))
    for _ in range(CALLS_BETWEEN_MOVES):
        pair.agree()
    assert beside(*projections(pair)) and list(pair.ours.state_dict()) == keys
    pair.change(lambda m: m.load_state_dict({k: 0.9 * v for k, v in m.state_dict().items()}))
    assert not torch.equal(pair.agree(), before) and beside(*projections(pair))
    accel.restore(pair.ours)
    for ours, stock in zip(pair.ours.parameters(), pair.stock.parameters(), strict=True):
        assert torch.equal(ours, stock) and ours.untyped_storage().nbytes() == ours.nbytes


@pytest.mark.parametrize("pair", [FLUX], indirect=True)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_moves_its_own(pair, copied):
    pair.agree()
    before = projections(pair)
    pair.ours = copied(pair.ours)
    pair.agree()
    assert beside(*projections(pair)) and projections(pair)[0].data_ptr() != before[0].data_ptr()
    accel.restore(pair.ours)
    assert not beside(*projections(pair)) and beside(*before)


def test_views_of_a_buffer_of_the_users_stay_there():
    """He writes into it, and all his weights change."""
    module = Attention()
    flat = torch.cat([parameter.flatten() for parameter in module.parameters()])
    torch.nn.utils.vector_to_parameters(flat, module.parameters())
    planned = Planned(module, rand(B, S, C))
    assert stacks(planned) == [3] and planned.equal()
    assert all(one.untyped_storage().data_ptr() == flat.data_ptr() for one in module.parameters())


def test_nothing_is_moved_while_another_thread_is_inside():
    found, (q, k) = WeightStacks(), rand(2, 4, 4, seed=1).clone().unbind()
    q, k = q.clone(), k.clone()
    with found, found:
        assert found.whole(("q", "k"), (q, k)) is None and not beside(q, k)
    with found:
        assert torch.equal(found.whole(("q", "k"), (q, k)), torch.cat([q, k])) and beside(q, k)
    q.data = q.clone()
    ways = [found.whole(("q", "k"), (q, k)) is not None for _ in range(CALLS_BETWEEN_MOVES + 1)]
    assert ways == [False] * CALLS_BETWEEN_MOVES + [True]


def test_inference_tensors_and_tied_weights_are_left_alone():
    with torch.inference_mode():
        one, other = torch.randn(2, 4), torch.randn(2, 4)
    found, tied = WeightStacks(), torch.randn(2, 4)
    assert found.whole(("a", "b"), (one, other)) is None and found.whole(("c", "d"), (tied, tied)) is None
    weight = Formula(lambda x, w: F.linear(x, w) * F.linear(x, w), w=rand(C, C))
    assert Planned(weight, rand(B, S, C)).equal()
