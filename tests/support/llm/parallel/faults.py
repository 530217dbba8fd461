"""What goes wrong on one of the ranks that share a model. Run by `support.rank_faults.FaultyRanks`, on all of them."""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from transformers import LogitsProcessorList

import accel
from accel.errors import logged
from accel.llm.batching.engine import Engine
from accel.llm.generation.decoder import DecoderForward
from support.llm.parallel.batches import PLAIN, batching, config, optimized
from support.llm.parallel.ranks import load
from support.ranks import HANGS

IDS = torch.tensor([[5, 6, 7]])
DEAD = 7  # the exit code of a rank that dies
AT = 4  # the step in which it goes wrong


def attempt(call: Callable[[], Any]) -> tuple[str, float]:
    """What came out, or was raised, and how many seconds it took."""
    begun = time.monotonic()
    try:
        found = str(call())
    except BaseException as error:
        found = logged(error)
    return found, time.monotonic() - begun


def dies() -> None:
    os._exit(DEAD)


def interrupted() -> None:
    raise KeyboardInterrupt


def fails() -> None:
    raise ValueError("of somebody's own")


FAULTS = {"dies": dies, "interrupted": interrupted, "fails": fails}


class Faulty:
    """A processor of logits that lets something go wrong in a step."""

    def __init__(self, fault: Callable[[], None]):
        self.fault, self.steps = fault, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == AT:
            self.fault()
        return scores


class Another:
    """A processor of logits by which another word is chosen in a step."""

    steps = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return -scores if self.steps == AT else scores


def another_text(folder: str, rank: int) -> list[tuple[str, float]]:
    """A call in which this rank chooses another word than the others."""
    model, given = optimized(folder), {}
    if dist.get_rank() == rank:
        given = {"logits_processor": LogitsProcessorList([Another()])}
    first = attempt(lambda: model.generate(IDS, **PLAIN, **given).tolist())
    return [first, attempt(lambda: model.generate(IDS, **PLAIN).tolist())]


def in_generate(folder: str, fault: str, ranks: tuple[int, ...]) -> list[tuple[str, float]]:
    """A call in which it goes wrong on these ranks, and the next call on all."""
    model, given = optimized(folder), {}
    if dist.get_rank() in ranks:
        given = {"logits_processor": LogitsProcessorList([Faulty(FAULTS[fault])])}
    first = attempt(lambda: model.generate(IDS, **PLAIN, **given).tolist())
    return [first, attempt(lambda: model.generate(IDS, **PLAIN).tolist())]


def in_batches(folder: str, fault: str, rank: int) -> list[tuple[str, float]]:
    """The same of `generate_batch`, in whose thread it goes wrong on one rank; or a Ctrl-C while it runs."""
    model = optimized(folder)
    if dist.get_rank() == rank:
        _break(fault)

    def batch(new: int) -> list:
        outputs = model.generate_batch(
            IDS.tolist(), generation_config=config(max_new_tokens=new), continuous_batching_config=batching()
        )
        return [(output.generated_tokens, output.error) for output in outputs.values()]

    first = attempt(lambda: batch(60))
    return [first, attempt(lambda: batch(6)), attempt(lambda: model.generate(IDS, **PLAIN).tolist())]


def _break(fault: str) -> None:
    steps, step, logits_of = iter(range(10**6)), Engine.step, DecoderForward.logits_of
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what runs in its background

    def faulty(self: Engine) -> list:
        if next(steps) == AT:
            if fault == "interrupted":
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                time.sleep(1.0)  # in which the main thread sees it, however busy the machine is
            elif fault == "fails":
                DecoderForward.logits_of = failing  # type: ignore[method-assign]
            else:
                FAULTS[fault]()
        return step(self)

    def failing(*args: Any, **kwargs: Any) -> Any:
        DecoderForward.logits_of = logits_of  # type: ignore[method-assign]
        fails()

    Engine.step = faulty  # type: ignore[method-assign]


def apart(folder: str, other: str) -> list[tuple[str, float]]:
    """What ranks are refused that do not do the same: in turn optimize on one of them alone, with other options, of
    another model; generate with other inputs, other draws, on one alone; and then what all do alike.
    """
    first, plan = dist.get_rank() == 0, {"tp_size": dist.get_world_size()}
    model, another = load(folder, plan), load(other, plan)
    found = [_alone(lambda: accel.optimize(model, cpu="fuse"), "optimize")]
    found.append(attempt(lambda: accel.optimize(model, cpu="fuse", graphs=first)))
    found.append(attempt(lambda: accel.optimize(model if first else another, cpu="fuse")))
    found.append(attempt(lambda: accel.optimize(model, cpu="fuse") and "optimized"))
    found.append(attempt(lambda: model.generate(IDS if first else IDS + 1, **PLAIN)))
    torch.manual_seed(dist.get_rank())
    found.append(attempt(lambda: model.generate(IDS, do_sample=True, **PLAIN)))
    found.append(_alone(lambda: model.generate(IDS, **PLAIN), "generate"))
    found.append(attempt(lambda: model.generate(IDS, **PLAIN).tolist()))
    return found


def _alone(call: Callable[[], Any], name: str) -> tuple[str, float]:
    """What the first rank comes to, for which the others wait."""
    store = c10d._get_default_store()
    if dist.get_rank() > 0:
        store.wait([name], timedelta(seconds=HANGS))
        return "", 0.0
    found = attempt(call)
    store.set(name, "")
    return found
