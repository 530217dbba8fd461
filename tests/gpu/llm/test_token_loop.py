"""The loop that runs ahead of its tokens, on a GPU: by replays, token for token stock's, random numbers included."""

import copy

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import accel
from accel.cuda_graphs.runner import GraphRunner
from accel.llm.generation.loop import choice, handover
from accel.llm.generation.loop.token_loop import TokenLoop
from accel.llm.kv_cache.pending_step import PendingStep
from support.llm.calls import Kept, counting, followed_by_numbers, gone_on
from support.llm.families import make, prompt
from support.llm.gpu import EDITS, memory_stays_flat, on_a_stream, side_by_side
from support.llm.outputs import same

EXACT = 4e-5
NEW = 20  # tokens of a call


pytestmark = pytest.mark.usefixtures("exact")


@pytest.fixture
def ran(monkeypatch):
    """[loops, replays without a look at the model]."""
    return counting(monkeypatch, (TokenLoop, "run", False), (GraphRunner, "begin", True))


def new_pair(name: str = "llama", **options):
    stock = make(name).to("cuda")
    return accel.optimize(copy.deepcopy(stock), graphs=True, **options), stock


CALLS = {
    "greedy": {},
    "one row": {"lengths": (6,)},
    "drawn": {"do_sample": True},
    "drawn, one row": {"do_sample": True, "lengths": (6,)},
    "rows that end": {"do_sample": True, "lengths": (7, 4, 5, 6), "eos_token_id": [5, 9, 11, 30]},
    "one row that ends": {"lengths": (6,), "eos_token_id": list(range(3, 20)), "do_sample": True},
    "all": {"do_sample": True, "temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    "min_new_tokens": {"eos_token_id": list(range(3, 70)), "min_new_tokens": 20, "do_sample": True},
    "a cache to keep": {"return_dict_in_generate": True},
    "time": {"max_time": 1e6},
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma2", "mixtral"])
def test_token_for_token_by_replays(name, ran):
    ours, stock = new_pair(name)
    for label, call in CALLS.items():
        for _ in range(2):  # until there is a graph
            followed_by_numbers(ours, **call)
        ran[:] = 0, 0
        wanted = followed_by_numbers(stock, **call)
        same(followed_by_numbers(ours, **call), wanted, EXACT)
        new = wanted["sequences"].shape[1] - max(call.get("lengths", (7,)))
        assert ran[0] == (new > 1), label
        assert ran[1] >= (new - 2) * 15 // 16 - 1, (label, ran, new)


@pytest.mark.parametrize("kv_cache", ["int8", "fp8"])
def test_keys_and_values_in_eight_bits(kv_cache, ran, monkeypatch):
    """The same with the loop as without."""
    model, _ = new_pair(kv_cache=kv_cache)
    for _ in range(2):
        followed_by_numbers(model)
    looped = followed_by_numbers(model, do_sample=True)
    assert ran[0] == 3 and ran[1]
    monkeypatch.setattr(handover, "DEVICES", ())
    same(followed_by_numbers(model, do_sample=True), looped, EXACT)


def test_torch_draws_so():
    assert choice.draws_as_torch(torch.device("cuda", 0))


class Streamer:
    """Keeps what it is given, and acts at the seventh call."""

    def __init__(self, model, act):
        self.model, self.act, self.given = model, act, []

    def put(self, value):
        assert value.device.type == "cpu" and not value.is_pinned()
        self.given.append(value.reshape(-1).clone())
        if len(self.given) == 7 and self.act is not None:
            self.act(self.model)

    def end(self):
        self.given.append(torch.tensor([-1]))


class Asks(StoppingCriteria):
    """Does the same as a criterion, which may look at what it is given."""

    def __init__(self, model, act):
        self.model, self.act, self.calls = model, act, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == 6 and self.act is not None:
            self.act(self.model)
        return input_ids[:, -1] % 31 == 0


ACTS = {
    "nothing": None,
    **EDITS,
    "a seed": lambda model: torch.manual_seed(99),
    "random numbers": lambda model: torch.rand(5, device="cuda"),
    "another text": lambda model: model.generate(prompt(1, 5).cuda(), max_new_tokens=6, do_sample=False),
}


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_streamers_and_criteria(act, drawn, ran):
    ours, stock = new_pair()
    for _ in range(2):
        followed_by_numbers(ours, do_sample=drawn)
    ran[:] = 0, 0
    found = []
    for model in (ours, stock):
        streamer = Streamer(model, ACTS[act])
        given = followed_by_numbers(model, streamer=streamer, do_sample=drawn)
        found.append(given | {"streamed": torch.cat(streamer.given)})
    same(*found, EXACT)
    assert ran[0] >= 1 and (ran[1] >= NEW - 6 or act != "nothing"), ran
    ours, stock = new_pair()
    found = [
        followed_by_numbers(model, stopping_criteria=StoppingCriteriaList([Asks(model, ACTS[act])]), do_sample=drawn)
        for model in (ours, stock)
    ]
    same(*found, EXACT)


def test_not_a_number():
    """As torch refuses it on a CPU. Stock's own draw ends in an assertion on the GPU, which then does nothing more."""
    ours, stock = new_pair()
    for _ in range(2):
        followed_by_numbers(ours, (6,), do_sample=True)
    streamers = Streamer(ours, lambda model: model.get_output_embeddings().weight.fill_(float("nan"))), Kept()
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        followed_by_numbers(ours, (6,), do_sample=True, streamer=streamers[0])
    followed_by_numbers(stock, (6,), do_sample=True, streamer=streamers[1])
    assert len(streamers[0].given) == 7
    same(*({"streamed": torch.cat(one.given[:7])} for one in streamers))


def test_going_on_with_the_cache(ran):
    ours, stock = new_pair()
    for _ in range(2):
        followed_by_numbers(ours, (6,))
    found = []
    for model in (ours, stock):
        kept, cache = gone_on(model, 16)
        found.append(kept | {"keys": torch.stack([layer.keys for layer in cache.layers])})
    same(*found, EXACT)
    assert ran[1] > 10


@pytest.fixture(params=["the loop ahead", "stock's loop"])
def steps(request, monkeypatch):
    """[loops or steps begun, replays or steps taken], by either way to run ahead."""
    if request.param == "the loop ahead":
        return counting(monkeypatch, (TokenLoop, "run", False), (GraphRunner, "begin", True))
    monkeypatch.setattr(handover, "DEVICES", ())
    return counting(monkeypatch, (PendingStep, "__init__", False), (PendingStep, "take", True))


def warm(model, *lengths):
    """Until there are graphs."""
    for each in lengths:
        for _ in range(2):
            followed_by_numbers(model, each)


def test_on_a_stream_of_the_users_own(steps):
    ours, stock = new_pair()
    warm(ours, (7, 4))
    wanted = followed_by_numbers(stock, do_sample=True)
    steps[:] = 0, 0
    same(on_a_stream(lambda: followed_by_numbers(ours, do_sample=True)), wanted, EXACT)
    assert steps[0] and steps[1] >= NEW - 6


def test_threads_side_by_side(steps):
    ours, stock = new_pair()
    lengths = ((9,), (4,), (9, 5), (7, 7, 2))
    warm(ours, *lengths)
    wanted = [followed_by_numbers(stock, each)["sequences"] for each in lengths]
    steps[:] = 0, 0
    found = side_by_side(lambda each: followed_by_numbers(ours, each)["sequences"], lengths)
    assert all(torch.equal(each, one) for got, one in zip(found, wanted, strict=True) for each in got)
    assert steps[0] >= 20 and steps[1] > 180


def test_memory_stays_flat(steps):
    ours, _ = new_pair()
    warm(ours, (6,))
    memory_stays_flat(ours, 40)


def test_nothing_waits_for_the_gpu(monkeypatch):
    """Beyond the wait for a token that was launched a step before: no other call may synchronize.

    With few tokens that end a text: torch.isin sorts, and waits, where they are more than ten.
    """
    ours, _ = new_pair()
    ends = {"eos_token_id": [5, 9]}
    calls = [CALLS["greedy"], ends, CALLS["all"] | ends, {"lengths": (6,), "min_new_tokens": 9, **ends}]
    for call in calls:
        for _ in range(2):
            followed_by_numbers(ours, **call)
    waits, run = [], TokenLoop._next

    def watched(self, token):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(self, token)
        except RuntimeError as error:
            waits.append(error)
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(TokenLoop, "_next", watched)
    for call in calls:
        followed_by_numbers(ours, **call)
    assert not waits, waits
