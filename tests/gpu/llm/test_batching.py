"""Continuous batching on a GPU: each request as it is alone, steps from graphs, nothing that grows."""

import copy
import gc

import pytest
import torch

import accel
from accel.llm.family import BATCH_EAGER_CALLS
from support.llm.batching.engines import alone, prompts_of
from support.llm.batching.gpu_calls import as_alone, batch, batched, config_of
from support.llm.batching.managers import collect
from support.llm.families import FAMILIES
from support.llm.gpu import new_pair

CORE = [family.name for family in FAMILIES if family.core and family.expected == "fast"]
WAITS = ("bloom",)  # stock makes its slopes on the CPU in every forward, which no graph can
LENGTHS = (1, 5, 64, 17, 100, 40, 63, 65, 3, 90)

pytestmark = pytest.mark.usefixtures("exact")


# Layers with two attentions are not batched, by stock neither.
@pytest.mark.parametrize("name", [name for name in CORE if name != "falcon-h1"])
def test_each_request_gets_what_it_gets_alone(name):
    ours, stock = new_pair(name)
    prompts = prompts_of([min(length, 40) for length in LENGTHS], stock.config.get_text_config().vocab_size)
    as_alone(ours, stock, prompts, 12)
    assert accel.report(ours).fallbacks == [] and (batched(ours) or name in WAITS), accel.report(ours)


@pytest.mark.parametrize("name", ["llama", "qwen3.5", "bamba"])
def test_steps_come_from_graphs_and_pools_from_anywhere(name):
    """A pool is freed with its manager; the graphs of one call serve the next."""
    ours, stock = new_pair(name, max_position_embeddings=2048)
    prompts = prompts_of(LENGTHS, 99)
    for new in (30, 20, 40, *BATCH_EAGER_CALLS * [30]):  # until no size of the next call is seen too seldom for a graph
        assert batch(ours, prompts, new) == [alone(stock, prompt, new) for prompt in prompts]
    captured = len(batched(ours))
    keep = [torch.empty(2**20, device="cuda") for _ in range(5)]  # where the pool was
    assert batch(ours, prompts, 30) == [alone(stock, prompt, 30) for prompt in prompts]
    assert len(batched(ours)) == captured and keep


@pytest.mark.parametrize("rows", [1, 65, 200])
def test_many_requests(rows):
    ours, stock = new_pair("llama")
    prompts = prompts_of([3 + number % 30 for number in range(rows)], 99, 7)
    found = batch(ours, prompts, 10)
    places = range(0, rows, max(1, rows // 9))
    assert [found[place] for place in places] == [alone(stock, prompts[place], 10) for place in places]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-neox", "glm", "qwen3-moe", "qwen3.5", "bamba", "deepseek-v2"])
def test_in_half_precision_every_token_is_the_best_but_for_rounding(name, dtype):
    """To float32, but for twice what stock's logits in 16 bits are off."""
    ours, stock = new_pair(name, dtype)
    truth = copy.deepcopy(stock).float()
    prompts = prompts_of([min(length, 40) for length in LENGTHS], stock.config.get_text_config().vocab_size)
    for _ in range(2):
        off, short = 0.0, 0.0
        for one, answer in zip(prompts, batch(ours, prompts, 12), strict=True):
            ids = torch.tensor([one + answer], device="cuda")
            logits = truth(ids).logits[0, len(one) - 1 : -1]
            off = max(off, float((stock(ids).logits[0, len(one) - 1 : -1] - logits).abs().max()))
            short = max(short, float((logits.amax(-1) - logits.gather(1, ids[0, len(one) :, None])[:, 0]).max()))
        assert short <= 2 * off


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rounded_keys_and_values(kind):
    ours, _ = new_pair("llama")
    accel.restore(ours)
    accel.optimize(ours, kv_cache=kind, graphs=True)
    prompts = prompts_of(LENGTHS, 99)
    as_alone(ours, ours, prompts, 9, times=2)


def test_a_draw_does_not_depend_on_its_company():
    ours, _ = new_pair("llama")
    prompts = prompts_of((20, 9, 31), 99)
    given = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95}

    def drawn(company):
        torch.manual_seed(5)
        return batch(ours, [prompts[0], *company], 16, **given)[0]

    first = drawn([])
    assert drawn(prompts[1:]) == first


def test_nothing_grows():
    ours, _ = new_pair("llama")
    prompts = prompts_of(LENGTHS, 99)
    for _ in range(BATCH_EAGER_CALLS + 2):  # until sizes that come once a batch have their graphs
        batch(ours, prompts, 8)
    held = []
    for _ in range(20):
        batch(ours, prompts, 8)
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] <= held[0]


def test_training_goes_on_beside_it():
    """Another stream's work, and another thread's, on the same device while requests run."""
    ours, stock = new_pair("llama")
    prompts = prompts_of(LENGTHS, 99)
    wanted = [alone(stock, prompt, 20) for prompt in prompts]
    with ours.continuous_batching_context_manager(generation_config=config_of(20)) as manager:
        ids = manager.add_requests(prompts, max_new_tokens=20)
        for _ in range(5):
            assert alone(ours, prompts[3], 20) == wanted[3]
        found = collect(manager, len(ids), timeout=30)
    assert [(found[one].error, found[one].generated_tokens) for one in ids] == [(None, tokens) for tokens in wanted]
