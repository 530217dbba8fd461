"""Requests that are wrong, many, or cancelled, steps that raise, and a surface that is stock's."""

import ast
import asyncio
import inspect
import queue
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import RequestStatus

from accel.llm.batching import engine_thread
from accel.llm.batching.manager import BatchManager
from support.llm.batching.managers import PROMPTS, VOCABULARY, answer, collect, make_manager


@pytest.mark.parametrize(
    ("prompt", "given", "wrong"),
    [
        ([], {}, "the prompt is empty"),
        ([1, VOCABULARY], {}, f"token {VOCABULARY} is not one of the model's {VOCABULARY}"),
        ([-1, 2], {}, "token -1 is not one"),
        ([[1, 2]], {}, "not a list of token ids"),
        ([1.5], {}, "not a list of token ids"),
        ("text", {}, "not a list of token ids"),
        (None, {}, "not a list of token ids"),
        ([2**70], {}, "not a list of token ids"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens=-1: give a number from 0 on, or None"),
        ([1], {"tempo": 2}, "tempo: not a setting"),
        ([1], {"temperature": -1.0}, "temperature=-1.0: give"),
    ],
)
def test_what_makes_no_sense_fails_alone(manager, prompt, given, wrong):
    manager.start()
    bad, good = manager.add_request(prompt, **given), manager.add_request([1, 2])
    found = collect(manager, 2)
    assert found[bad].status is RequestStatus.FAILED and wrong in found[bad].error
    assert found[bad].lifespan[1] >= found[bad].lifespan[0] >= found[bad].created_time
    assert found[good].generated_tokens == answer([1, 2], 6)


def test_several_answers_to_a_prompt():
    """Each has a name; those to a prompt that makes no sense fail, as a caller counts the results it waits for."""
    manager = make_manager(do_sample=True, num_return_sequences=3)
    manager.start()
    ids = manager.add_requests([PROMPTS[0], [], PROMPTS[1]], max_new_tokens=4)
    found = collect(manager, 9)
    for name, prompt in zip(ids, (PROMPTS[0], None, PROMPTS[1]), strict=True):
        for one in (found[name], *(found[f"{name}__child#{number}"] for number in range(2))):
            assert (one.error is None) == (prompt is not None)
            assert one.generated_tokens == ([] if prompt is None else answer(prompt, 4))
    manager.stop()


def test_an_id_twice_is_an_error_of_the_second(manager):
    manager.toy.hold.clear()
    manager.start()
    manager.add_request([1, 2], request_id="x")
    manager.add_request([1], request_id="req_1")
    with pytest.raises(ValueError, match="request_id='x': a request with this id is under way"):
        manager.add_request([3], request_id="x")
    assert manager.add_requests([[2], [3]]) == ["req_0", "req_2"]  # names that are made up are others

    async def second():
        manager.register_result_handler("x", print)  # the first handler is fine
        with pytest.raises(ValueError, match="has a result handler already"):
            manager.register_result_handler("x", print)
        manager._results._handlers.clear()

    asyncio.run(second())
    manager.toy.hold.set()
    assert collect(manager, 4)["x"].generated_tokens == answer([1, 2], 6)
    manager.add_request([3], request_id="x")  # it may be used again
    assert collect(manager, 1)["x"].generated_tokens == answer([3], 6)


# -- many, and cancelled -----------------------------------------------------------------------------------------------


def test_ten_thousand_from_many_threads(manager):
    manager.toy.rows = 1024
    manager.start()
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda n: manager.add_request([n % VOCABULARY, 3], max_new_tokens=2), range(10_000)))
    found = collect(manager, 10_000)
    assert len(set(ids)) == 10_000 and all(one.error is None for one in found.values())
    assert all(found[f].generated_tokens == answer([n % VOCABULARY, 3], 2) for n, f in enumerate(ids))
    assert not manager._results.under_way()


def test_a_full_queue_waits_and_then_says_so(monkeypatch):
    monkeypatch.setattr(engine_thread, "PATIENCE", 0.05)
    manager = make_manager(config=ContinuousBatchingConfig(max_queue_size=2))
    manager.add_request([1])
    manager.add_request([2])
    with pytest.raises(queue.Full):
        manager.add_request([3])
    manager.start()
    manager.add_request([3])
    assert len(collect(manager, 3)) == 3
    manager.stop()


