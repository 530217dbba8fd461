"""A manager over a toy engine."""

import threading
import time
from collections import deque
from types import SimpleNamespace

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus

from accel.llm.batching.manager import BatchManager
from accel.llm.batching.request import Request

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5], [3, 5], [8, 9, 7, 9]]


class Chosen(SimpleNamespace):
    """Settings that know a temperature."""

    def request(self, prompt, max_new_tokens=None, eos_token_id=None, temperature=1.0, **unknown):
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not a setting of a request; temperature is")
        if temperature < 0:
            raise ValueError(f"temperature={temperature}: give a number of 0 or above")
        return temperature


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
    wanted = {"max_new_tokens": 6, "eos_token_id": -1} | given
    manager = BatchManager(
        Model() if model is None else model,
        GenerationConfig(**wanted),
        ContinuousBatchingConfig() if config is None else config,
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


VOCABULARY = 50


def after(tokens: list[int]) -> int:
    """The token that follows these."""
    return (31 * sum(tokens) + 7 * len(tokens)) % VOCABULARY


def answer(prompt: list[int], most: int, eos: frozenset[int] = frozenset()) -> list[int]:
    """What a request comes to."""
    found: list[int] = []
    while len(found) < most:
        found.append(after([*prompt, *found]))
        if found[-1] in eos:
            break
    return found


def child_answer(prompt: list[int], number: int, most: int) -> list[int]:
    return answer([*prompt, number], most)


class FakeEngine:
    """Runs up to `rows` requests at a time, the first come first.

    faults: by the number of a step, from 1, what that step raises. hold: steps wait for it. seen: of every step, the
    thread and whether it was in inference mode; made: all engines that `build` made.
    """

    def __init__(self, rows: int = 4):
        self.rows, self.faults, self.closed, self.steps = rows, {}, 0, 0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.ended: list[Request] = []
        self.seen: list[tuple[int, bool]] = []
        self.hold = threading.Event()
        self.hold.set()
        self.reached = threading.Event()  # a step has begun
        self.pause = 0.0  # seconds that a step takes

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.ended)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def cancel(self, request_id: str) -> None:
        for requests in (self.waiting, self.running):
            for request in [one for one in requests if one.id == request_id]:
                requests.remove(request)
                self.ended += [end(one, "the request was cancelled") for one in self.with_children(request)]

    def with_children(self, request: Request) -> list[Request]:
        """The request, and its children where they have not been made yet."""
        made = request.status is not RequestStatus.PENDING
        return [request, *(() if made else map(self.child, [request] * request.children, range(request.children)))]

    def child(self, request: Request, number: int) -> Request:
        child = Request(
            request.child_id(number), [*request.prompt, number], request.max_new_tokens, request.eos, request.sampling
        )
        child.streaming, child.record_timestamps = request.streaming, request.record_timestamps
        return child

    def step(self) -> list[Request]:
        self.steps += 1
        self.seen.append((threading.get_ident(), torch.is_inference_mode_enabled()))
        self.reached.set()
        assert self.hold.wait(20)
        time.sleep(self.pause)
        while self.waiting and len(self.running) < self.rows:
            request = self.waiting.popleft()
            self.running += self.with_children(request)
            for one in self.running:
                if one.status is RequestStatus.PENDING:
                    one.status, one.started = RequestStatus.DECODING, time.perf_counter()
        if self.steps in self.faults:
            raise self.faults[self.steps]
        news, self.ended = self.ended, []
        for request in list(self.running):
            request.tokens.append(after([*request.prompt, *request.tokens]))
            if request.record_timestamps:
                request.timestamps.append(time.perf_counter())
            if len(request.tokens) == request.max_new_tokens or request.tokens[-1] in request.eos:
                self.running.remove(request)
                news.append(end(request))
            elif request.streaming:
                news.append(request)
        return news

    def fail(self, error: Exception) -> list[Request]:
        """Those that run; where none runs, all."""
        left, self.running = self.running, []
        if not left:
            left = [one for request in self.waiting for one in self.with_children(request)]
            self.waiting.clear()
        ended, self.ended = self.ended, []
        return [*ended, *(end(request, str(error)) for request in left)]

    def resumed(self) -> None:
        """Its answers hang on no weights."""

    def close(self) -> None:
        self.closed += 1


def end(request: Request, error: str | None = None) -> Request:
    request.status, request.error = (RequestStatus.FINISHED, None) if error is None else (RequestStatus.FAILED, error)
    request.ended = time.perf_counter()
    if request.started < 0:
        request.started = request.ended
    return request
