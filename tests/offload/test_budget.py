"""`memory=`: what a budget may be, which blocks stream within it, and what a plan tells of that."""

import copy
import math
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from accel_kernels.device import Card, replayed
from transformers import ContinuousBatchingConfig

import accel
from accel.bench.diffusion.streaming import on_paper
from accel.bench.memory import peak_on_paper
from accel.diffusion.linears import projected_together
from accel.errors import Refused
from accel.llm.batching.limits import limits_of, sets_of
from accel.llm.kv_cache.paged_kv_cache import block_bytes
from accel.offload.blocks import nbytes, sizes_of, streaming_blocks
from accel.offload.budget import Budget, WeightSizes, predicted_seconds, streamed_blocks
from accel.offload.call_hooks import StreamedCall, streamed_model, whole_runs
from accel.offload.memory import HostBuffer
from accel.offload.placed_model import PlacedModel
from accel.offload.ring import Ring, Staging, repeated
from accel.offload.streamed_model import StreamedModel
from accel.options import Options, bytes_of
from accel.planning.memory import budget_of
from support.llm.families import make
from support.objects.emulated_card import THERE
from support.objects.streaming import dit, flux, rwkv, same, stored, unet, within

pytestmark = pytest.mark.usefixtures("streaming")


def test_sizes():
    assert bytes_of("memory", "12GB") == 12 * 10**9 and bytes_of("memory", "1.5 GiB") == 3 * 2**29
    assert bytes_of("memory", 0.5, 100) == bytes_of("memory", "50%", 100) == 50 and bytes_of("memory", 4096) == 4096
    assert bytes_of("memory", 12e9) == bytes_of("memory", "12000mb") == 12 * 10**9 == bytes_of("memory", 1.2e10 + 0.5)
    with replayed(Card("small", (9, 0), 1, 1, memory=100)):
        assert budget_of(Options(memory="12GB"), torch.device("cuda")).card == 100  # which is all there is
    model, _ = flux(1)
    for value in ("12", "much", "-1GB", "0GB", "0%", "101%", 0, -5, 1, 1.5, 0.0, math.inf, math.nan, True, [], "12GBs"):
        with pytest.raises(ValueError, match="memory=.*: give a size such as '12GB'"):
            accel.optimize(model, memory=value)
    with pytest.raises(ValueError, match="host_memory='1GB': give memory too"):
        accel.optimize(model, host_memory="1GB")
    before = stored(model)
    with pytest.raises(Refused, match="needs .* GB for the weights that are on the GPU at once"):
        accel.optimize(model, memory=sizes_of(model).least() - 1)
    same(model, before)
    assert not any(one._forward_pre_hooks or "forward" in vars(one) for one in model.modules())


@torch.no_grad()
def test_what_code_around_blocks_reads_is_refused_at_the_first_call_where_it_does_not_fit():
    model, call = dit()
    before, wanted, least = stored(model), call(model), sizes_of(model).least()
    accel.optimize(model, memory=least + 20_000)  # where 37 kB more stay on the card than can be known before
    for _ in range(2):
        with pytest.raises(Refused, match="needs .* GB for the weights that are on the GPU at once"):
            call(model)
    same(accel.restore(model), before)
    assert torch.equal(call(model), wanted)


def test_what_streams_is_pinned_before_what_stays():
    """A buffer is pinned from its first byte, as far as `host_memory` allows."""
    model, _ = flux(1)
    places = sorted(streamed_model(accel.optimize(model, memory=nbytes(model))).pieces, key=lambda one: one.start)
    assert [one.path for one in places] == [*streaming_blocks(model), ""]


