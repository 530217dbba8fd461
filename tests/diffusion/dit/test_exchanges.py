"""Exchanges with the copies around them: where each number is read and written, and which steps become one."""

import math
from types import SimpleNamespace

import pytest
import torch
from accel_kernels.collective.exchange import room_for
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.diffusion.dit.lowering import Pass
from accel.diffusion.dit.program import Program, Ref, TensorValue, TorchStep
from accel.diffusion.dit.ranks.collectives import Collective
from accel.diffusion.dit.ranks.exchanges import Exchange, with_exchanges
from accel.diffusion.dit.ranks.pieces import sent_pieces
from accel.diffusion.dit.ranks.receive_buffers import BufferSlots
from accel.diffusion.dit.schedule import Schedule
from accel.diffusion.dit.units import StackedProduct, TorchCall


def ranks_of(shape, strides, seed=0):
    """What each rank sends: of this shape, lying as it may in a larger tensor."""
    generator = torch.Generator().manual_seed(seed)
    size = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return [torch.randn(size, generator=generator).as_strided(shape, strides) for _ in range(shape[0])]


def wanted(sent, rank, see):
    """What a library gives: what has come, looked at and copied."""
    return see(torch.cat([one[rank].flatten() for one in sent])).contiguous()


def got(sent, rank, pieces):
    layout = pieces.layout(sent[0].stride())
    found = torch.full(pieces.target, float("nan"))
    for peer, one in enumerate(sent):
        begin = one.storage_offset() + rank * layout.source_rank
        source = one.as_strided(layout.sizes, layout.source, begin)
        found.as_strided(layout.sizes, layout.target, peer * layout.target_rank).copy_(source)
    return found


def heads_first(batch, tokens, heads, dim, ranks):
    """(shape, strides of what is sent, how what has come is seen), as diffusers sends queries."""
    shape = (ranks, tokens, batch, heads, dim)
    wide = ranks * heads * dim
    return (
        shape,
        (heads * dim, wide, tokens * wide, dim, 1),
        lambda x: x.view(ranks * tokens, batch, heads, dim).permute(1, 0, 2, 3),
    )


def tokens_first(batch, tokens, heads, dim, ranks):
    """As it sends what attention gives."""
    shape = (ranks, heads, batch, tokens, dim)
    row = heads * dim
    strides = (tokens * row, dim, ranks * tokens * row, row, 1)
    return shape, strides, lambda x: x.view(ranks * heads, batch, tokens, dim).permute(1, 2, 0, 3)


def made(way, *sizes):
    """What `way` gives, and the pieces of the exchange."""
    shape, strides, see = way(*sizes)
    view = see(torch.arange(math.prod(shape)))
    return shape, strides, see, sent_pieces(shape, tuple(view.shape), view.stride())


@pytest.mark.parametrize("way", [heads_first, tokens_first])
@settings(max_examples=25, deadline=None)
@given(*(st.integers(1, most) for most in (3, 7, 4, 9)), st.integers(2, 4))
def test_each_number_comes_where_the_copies_would_put_it(way, batch, tokens, heads, dim, ranks):
    shape, strides, see, pieces = made(way, batch, tokens, heads, dim, ranks)
    sent = ranks_of(shape, strides)
    assert pieces is not None
    for rank in range(ranks):
        assert torch.equal(got(sent, rank, pieces), wanted(sent, rank, see))


def test_few_dimensions_are_left():
    for way in (heads_first, tokens_first):
        _, strides, _, pieces = made(way, 1, 7, 3, 8, 2)
        assert pieces.layout(strides).sizes == (7, 24)


@pytest.mark.parametrize(
    ("view", "strides"),
    [
        ((12,), (2,)),  # leaves out
        ((2, 24), (0, 1)),  # twice
        ((8, 3), (3, 1)),  # of a half
        ((16, 3), (1, 16)),  # three pieces for two ranks
        ((3, 16), (16, 1)),  # the pieces are cut elsewhere
    ],
)
def test_views_that_are_left_to_copies(view, strides):
    assert sent_pieces((2, 24), view, strides) is None