@pytest.mark.parametrize("state", ["queued", "waiting", "running", "streamed", "ended", "unknown"])
def test_cancelled_in_any_state(manager, state):
    """It comes out failed, once; the others go on."""
    toy = manager.toy
    toy.rows = 2
    if state != "queued":
        manager.start()
    toy.hold.clear()
    names = [manager.add_request(prompt, streaming=state == "streamed") for prompt in PROMPTS[:4]]
    victim = {"queued": names[1], "waiting": names[3], "unknown": "nobody"}.get(state, names[0])
    if state in ("waiting", "running", "streamed"):
        assert toy.reached.wait(10)
    found = {}
    if state == "ended":
        toy.hold.set()
        found = collect(manager, 4)
    for _ in range(2):
        manager.cancel_request(victim)
    if state == "queued":
        manager.start()
    toy.hold.set()
    found = found or collect(manager, 4)
    for name, prompt in zip(names, PROMPTS, strict=False):
        cancelled, tokens = name == victim and state != "ended", found[name].generated_tokens
        assert found[name].error == ("the request was cancelled" if cancelled else None)
        assert tokens == answer(prompt, 6)[: len(tokens) if cancelled else 6]
    manager.stop()
    assert manager.get_result() is None and not manager._results.under_way()


def public(names):
    return {name for name in names if not name.startswith("_") or name == "__iter__"}


# Keywords that stock or 5.17 has not, all with defaults.
MORE = {"stop_strings", "tokenizer", "generated", "adapter", "auto_switch_to_flash"}


def test_no_public_code_of_stocks_is_left(manager):
    """Whatever a version of transformers has there would look at fields that are not ours."""
    assert isinstance(manager, ContinuousBatchingManager)
    assert not public(vars(ContinuousBatchingManager)) - vars(BatchManager).keys()
    for name in public(vars(ContinuousBatchingManager)):
        stock, ours = (getattr(kind, name) for kind in (ContinuousBatchingManager, BatchManager))
        if callable(ours) and name not in ("warmed_up",):
            theirs, mine = (inspect.signature(function).parameters for function in (stock, ours))
            assert (
                [one for one in mine if one in theirs] == list(theirs)
                and mine.keys() - theirs <= MORE
                and all(
                    theirs[one].default == mine[one].default and theirs[one].kind == mine[one].kind for one in theirs
                )
            ), name


INNER = {"input_queue", "cancel_queue", "output_router", "distributed_helper", "logit_processor"}


def test_fields_of_stocks_that_are_not_of_its_inner_works(manager):
    tree = ast.parse(textwrap.dedent(inspect.getsource(ContinuousBatchingManager)))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    fields = public(node.attr for node in nodes if getattr(node.value, "id", None) == "self")
    assert {name for name in fields if not hasattr(manager, name)} == INNER & fields


@pytest.mark.parametrize("error", [ValueError("a bad day"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_step_that_raises_fails_what_ran_in_it(manager, error, logged):
    manager.toy.rows, manager.toy.faults = 2, {2: error}
    ids = manager.add_requests(PROMPTS)
    manager.start()
    found = collect(manager, len(PROMPTS))
    failed = [name for name in ids if found[name].error is not None]
    assert len(failed) == 2 and {found[name].error for name in failed} == {str(error)}
    for name, prompt in zip(ids, PROMPTS, strict=True):
        assert found[name].generated_tokens == answer(prompt, 6)[: 1 if name in failed else 6]
    assert manager.background_thread_status.fatal_error is None and manager.is_running()
    assert any(str(error) in line for line in logged)


@pytest.mark.parametrize(
    "faults", [dict.fromkeys(range(1, 9), ValueError("no luck")), {2: torch.AcceleratorError("CUDA error: lost")}]
)
def test_a_loop_that_cannot_go_on_fails_all_and_says_why(manager, faults, logged):
    manager.toy.rows, manager.toy.faults = 1, faults
    ids = manager.add_requests(PROMPTS)
    manager.start()
    found = collect(manager, len(PROMPTS))
    assert all(found[name].error for name in ids)
    manager._thread.ending.thread.join(10)
    error = next(iter(faults.values()))
    assert manager.background_thread_status.fatal_error is error and not manager.is_running()
    assert manager.add_request([1]) is None and manager.get_result() is None
    assert any("died with a fatal error" in line for line in logged)
    assert manager.toy.closed == 1
    manager.stop()
    manager.toy.faults, manager.toy.steps = {}, 0
    manager.start()  # once whatever it was is gone
    assert manager.background_thread_status.fatal_error is None
    name = manager.add_request([1])
    assert collect(manager, 1)[name].error is None


def test_an_engine_that_cannot_be_made(logged):
    def build():
        raise torch.OutOfMemoryError("no memory for keys and values")

    manager = make_manager()
    manager._thread.build = build
    with pytest.raises(torch.OutOfMemoryError, match="keys and values"):
        manager.warmup()
    assert not manager.warmed_up
    names = manager.add_requests(PROMPTS[:2])
    manager.start()
    found = collect(manager, 2)
    assert all("keys and values" in found[name].error for name in names)
    manager.stop()


def test_an_engine_that_fails_at_failing_loses_nothing(manager):
    def fail(error):
        raise KeyError("worse")

    manager.toy.faults, manager.toy.fail = {1: ValueError("bad")}, fail
    ids = manager.add_requests(PROMPTS)
    manager.start()
    found = collect(manager, len(PROMPTS))
    assert all("worse" in found[name].error for name in ids)
    manager.toy.running.clear()
    manager.toy.waiting.clear()