@torch.no_grad()
def test_models_that_are_on_the_card_at_once_share_their_budget():
    """As a ControlNet, which no hook takes off before the UNet comes."""
    (model, call), (other, _) = flux(), flux(1)
    least, beside = sizes_of(model).least(), int(1.02 * nbytes(other))
    for card in (least, least + beside + nbytes(model) // 4):
        budget = Budget(card)
        there = PlacedModel(other, THERE, lambda *given: None, budget)
        held = StreamedModel(model, THERE, lambda *given: None, budget, alone=True)
        assert there.enter()
        for _ in range(2):
            with pytest.raises(Refused, match="on the GPU at once") if card == least else nullcontext():
                call(model)
                assert held.streamed and held.on_card + nbytes(other) <= card
        held.let_go()
        there.let_go()


def test_models_of_a_pipeline_share_what_may_be_pinned(monkeypatch):
    monkeypatch.setattr(HostBuffer, "pin", lambda self: setattr(self, "pinned_bytes", self.bytes.nbytes))
    models = [flux(1)[0] for _ in range(2)]
    budget = Budget(10**9, int(1.5 * nbytes(models[0])))
    placed = [PlacedModel(one, THERE, lambda *given: None, budget) for one in models]
    for _ in range(2):
        assert all(one.enter() for one in placed)
        for one in placed:
            one.leave()
    pinned = [one.packed.host.pinned_bytes for one in placed]
    assert 0 == pinned[1] < pinned[0] and placed[1].may_pin() == budget.host - pinned[0]


def test_blocks_are_what_is_called():
    """Of several classes too; what only holds them is none."""
    called = [torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.MultiheadAttention(2, 1)]
    model = torch.nn.ModuleDict({"levels": torch.nn.ModuleList([torch.nn.ModuleList(called)])})
    assert list(streaming_blocks(model)) == ["levels.0.0", "levels.0.1"]
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    tied[1].weight = torch.nn.Parameter(tied[0].weight.data)  # as accelerate leaves them
    assert nbytes(tied) == nbytes(tied[0]) == 16 and nbytes(tied.to("meta")) == 32


def test_as_few_blocks_stream_as_must_and_evenly():
    sizes = WeightSizes(10, (4,) * 12)
    assert streamed_blocks(sizes, 58) == () and streamed_blocks(sizes, 18) == streamed_blocks(sizes, 3) == tuple(
        range(12)
    )
    for room in range(18, 58):
        chosen = streamed_blocks(sizes, room)
        assert sizes.on_card(chosen) <= room
        assert len(chosen) <= 3 or sizes.on_card(chosen) > room - 4
        gaps = [b - a for a, b in pairwise(chosen)]
        assert not gaps or max(gaps) - min(gaps) <= 1
    uneven = WeightSizes(0, tuple(2 ** (i % 6) for i in range(24)))
    moved = [uneven.moved(streamed_blocks(uneven, room)) for room in range(uneven.least(), uneven.total)]
    assert moved == sorted(moved, reverse=True)
    assert predicted_seconds(sizes, (), 100, 4, 10) == 10
    assert predicted_seconds(sizes, tuple(range(12)), 0, 4, 10) == 12


def test_a_slower_bus_copies_again():
    assert [repeated(10, bus) for bus in (1.0, 0.5, 0.4, 0.3)] == [[10], [10] * 2, [10, 10, 5], [10, 10, 10, 3]]
    assert repeated(0, 0.5) == []


@pytest.mark.turns(2)
def test_what_requests_keep_is_of_the_budget_too():
    """All that weights leave, or half of what not all of them need."""
    model = accel.optimize(make("llama", num_hidden_layers=4), memory=10**7)
    forward, held = vars(model)["forward"], streamed_model(model)
    shapes, sets = forward.shapes(), sets_of(forward)
    for room, share in ((450_000, 0.5), (4 * held.sizes.total, 1.0)):
        held.budget = Budget(held.sizes.least() + room)
        fitted = limits_of(forward, ContinuousBatchingConfig()).fitted(shapes, sets)
        left = room // 2 if share < 1 else held.budget.card - held.sizes.total  # beside all weights
        assert left - block_bytes(shapes, sets) < (fitted.blocks + 1) * block_bytes(shapes, sets) <= left


@torch.no_grad()
def test_torch_compile_leaves_a_call_as_it_is():
    model, call = flux(1)
    wanted = call(model)
    StreamedModel(model, torch.device("cpu"), lambda *given: None, Budget(within(model, 0.9)), alone=True)
    assert torch.equal(call(torch.compile(model, backend="eager")), wanted)
    model.compile(backend="eager")
    assert torch.equal(call(model), wanted) and torch.equal(call(copy.deepcopy(model)), wanted)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (3, 0, 0, 4, 1), (2, 4), ()])
