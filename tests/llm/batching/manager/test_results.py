"""What comes out of a manager: to whoever asks, and to handlers."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import RequestStatus

from support.llm.batching.managers import PROMPTS, Model, answer, collect, make_manager


def test_every_request_comes_out_as_if_alone(manager):
    """Steps run on one thread of the manager's own, without gradients. Results are found by their id in any order."""
    manager.start()
    ids = manager.add_requests(PROMPTS, record_timestamps=True)
    assert ids == [f"req_{n}" for n in range(len(PROMPTS))]
    for name, prompt in list(zip(ids, PROMPTS, strict=True))[::-1]:
        result = manager.get_result(name, timeout=10)
        assert (result.prompt_ids, result.generated_tokens) == (prompt, answer(prompt, 6))
        assert (result.status, result.error, result.logprobs) == (RequestStatus.FINISHED, None, [])
        assert len(result.timestamps) == 6
        assert result.created_time <= result.lifespan[0] <= result.timestamps[0] <= result.lifespan[1]
        assert manager.get_result(name) is None  # not a second time, and nobody waits for it
    assert manager.get_result(timeout=0.01) is None and manager.get_result("nobody") is None
    assert len({thread for thread, _ in manager.toy.seen}) == 1 and manager.current_batch >= 6
    assert all(thread != threading.get_ident() and inference for thread, inference in manager.toy.seen)


@pytest.mark.parametrize("share", [True, False])
def test_prompts_that_begin_alike_stand_behind_one_another(share):
    manager = make_manager(config=ContinuousBatchingConfig(allow_block_sharing=share))
    ids = manager.add_requests(PROMPTS)
    assert [one.prompt for one in manager._thread._added] == (sorted(PROMPTS, reverse=True) if share else PROMPTS)
    assert {one.id: one.prompt for one in manager._thread._added} == dict(zip(ids, PROMPTS, strict=True))


def test_a_stream_shows_every_token_and_its_end(manager):
    manager.start()
    name = manager.add_request([2, 7], streaming=True, request_id="mine")
    results = list(manager.request_id_iter(name))
    assert name == "mine" and [len(one.generated_tokens) for one in results] == [1, 2, 3, 4, 5, 6]
    assert [one.status for one in results] == [RequestStatus.DECODING] * 5 + [RequestStatus.FINISHED]
    assert results[-1].generated_tokens == answer([2, 7], 6)
    manager.add_requests(PROMPTS)
    manager.stop()
    assert sorted(one.request_id for one in manager) == [f"req_{n}" for n in range(len(PROMPTS))]


SECOND = answer([3, 1, 4], 6)[1]


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("config", "own", "of_model", "tokens"),
    [
        (SECOND, None, None, 2),
        ([SECOND, 49], None, None, 2),
        (-1, SECOND, None, 2),
        (None, None, None, 6),
        (None, None, SECOND, 2),  # which `add_requests` asks, as stock does
    ],
)
def test_the_end_of_a_request(config, own, of_model, tokens):
    """By the generation configuration's tokens, the request's own, or the model's."""
    model = Model()
    model.config.eos_token_id = of_model
    manager = make_manager(model=model, eos_token_id=config)
    manager.start()
    if of_model is None:
        manager.add_request([3, 1, 4], eos_token_id=own)
    else:
        manager.add_requests([[3, 1, 4]])
    assert len(collect(manager, 1)["req_0"].generated_tokens) == tokens
    manager.stop()


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, iter])
def test_prompts_of_any_kind_become_lists_of_numbers(manager, kind):
    manager.start()
    name = manager.add_request(kind([4, 2]))
    result = collect(manager, 1)[name]
    assert result.prompt_ids == [4, 2] and all(type(one) is int for one in result.prompt_ids)


# -- handlers ----------------------------------------------------------------------------------------------------------


def test_handlers_get_their_request_on_their_event_loop(manager):
    manager.start()
    got: dict[str, list] = {}

    async def one(name, prompt, streaming):
        done = asyncio.Event()

        def handler(result):
            assert threading.get_ident() == thread
            got.setdefault(name, []).append(result)
            if result.is_finished():
                done.set()

        thread = threading.get_ident()
        manager.register_result_handler(name, handler)
        manager.add_request(prompt, request_id=name, streaming=streaming)
        await asyncio.wait_for(done.wait(), 10)

    async def clients():
        await asyncio.gather(*(one(f"c{n}", PROMPTS[n % 5], n % 2 == 0) for n in range(64)))

    thread = threading.Thread(target=asyncio.run, args=(clients(),))
    thread.start()
    thread.join()
    for n in range(64):
        assert got[f"c{n}"][-1].generated_tokens == answer(PROMPTS[n % 5], 6)
        assert len(got[f"c{n}"]) == (6 if n % 2 == 0 else 1)
    assert manager.get_result(timeout=0.01) is None and not manager._results._handlers
    with pytest.raises(RuntimeError, match="no running event loop"):
        manager.register_result_handler("x", print)


def test_a_handler_that_comes_late_gets_what_was_there(manager):
    """Between `add_request` and `register_result_handler` the request may have ended; nobody waits for ever."""
    manager.start()
    name = manager.add_request([1, 2], streaming=True)
    manager.stop()

    async def late():
        got: list = []
        manager.register_result_handler(name, got.append)
        await asyncio.sleep(0)
        return got

    got = asyncio.run(late())
    assert [len(one.generated_tokens) for one in got] == [1, 2, 3, 4, 5, 6] and manager.get_result() is None


def test_a_handler_that_raises_takes_nothing_from_the_others(manager, logged):
    manager.start()

    async def clients():
        good = asyncio.get_running_loop().create_future()
        manager.register_result_handler("bad", lambda result: 1 / 0)
        manager.register_result_handler("good", good.set_result)
        for name in ("bad", "good"):
            manager.add_request([1, 2], request_id=name)
        return await asyncio.wait_for(good, 10)

    assert asyncio.run(clients()).generated_tokens == answer([1, 2], 6)
    assert any("handler of request bad raised ZeroDivisionError" in line for line in logged)
    assert manager.is_running()


def test_a_request_whose_event_loop_is_closed_is_cancelled(manager):
    manager.toy.hold.clear()
    manager.start()

    async def client():
        manager.register_result_handler("gone", print)
        manager.add_request([1, 2], request_id="gone", max_new_tokens=10**9, streaming=True)

    asyncio.run(client())
    manager.toy.hold.set()
    manager.add_request([3], request_id="stays")
    assert collect(manager, 1)["stays"].error is None
    manager.stop()  # which waits for all that is under way: for ever, if that were
    assert not manager._results.under_way()
