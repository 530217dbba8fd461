"""Steps that raise, and engines that cannot go on: the requests they ran fail, and nothing is lost."""

import pytest
import torch

from support.llm.managers.fake_engine import answer
from support.llm.managers.managers import PROMPTS, collect, make_manager


@pytest.mark.parametrize("error", [ValueError("a bad day"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_step_that_raises_fails_what_ran_in_it(manager, error, lines_told):
    manager.toy.rows, manager.toy.faults = 2, {2: error}
    ids = manager.add_requests(PROMPTS)
    manager.start()
    found = collect(manager, len(PROMPTS))
    failed = [name for name in ids if found[name].error is not None]
    assert len(failed) == 2 and {found[name].error for name in failed} == {str(error)}
    for name, prompt in zip(ids, PROMPTS, strict=True):
        assert found[name].generated_tokens == answer(prompt, 6)[: 1 if name in failed else 6]
    assert manager.background_thread_status.fatal_error is None and manager.is_running()
    assert any(str(error) in line for line in lines_told)


@pytest.mark.parametrize(
    "faults", [dict.fromkeys(range(1, 9), ValueError("no luck")), {2: torch.AcceleratorError("CUDA error: lost")}]
)
def test_a_loop_that_cannot_go_on_fails_all_and_says_why(manager, faults, lines_told):
    manager.toy.rows, manager.toy.faults = 1, faults
    ids = manager.add_requests(PROMPTS)
    manager.start()
    found = collect(manager, len(PROMPTS))
    assert all(found[name].error for name in ids)
    manager._loop.thread.join(10)
    error = next(iter(faults.values()))
    assert manager.background_thread_status.fatal_error is error and not manager.is_running()
    assert manager.add_request([1]) is None and manager.get_result() is None
    assert any("died with a fatal error" in line for line in lines_told)
    assert manager.toy.closed == 1
    manager.stop()
    manager.toy.faults, manager.toy.steps = {}, 0
    manager.start()  # once whatever it was is gone
    assert manager.background_thread_status.fatal_error is None
    name = manager.add_request([1])
    assert collect(manager, 1)[name].error is None


def test_an_engine_that_cannot_be_made(lines_told):
    def build():
        raise torch.OutOfMemoryError("no memory for keys and values")

    manager = make_manager()
    manager._loop.build = build
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