def test_any_order_finds_its_bytes(order):
    sources = [torch.full((3 + i % 2,), i, dtype=torch.uint8) for i in range(5)]
    ring = Ring([torch.empty(4, dtype=torch.uint8) for _ in range(2)], sources, set(range(5)), None)
    for _ in range(2):
        for i in order:
            ring.take(i)
            assert torch.equal(ring.buffers[i % 2][: sources[i].nbytes], sources[i])
            ring.leave(i)
        ring.end()


def test_what_is_not_pinned_goes_through_little_that_is(monkeypatch):
    """Of which neither part is overwritten before it has left."""
    source, target, waiting = torch.arange(11, dtype=torch.uint8), torch.zeros(11, dtype=torch.uint8), []
    event = SimpleNamespace(synchronize=lambda: [copy() for copy in waiting[:-1]], record=lambda: None)
    monkeypatch.setattr("accel.offload.ring.STAGED", 4)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    staging = Staging(11)
    copied = torch.Tensor.copy_

    def later(self, other, non_blocking=False):
        return waiting.append(lambda: copied(self, other)) if non_blocking else copied(self, other)

    monkeypatch.setattr(torch.Tensor, "copy_", later)
    staging.copy(target, source)
    for late in waiting[-2:]:
        late()
    assert torch.equal(target, source) and [one.nbytes for one in staging.buffers] == [4, 4]


def test_a_capture_that_is_given_up_leaves_nothing(monkeypatch):
    """What it was to copy was never copied, and CUDA refuses its events outside."""
    module, captures, state = torch.nn.Linear(1, 1), [None, 1, 2, None], SimpleNamespace(capture=None, failed=False)

    def wait(event):
        if state.failed or event.capture != state.capture:
            raise RuntimeError("CUDA error: invalid argument")

    def make():
        made = SimpleNamespace()
        made.record = lambda: setattr(made, "capture", state.capture)
        return made

    stream = SimpleNamespace(device=None, wait_stream=lambda other: None, wait_event=wait)
    monkeypatch.setattr(torch.cuda, "Event", make)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr("accel.offload.ring.card", lambda device: SimpleNamespace(bus=1.0))
    sources = [torch.full((4,), i, dtype=torch.uint8) for i in range(5)]
    ring = Ring([torch.empty(4, dtype=torch.uint8) for _ in range(2)], sources, set(range(5)), stream)
    vars(module)["_call_impl"] = StreamedCall(SimpleNamespace(model=module, end_run=ring.end))

    def forward():
        for i, source in enumerate(sources):
            ring.take(i)
            assert torch.equal(ring.buffers[i % 2], source)
            if i == state.capture:
                state.failed = i == 1
                raise KeyError("of the forward")
            ring.leave(i)

    with whole_runs(module, forward) as run:
        for state.capture in captures:
            state.failed = False
            with nullcontext() if state.capture is None else pytest.raises(KeyError):
                run()
            for buffer in ring.buffers:
                buffer.fill_(255)


@pytest.mark.parametrize("make", [flux, rwkv, unet])
def test_a_plan_foresees_what_stays_on_the_card(make):
    """What a UNet projects for all its blocks at once does; stacks of one matrix are no experts."""
    model, _ = make()
    wanted, paper = sizes_of(accel.optimize(copy.deepcopy(model))), model.to("meta")
    assert sizes_of(paper, projected_together(paper)) == wanted and not wanted.experts


def test_a_plan_counts_what_a_call_makes_beside_the_weights():
    meta = torch.device("meta")
    layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to(meta)
    x, q = torch.empty(8, 64, device=meta), torch.empty(1, 2, 1024, 16, device=meta)
    assert peak_on_paper(lambda: layers(x)) == 2 * 8 * 256 * 4
    assert peak_on_paper(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, value=q)) == q.nbytes
    model, _ = flux()
    known, total = {"bus": 1e9, "rate": 1e12, "memory": 1e12}, sizes_of(model).total
    rows = [on_paper(model.to(meta), 1e6, total // 4, int(share * total), known) for share in (1.5, 1.0, 0.3)]
    assert rows[0]["streamed"] == 0 and 0 < rows[1]["streamed"] <= rows[1]["blocks"] and not rows[2]["fits"]
    assert rows[1]["on_card_gb"] + 1.15 * total / 4e9 <= total / 1e9 and rows[0]["moved_gb"] == 0 < rows[1]["seconds"]
