"""A manager over a toy engine, whose answers are easy to compute."""

import threading
import time
from types import SimpleNamespace

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus

from accel.llm.batching.manager import BatchManager
from accel.llm.batching.request import Request, failed, finish
from accel.llm.batching.sampling import Sampling

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5], [3, 5], [8, 9, 7, 9]]
VOCABULARY = 50


class Chosen(SimpleNamespace):
    """Settings that know a temperature."""

    def request(self, prompt, max_new_tokens=None, eos_token_id=None, temperature=1.0, **unknown):
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not a setting of a request; temperature is")
        if temperature < 0:
            raise ValueError(f"temperature={temperature}: give a number of 0 or above")
        return Sampling(temperature)


class Model(torch.nn.Module):
    """What a manager asks of one."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(eos_token_id=None)
        self.words = torch.nn.Embedding(VOCABULARY, 2)

    def get_input_embeddings(self):
        return self.words


def make_manager(engine=None, config=None, model=None, **given) -> BatchManager:
    engine = FakeEngine() if engine is None else engine
    manager = BatchManager(
        model or Model(),
        GenerationConfig(**{"max_new_tokens": 6, "eos_token_id": -1} | given),
        config or ContinuousBatchingConfig(),
        lambda: engine,
        lambda generation_config: Chosen(),
    )
    manager.toy = engine
    return manager


def collect(manager, count, timeout=10):
    """So many finished results, by id."""
    found = {}
    while len(found) < count:
        result = manager.get_result(timeout=timeout)
        assert result is not None, f"only {sorted(found)} came"
        if result.is_finished():
            found[result.request_id] = result
    return found


def after(tokens: list[int]) -> int:
    """The token that follows these."""
    return (31 * sum(tokens) + 7 * len(tokens)) % VOCABULARY


def answer(prompt: list[int], most: int) -> list[int]:
    """What a request comes to."""
    found: list[int] = []
    while len(found) < most:
        found.append(after([*prompt, *found]))
    return found


class FakeEngine:
    """Runs up to `rows` requests at a time, the first come first.

    faults: by the number of a step, from 1, what that step raises. hold: steps wait for it. pause: seconds that a step
    takes. reached: a step has begun. seen: of every step, the thread and whether it was in inference mode.
    """

    def __init__(self, rows: int = 4):
        self.rows, self.faults, self.closed, self.steps, self.pause = rows, {}, 0, 0, 0.0
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.seen: list[tuple[int, bool]] = []
        self.hold, self.reached = threading.Event(), threading.Event()
        self.hold.set()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> list[Request]:
        self.waiting += request.family
        return []

    def cancel(self, request_id: str) -> list[Request]:
        gone = [one for one in (*self.waiting, *self.running) if one.id == request_id]
        self.waiting, self.running = ([one for one in some if one not in gone] for some in (self.waiting, self.running))
        return failed(gone, "the request was cancelled")

    def step(self) -> list[Request]:
        self.steps += 1
        self.seen.append((threading.get_ident(), torch.is_inference_mode_enabled()))
        self.reached.set()
        assert self.hold.wait(20)
        time.sleep(self.pause)
        free = self.rows - len(self.running)
        new, self.waiting = self.waiting[:free], self.waiting[free:]
        for request in new:
            request.status, request.started = RequestStatus.DECODING, time.perf_counter()
        self.running += new
        if self.steps in self.faults:
            raise self.faults[self.steps]
        news = []
        for request in list(self.running):
            request.tokens.append(after([*request.prompt, *request.tokens]))
            if request.record_timestamps:
                request.timestamps.append(time.perf_counter())
            if len(request.tokens) == request.max_new_tokens or request.tokens[-1] in request.eos:
                self.running.remove(request)
                news.append(finish(request))
            elif request.streaming:
                news.append(request)
        return news

    def fail(self, error: Exception) -> list[Request]:
        """Those that run; where none runs, all."""
        some = self.running or self.waiting
        left = some[:]
        some.clear()
        return failed(left, str(error))

    def resumed(self) -> None:
        """Its answers hang on no weights."""

    def close(self) -> None:
        self.closed += 1