class Sketch:
    """A program in the making."""

    def __init__(self):
        self.values, self.steps = [], []

    def value(self, shape, strides=None, base=None):
        strides = torch.empty(shape, device="meta").stride() if strides is None else strides
        number = len(self.values)
        base = number if base is None else base
        self.values.append(TensorValue(number, shape, strides, 0, torch.float32, torch.device("cpu"), base))
        return number

    def step(self, name, taken, made, *more, function=None):
        self.steps.append(TorchStep(function or getattr(torch, name, len), name, (Ref(taken), *more), {}, Ref(made)))
        return made

    def exchanged(self, x, copied=True):
        """Of a value (ranks, tokens, heads, dim); what comes, (tokens, heads, dim) with the ranks' heads in order."""
        shape = self.values[x].shape
        ranks, total = shape[0], math.prod(shape)
        sent = self.step("contiguous", x, self.value(shape))
        flat = self.step("flatten", sent, self.value((total,), base=sent))
        even = [total // ranks] * ranks
        collective = Collective(torch.ops._c10d_functional.all_to_all_single)
        came = self.step("all_to_all_single", flat, self.value((total,)), even, even, "0", function=collective)
        seen = self.step("reshape", came, self.value(shape, base=came))
        if not copied:
            return seen
        order = (1, 0, 2, 3)
        steps = self.values[seen].stride
        turned = self.value(tuple(shape[d] for d in order), tuple(steps[d] for d in order), base=came)
        self.step("permute", seen, turned)
        return self.step("contiguous", turned, self.value(self.values[turned].shape))

    def program(self, *results):
        return Program(self.values, self.steps, [Ref(one) for one in results])


def exchanges(program):
    return [step for step in program.steps if isinstance(step.function, Exchange)]


SHAPE = (2, 5, 3, 8)


def start(count=1):
    sketch = Sketch()
    taken = [sketch.value(SHAPE) for _ in range(count)]
    for number, value in enumerate(taken):
        sketch.values[value].root = ("input", number)
    return sketch, taken


def test_exchanges_that_do_not_wait_for_each_other_are_one_step():
    sketch, inputs = start(3)
    came = [sketch.exchanged(one) for one in inputs]
    out = [sketch.step("neg", one, sketch.value(sketch.values[one].shape)) for one in came]
    program = with_exchanges(sketch.program(*out))
    (step,) = exchanges(program)
    assert step.taken == inputs and step.made == came
    assert [one.name for one in program.steps] == ["exchange", "neg", "neg", "neg"], "copies are part of it"
    assert step.function.pieces.target != SHAPE


def test_one_whose_source_waits_for_another_is_a_step_of_its_own():
    sketch, (x,) = start()
    came = sketch.exchanged(x, copied=False)
    turned = sketch.step("neg", came, sketch.value(SHAPE))
    last = sketch.exchanged(turned)
    program = with_exchanges(sketch.program(sketch.step("neg", last, sketch.value((5, 2, 3, 8)))))
    assert [one.name for one in program.steps] == ["exchange", "reshape", "neg", "exchange", "neg"]


def test_what_is_returned_does_not_lie_in_a_receive_buffer():
    sketch, (x,) = start()
    seen = sketch.exchanged(x, copied=False)
    assert not exchanges(with_exchanges(sketch.program(seen)))
    sketch, (x,) = start()
    copied = sketch.exchanged(x)
    program = with_exchanges(sketch.program(copied))
    (step,) = exchanges(program)
    assert step.made != [copied] and program.steps[-1].made == [copied], "its copy stays one"


def test_sent_pieces_unequal_sizes_and_memory_that_is_written_to_stay_as_they_are():
    sketch, (x,) = start()
    sketch.step("neg", came := sketch.exchanged(x), out := sketch.value(sketch.values[came].shape))
    place = next(i for i, one in enumerate(sketch.steps) if one.name == "all_to_all_single")
    given, _, even, group = sketch.steps[place].args
    sketch.steps[place].args = (given, [even[0] - 1, even[1] + 1], even, group)
    assert not exchanges(with_exchanges(sketch.program(out)))
    sketch.steps[place].args = (given, even, even, group)
    assert exchanges(with_exchanges(sketch.program(out)))
    sketch.values[sketch.steps[place].made[0]].pinned = True
    assert not exchanges(with_exchanges(sketch.program(out)))


def test_products_whose_columns_are_sent_are_one():
    """The exchange reads rows that lie apart; the library's copies too, so they are one there as well."""
    sketch = Sketch()
    x = sketch.value((1, 5, 16))
    sketch.values[x].root = ("input", 0)
    sent = []
    for name in "qkv":
        weight = sketch.value((48, 16))
        sketch.values[weight].root = ("weight", name)
        made = sketch.value((1, 5, 48))
        sketch.steps.append(TorchStep(torch.nn.functional.linear, "linear", (Ref(x), Ref(weight)), {}, Ref(made)))
        heads = sketch.step("reshape", made, sketch.value((1, 5, 2, 3, 8), base=made))
        turned = sketch.value((2, 5, 1, 3, 8), (24, 48, 240, 8, 1), base=made)
        sent.append(sketch.step("permute", heads, turned))
    came = [sketch.exchanged(one, copied=False) for one in sent]
    out = [sketch.step("relu", one, sketch.value((2, 5, 1, 3, 8))) for one in came]
    program = with_exchanges(sketch.program(*out))
    (step,) = exchanges(program)
    assert step.taken == sent
    products = [one for one in Schedule(program).units if isinstance(one, StackedProduct)]
    assert [len(one.steps) for one in products] == [3]


def test_what_is_put_together_to_be_sent_is_written_by_passes():
    sketch = Sketch()
    parts = [sketch.value((2, tokens, 3, 8)) for tokens in (1, 4)]
    for number, value in enumerate(parts):
        sketch.values[value].root = ("input", number)
    both = sketch.value(SHAPE)
    sketch.steps.append(TorchStep(torch.cat, "cat", (list(map(Ref, parts)), 1), {}, Ref(both)))
    came = sketch.exchanged(both, copied=False)
    program = sketch.program(sketch.step("neg", came, sketch.value(SHAPE)))
    units = Schedule(with_exchanges(program)).units
    written = [one.outputs[0] for one in units if isinstance(one, Pass) and one.takes <= set(parts)]
    assert [(one.number, one.window.start, one.window.size) for one in written] == [(both, 0, 1), (both, 1, 4)]
    assert "cat" not in [one.step.name for one in units if isinstance(one, TorchCall)]
    seen = Schedule(program).units  # by the library it stays one
    assert "cat" in [one.step.name for one in seen if isinstance(one, TorchCall)]


def test_a_place_is_taken_again_once_nothing_reads_it_after_the_exchange_before():
    """The first two are read before the second exchange, which is read before the fourth; the third is read last."""
    sketch, inputs = start(2)
    first = [sketch.exchanged(one, copied=False) for one in inputs]
    attended = sketch.value(SHAPE)
    sketch.steps.append(TorchStep(torch.add, "add", tuple(map(Ref, first)), {}, Ref(attended)))
    second = sketch.exchanged(attended, copied=False)
    third = sketch.exchanged(sketch.step("neg", second, sketch.value(SHAPE)), copied=False)
    fourth = sketch.exchanged(sketch.step("neg", third, sketch.value(SHAPE)), copied=False)
    both = sketch.value(SHAPE)
    sketch.steps.append(TorchStep(torch.add, "add", (Ref(third), Ref(fourth)), {}, Ref(both)))
    program = with_exchanges(sketch.program(both))
    units = [TorchCall(step, place) for place, step in enumerate(program.steps)]
    places = BufferSlots.of(units, program.values)
    one = room_for(1, math.prod(SHAPE), 4)
    assert list(places.found.values()) == [(0, True), (2 * one, False), (0, False), (one, False)]
    assert places.sizes == {"0": 3 * one} and len(places.forms) == 4


def test_without_a_receive_buffer_it_goes_through_the_library(monkeypatch):
    """Of two ranks, of which the other sends what this one does."""
    shape, strides, see, pieces = made(tokens_first, 1, 5, 3, 8, 2)
    x, sent = ranks_of(shape, strides)[0], []

    def all_to_all(flat, out, given, group):
        sent.append((out, given, group))
        return torch.cat([flat.chunk(2)[1]] * 2)  # to rank 1

    monkeypatch.setattr(torch.ops, "_c10d_functional", SimpleNamespace(wait_tensor=lambda one: one))
    exchange = Exchange(all_to_all, "7", pieces, [strides])
    (found,) = exchange([x])
    assert torch.equal(found, wanted([x, x], 1, see))
    assert sent == [([120, 120], [120, 120], "7")]


class Buffer:
    """Notes what it is given, and gives what rank 0 of ranks that all send the same gets."""

    def __init__(self):
        self.layouts = []

    def exchange(self, tensors, layouts, place, waits):
        self.layouts.append(layouts)
        found = []
        for x, layout in zip(tensors, layouts, strict=True):
            came = torch.empty(x.numel())
            for peer in range(2):
                source = x.as_strided(layout.sizes, layout.source, x.storage_offset())
                came.as_strided(layout.sizes, layout.target, peer * layout.target_rank).copy_(source)
            found.append(came)
        return found


def test_tensors_that_lie_otherwise_than_recorded_are_one_launch_all_the_same():
    """On this rank two of them do: with rows that lie apart, which is no matter, and with lanes that do."""
    shape, strides, see, pieces = made(heads_first, 1, 5, 3, 8, 2)
    exchange = Exchange(None, "7", pieces, [strides] * 3)
    dense, other, last = (ranks_of(shape, strides, seed)[0] for seed in range(3))
    wide = torch.randn(5, 200)[:, :48].unflatten(1, (2, 3, 8)).permute(1, 0, 2, 3).unsqueeze(2)
    lanes = torch.randn(*shape, 2)[..., 0]
    buffer = Buffer()
    for tensors, same in (((dense, other, last), True), ((dense, wide, last), True), ((dense, wide, lanes), False)):
        for x, got in zip(tensors, exchange(list(tensors), buffer), strict=True):
            assert torch.equal(got, wanted([x, x], 0, see))
        layouts = buffer.layouts.pop()
        assert not buffer.layouts and len(layouts) == 3
        assert (layouts == exchange.layouts) == (tensors[1] is other or not same)


def test_pieces_that_no_launch_can_write_go_through_the_library_on_all_ranks():
    shape, strides, _, pieces = made(heads_first, 1, 5, 3, 8, 2)
    asked = []
    apart = tuple(2 * step for step in strides)
    exchange = Exchange(None, "7", pieces, [strides, apart])
    exchange._by_library = asked.append
    given = [ranks_of(shape, strides)[0] for _ in range(2)]  # here both could be written
    exchange(given, Buffer())
    assert len(asked) == 2
