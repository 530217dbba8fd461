"""Where the step cache takes a loop to begin, and which calls it takes to be steps of one."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

import accel
from support.diffusion.oracles import STEPS, agree, loop, reasons


@pytest.mark.parametrize(
    "steps",
    [
        STEPS,
        STEPS.tolist(),
        [float(t) for t in STEPS],
        [torch.tensor(float(t)) for t in STEPS],
        [t.expand(2) for t in STEPS],
        STEPS.flip(0),  # inversion: forward through the tensor, up in value
    ],
    ids=["elements", "ints", "floats", "tensors", "expanded", "inversion"],
)
@pytest.mark.share(3)
@pytest.mark.turns(2)
def test_kinds_of_timesteps(cached, tiny, steps):
    model, oracle = cached()
    for _ in range(2):
        oracle.restart()
        agree(model, oracle, loop(tiny, model, steps))
    assert reasons(model) == []


def test_a_loop_that_the_pipeline_announces(cached, tiny):
    model, oracle = cached()
    calls = loop(tiny, model)
    agree(model, oracle, calls[:2])
    model.forward.state.loop.begin()
    oracle.restart()
    agree(model, oracle, calls[2:])


def test_timesteps_that_rise_from_call_to_call_are_loops_of_their_own(cached, tiny):
    model, oracle = cached()
    for call in loop(tiny, model, STEPS.flip(0).tolist()):
        oracle.restart()
        agree(model, oracle, [call])
    assert any("do not tell that a loop goes on" in reason for reason in reasons(model))


def test_two_loops_out_of_step_gain_nothing_and_mix_nothing(cached, tiny):
    model, oracle = cached()
    early, late = (loop(tiny, model, STEPS.clone(), seed=seed) for seed in (1, 2))
    for call in (early[0], early[1], late[0], early[2], late[1], early[3], late[2], late[3]):
        if call is not early[1] and call is not late[3]:
            oracle.restart()
        agree(model, oracle, [call])


def test_threads_on_one_prompt_mix_nothing(cached, tiny, another):
    model, oracle = cached()
    calls = loop(tiny, model, STEPS.tolist())
    others, theirs = [call | {"sample": -call["sample"]} for call in calls], another()
    with ThreadPoolExecutor(1) as pool:
        agree(model, oracle, calls[:1])
        for number in range(1, 6):  # down in value from call to call, as in one loop
            pool.submit(agree, model, theirs, [others[number]]).result()
            agree(model, oracle, [calls[number + 1]])
        model.forward.state.loop.begin()  # this thread's next loop, not the other's
        pool.submit(agree, model, theirs, [others[6]]).result()
    assert reasons(model) == []


@pytest.mark.parametrize("pair", ["sd15", "WanTransformer3DModel"], indirect=True)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_prompt_and_negative_prompt_in_calls_of_their_own(pair, order):
    """Pipelines of Wan and Qwen-Image make them in a context of their own."""
    model, oracle, calls = pair
    oracles = [oracle, type(oracle)(accel.restore(copy.deepcopy(model)), 3)]
    negative = torch.randn_like(calls[0]["encoder_hidden_states"])
    context = getattr(model, "cache_context", lambda name: nullcontext())
    for _ in range(2):
        for one in oracles:
            one.restart()
        for call in calls:
            for stream in order:
                given = call | ({"encoder_hidden_states": negative} if stream else {})
                with context(("cond", "uncond")[stream]):
                    agree(model, oracles[stream], [given])
    assert reasons(model) == [] and len(model.forward.state.features) == 2


@pytest.mark.turns(2)
def test_two_sizes_in_every_step_and_sizes_in_turn(cached, tiny, another):
    model, oracle = cached()
    oracles = [oracle, another()]
    first = loop(tiny, model)
    wide = [call | {"sample": torch.cat([call["sample"]] * 2, dim=3)} for call in first]
    for number, pair in enumerate(zip(first, wide, strict=True)):
        for which in (0, 1) if number % 2 else (1, 0):
            agree(model, oracles[which], [pair[which]])
    for calls in (wide, first, wide):
        oracle.restart()
        agree(model, oracle, calls)


def test_equal_calls_in_one_step_are_tiles_not_steps(cached, tiny, another):
    model, oracle = cached()
    oracles = [oracle, another()]
    for call in loop(tiny, model):
        agree(model, oracles[0], [call])
        agree(model, oracles[1], [call | {"sample": -call["sample"]}])


@pytest.mark.turns(2)
def test_more_tiles_than_features_are_kept_for(cached, tiny, another):
    model, oracle = cached()
    tiles = [another() for _ in range(8)]
    for call in loop(tiny, model)[:4]:
        for number in range(10):
            call = call | {"sample": call["sample"] + 0.1}
            if number >= 8:
                oracle.restart()
            agree(model, (tiles[number] if number < 8 else oracle), [call])
    assert any("more than 8 calls a step" in reason for reason in reasons(model))


@pytest.mark.parametrize("change", ["another tensor", "in place"])
def test_another_prompt_in_the_middle_of_a_loop(cached, tiny, change):
    model, oracle = cached()
    calls = loop(tiny, model)
    agree(model, oracle, calls[:2])
    oracle.restart()
    if change == "in place":
        calls[0]["encoder_hidden_states"].mul_(-1)
    else:
        other = -calls[0]["encoder_hidden_states"]
        calls = [call | {"encoder_hidden_states": other} for call in calls]
    agree(model, oracle, calls[2:])
    assert any("other tensors than in the step before" in reason for reason in reasons(model))
