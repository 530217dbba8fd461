"""Requests that ranks batch together. Functions are run by `support.ranks.RankPool`, on all ranks at once."""

import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import ContinuousBatchingConfig, GenerationConfig

import accel
from accel.errors import logged
from support.llm.parallel.ranks import counted, load

PLAIN = {"eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": 6}


def leading() -> bool:
    return dist.get_rank() == 0


def config(**given: Any) -> GenerationConfig:
    return GenerationConfig(**(PLAIN | given))


def batching(**given: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(**({"num_blocks": 16, "max_batch_tokens": 64} | given))


def optimized(folder: str, attention: str | None = None, **options: Any) -> torch.nn.Module:
    given = {"attn_implementation": attention} if attention else {}
    return accel.optimize(load(folder, {"tp_size": dist.get_world_size()}, **given), cpu="fuse", **options)


def outcome(outputs: dict) -> dict:
    return {name: (output.generated_tokens, output.error) for name, output in outputs.items()}


def batch(model: torch.nn.Module, prompts: list, given: dict, limits: dict, seed: int = 3) -> dict:
    """Tokens and error of each request, by its id; in one process, or on each rank."""
    torch.manual_seed(seed)
    return outcome(
        model.generate_batch(prompts, generation_config=config(**given), continuous_batching_config=batching(**limits))
    )


def several(folder: str, calls: list[tuple], attention: str | None = None, options: dict | None = None) -> dict:
    """What `batch` gives for each of the calls, one model for all, and what the report says then."""
    model, found = optimized(folder, attention, **(options or {})), []
    for prompts, given, limits in calls:
        with counted() as collectives:
            found.append((batch(model, prompts, given, limits), dict(collectives)))
    report = accel.report(model)
    return {"calls": found, "fallbacks": report.fallbacks, "batching": report.batching, "graphs": report.graphs}


def refused(folder: str, which: str) -> list[str]:
    """What each of two calls raises, or comes to: one that the ranks do not agree on, and one after it that they do."""
    model, found = optimized(folder), []
    given, limits, eager = {}, {}, None
    if not leading():
        given = {"temperature": 0.5} if which == "config" else {}
        limits = {"max_batch_tokens": 32} if which == "limits" else {}
        model.train(which == "training")
        if which == "training":  # generate_batch would end it
            model.eval, eager = (lambda: model), model.eval
    for again in (False, True):
        if again:
            given, limits = {}, {}
            if eager is not None:
                del model.eval
        try:
            found.append(str(batch(model, [[5, 6, 7]], given | {"do_sample": which == "config"}, limits)))
        except Exception as error:
            found.append(logged(error))
    return found


def live(folder: str, steps: str, last: int | None) -> dict:
    """A manager that the first rank alone gives requests to, while the others follow. steps: one of LIVE. last: a token
    that ends a request.
    """
    model = optimized(folder)
    manager = model.init_continuous_batching(generation_config=config(), continuous_batching_config=batching())
    manager.start()
    found = LIVE[steps](manager, last) if leading() else {}
    manager.stop()  # on a rank that follows, once the first one has
    found |= {
        "running": manager.is_running(),
        "steps": manager.current_batch,
        "fatal": manager.background_thread_status.fatal_error,
    }
    return found


def _own_settings(manager: Any, last: int | None) -> dict:
    """Requests of different kinds at different times, one of them streaming, one wrong, one cancelled."""
    manager.add_request([5, 6, 7], "plain")
    manager.add_request([9] * 9, "drawn", do_sample=True, temperature=0.8, top_k=20, seed=5)
    manager.add_request([3, 4], "words", stop_strings=[f"<{last}>"], tokenizer=Words(), max_new_tokens=40)
    manager.add_request([8] * 20, "penalized", repetition_penalty=1.5)
    manager.add_request([10**6], "wrong")
    manager.add_request([4, 4], "endless", max_new_tokens=100)
    manager.add_request([6, 5], "stream", streaming=True)
    streamed = [output.generated_tokens for output in manager.request_id_iter("stream")]
    manager.cancel_request("endless")
    time.sleep(0.2)  # nothing is to be done: the ranks go on meeting
    manager.add_request([5, 6, 7], "late")
    names = ("plain", "drawn", "words", "penalized", "wrong", "endless", "late")
    found = {name: list(manager.request_id_iter(name))[-1] for name in names}
    return outcome(found) | {"streamed": streamed}


def _paused(manager: Any, last: int | None) -> dict:
    manager.add_request([5, 6, 7], "before", max_new_tokens=60)
    with manager.pause():
        steps = manager.current_batch
        time.sleep(0.2)
        still = manager.current_batch == steps
    manager.add_request([5, 6, 7], "behind")
    return {"still": still} | outcome({name: manager.get_result(name, timeout=120) for name in ("before", "behind")})


LIVE = {"own settings": _own_settings, "paused": _paused}


class Words:
    """A tokenizer that names every token by its number."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{one}>" for one in ids)


def managers(folder: str) -> dict:
    """What else may be called while a manager runs, and what becomes of it when one rank ends or restores the model."""
    model, found = optimized(folder), {}
    ids = torch.tensor([[5, 6, 7]])

    def attempt(name: str, call: Any) -> None:
        try:
            value = call()
            found[name] = value.tolist() if isinstance(value, torch.Tensor) else str(value)
        except Exception as error:
            found[name] = logged(error)

    first, second = (
        model.init_continuous_batching(generation_config=config(), continuous_batching_config=batching())
        for _ in range(2)
    )
    first.start()
    attempt("second manager", second.start)
    attempt("generate beside", lambda: model.generate(ids, **PLAIN))
    with first.pause():
        attempt("generate in a pause", lambda: model.generate(ids, **PLAIN))
    if leading():
        first.add_request([5, 6, 7], "last", max_new_tokens=100)
    else:
        first.stop(hard_stop=True)
    first.stop()
    found["last"] = [output.error for output in first]
    third = model.init_continuous_batching(generation_config=config(), continuous_batching_config=batching())
    third.start()
    accel.restore(model)
    found["restored"] = third.is_running()
    attempt("generate restored", lambda: model.generate(ids, **PLAIN))
    return found
