"""generate_batch of models spread over several cards: stock's tokens, graphs of stretches, several groups at once."""

import gc
import time
from functools import partial

import pytest
import torch

import accel
from accel.llm.batching.engine import Engine
from accel.llm.batching.limits import Limits
from accel.llm.pipeline.stretch import StretchGraphs
from support.kernels.waiting import waits_noted
from support.llm.batching.engines import alone, finished, prompts_of, request
from support.llm.batching.gpu_calls import as_alone, batch, batched, config_of
from support.llm.batching.managers import collect
from support.llm.gpu import CARDS, DEEP, forward_over, new_pair, pair_over

LENGTHS = (1, 5, 64, 17, 100, 40, 63, 65, 3, 90)
FAMILIES = (*DEEP, "gpt2", "gemma3", "gpt-oss")
SLEEP = 8_000_000  # clock cycles of a card, some milliseconds

pytestmark = [
    pytest.mark.usefixtures("exact"),
    pytest.mark.skipif(not CARDS, reason="needs two cards"),
]


def everywhere() -> None:
    for card in range(torch.cuda.device_count()):
        torch.cuda.synchronize(card)


def engine_over(model, **limits) -> Engine:
    given = {"rows": 8, "tokens": 64, "context": 512, "blocks": 128} | limits
    return Engine(forward_over(model), Limits(**given), vars(model)["init_continuous_batching"].runner)


def going(model, engine: Engine, count: int = 8) -> None:
    """Requests that go on for long, until all kernels are chosen and all steps replayed."""
    assert vars(model)["init_continuous_batching"].refused() is None
    for number, prompt in enumerate(prompts_of((20,) * count, 99)):
        engine.add(request(str(number), prompt, 450))
    for _ in range(60):
        engine.step()


@pytest.mark.parametrize("cards", CARDS)
@pytest.mark.parametrize("name", (*FAMILIES, "llama-tied"))  # whose head is on the first card
def test_token_for_token(name, cards):
    ours, stock = pair_over(cards, name)
    prompts = prompts_of([min(length, 40) for length in LENGTHS], stock.config.get_text_config().vocab_size)
    as_alone(ours, stock, prompts, 12)
    report = accel.report(ours)
    assert report.fallbacks == [], report
    assert {row["path"] for row in batched(ours)} == {one.path for one in forward_over(ours).stretches}
    assert report.batching


@pytest.mark.parametrize("pages", [6, 40])
def test_pages_change_hands_between_groups(pages):
    """Requests of both groups wait, end, begin alike, and give their pages back while steps of others are under way."""
    ours, stock = pair_over(2)
    prompts = prompts_of((90, 70, 3, 64, 65, 1, 30, 100, 20, 63) * 2, 99)
    prompts[10:] = [prompts[0][:length] + prompt for length, prompt in zip(range(60, 80, 2), prompts[10:], strict=True)]
    prompts = [prompt[:120] for prompt in prompts]
    wanted = [alone(stock, prompt, 25) for prompt in prompts]
    for _ in range(4):
        asked = [request(str(number), prompt, 25) for number, prompt in enumerate(prompts)]
        finished(engine_over(ours, blocks=pages, context=192), asked)
        assert [one.tokens for one in asked] == wanted


def test_draws_and_processors_of_the_host():
    ours, stock = pair_over(2)
    one, _ = new_pair("llama", num_hidden_layers=4)
    prompts = prompts_of(LENGTHS[:5], 99)
    given = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.2}
    for _ in range(3):
        found = []
        for model in (ours, one):
            torch.manual_seed(5)
            found.append(batch(model, prompts, 16, **given))
        assert found[0] == found[1]
    hosted = {"no_repeat_ngram_size": 2, "min_new_tokens": 6, "eos_token_id": [7, 8]}
    assert batch(ours, prompts, 16, **hosted) == [alone(stock, prompt, 16, **hosted) for prompt in prompts]
    assert accel.report(ours).fallbacks == []


@torch.no_grad()
def test_a_step_waits_for_nothing_but_ids():
    ours, _ = pair_over(2)
    engine = engine_over(ours)
    going(ours, engine)
    assert {row["path"] for row in batched(ours)} == {one.path for one in forward_over(ours).stretches}
    with waits_noted("error"):  # which an event that is waited for is none of
        for _ in range(40):  # looks at the model and new pages are among them
            engine.step()
    assert len(engine.launched) == 2
    engine.close()


def slept(card: int) -> float:
    """Seconds of one sleep."""
    with torch.cuda.device(card):
        everywhere()
        start = time.perf_counter()
        for _ in range(5):
            torch.cuda._sleep(SLEEP)
        everywhere()
        return (time.perf_counter() - start) / 5


@pytest.mark.parametrize("cards", CARDS)
@pytest.mark.parametrize("tied", [False, True], ids=["head-behind", "head-before"])
@torch.no_grad()
def test_cards_work_at_the_same_time(monkeypatch, cards, tied):
    """Every stretch sleeps: steps take about one sleep each, where one after another they would take one a card."""
    ours, _ = pair_over(cards, tied=tied)
    engine, replay = engine_over(ours), StretchGraphs.replay
    going(ours, engine)

    def sleeping(graphs, stretch, *args):
        torch.cuda._sleep(SLEEP)
        return replay(graphs, stretch, *args)

    monkeypatch.setattr(StretchGraphs, "replay", sleeping)
    one = max(map(slept, range(cards)))
    for _ in range(cards):
        engine.step()
    everywhere()
    steps = 24
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    everywhere()
    took = (time.perf_counter() - start) / one
    # The last steps leave the first card before the others: `cards` - 1 more.
    assert 0.9 * steps < took < 0.5 * (steps + cards - 1) + 0.5 * steps * cards, (took, steps, one)
    engine.close()


def test_keys_and_values_lie_with_their_layers_and_are_given_back():
    ours, _ = pair_over(2)
    batch(ours, prompts_of(LENGTHS, 99), 8)
    engine = engine_over(ours)
    assert [engine.kv_cache.kv(layer).keys.device.index for layer in range(4)] == [0, 0, 1, 1]
    assert engine.sampler.device.index == 1 and engine.steps.device.index == 0
    engine.close()
    del engine
    held = []
    for _ in range(12):
        batch(ours, prompts_of(LENGTHS, 99), 8)
        gc.collect()
        everywhere()
        held.append([torch.cuda.memory_allocated(card) for card in range(2)])
    assert all(last <= before for last, before in zip(held[-1], held[3], strict=True)), held


def test_generate_beside_a_manager():
    """On the caller's stream, with graphs of the same memory."""
    ours, stock = pair_over(2)
    prompts = prompts_of(LENGTHS, 99)
    wanted = [alone(stock, prompt, 20) for prompt in prompts]
    call = partial(alone, ours, prompts[3], 20)
    for _ in range(3):
        call()
        batch(ours, prompts, 20)
    with ours.continuous_batching_context_manager(generation_config=config_of(20)) as manager:
        ids = manager.add_requests(prompts, max_new_tokens=20)
        for _ in range(5):
            assert call() == wanted[3]
        found = collect(manager, len(ids), timeout=60)
    assert [found[one].generated_tokens for one in ids] == wanted
