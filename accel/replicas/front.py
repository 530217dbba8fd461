"""transformers' own server in front of replicas: HTTP, templates and tokens are here, the model is elsewhere.

A request whose replica is lost goes on at another one, behind the tokens that were sent already. The seed of its draws
is fixed here, and a draw depends on the seed and on how many tokens were drawn. So it goes on as it would have.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from accel.commands.serving import optimized_serving
from accel.errors import LOG, logged
from accel.libraries.batching import GenerationOutput, RequestStatus
from accel.libraries.server import OwnModels, Serve
from accel.replicas.replica import AnswerPart, Question, ReplicaEnded

ATTEMPTS = 5  # a request that ends every replica it comes to is not handed on for ever
Ask = Callable[[Question], AsyncIterator[AnswerPart]]


class Replicas:
    """Stands where transformers' server has a manager of continuous batching, and hands requests to replicas.

    ask: hands a question to a replica, such as the remote method of a Ray Serve handle that streams; what it returns
    may have `cancel`. lost: errors of `ask` that mean that the replica is gone. For the event loop of one server.
    longest: tokens that a request may come to, once a replica has said so.
    """

    takes_settings = True
    fatal_error = None  # stock's server asks; a replica that ends is not the end of all

    def __init__(self, ask: Ask, lost: Iterable[type[BaseException]] = (), attempts: int = ATTEMPTS) -> None:
        self.background_thread_status = self
        self.longest: int | None = None
        self._ask, self._attempts = ask, attempts
        self._lost: tuple[type[BaseException], ...] = (ReplicaEnded, *lost)
        self._callbacks: dict[str, Callable[[GenerationOutput], object]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Does nothing: the replicas run already."""

    def stop(self, **_: Any) -> None:
        """Ends all requests. Of the replicas none."""
        for name in list(self._tasks):
            self.cancel_request(name)

    def add_request(self, input_ids: Iterable[int], request_id: str, tokenizer: Any = None, **given: Any) -> str:
        """Hands a request to a replica, which has the tokenizer. Raises ValueError for an id that is under way."""
        if request_id in self._tasks:
            raise ValueError(f"request_id={request_id!r}: a request with this id is under way; give another id")
        if "seed" not in given:  # the same wherever it goes on
            given["seed"] = int(torch.randint(2**63 - 1, (), device="cpu"))
        question = Question(list(input_ids), given, [])
        task = asyncio.get_running_loop().create_task(self._run(request_id, question))
        self._tasks[request_id] = task
        task.add_done_callback(partial(self._forget, request_id))
        return request_id

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], object]) -> None:
        """What is called with each output of a request. Before it is added, or in the same turn of the event loop.
        Raises ValueError for a request that has one.
        """
        if request_id in self._callbacks:
            raise ValueError(f"request_id={request_id!r}: this request is under way and has a result handler already")
        self._callbacks[request_id] = callback

    def cancel_request(self, request_id: str) -> None:
        """The request ends, here and at its replica. Ids that are not under way are ignored."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    async def _run(self, name: str, question: Question) -> None:
        reason = ""
        for attempt in range(self._attempts):
            try:
                await self._answer(name, question)
                return
            except self._lost as error:
                reason = logged(error)
                LOG.warning("request %s lost its replica, attempt %d: %s", name, attempt + 1, reason)
            except Exception as error:
                self._tell(name, question, RequestStatus.FAILED, logged(error))
                return
        many = f"each of {self._attempts} replicas that were to answer was lost, the last by: {reason}"
        self._tell(name, question, RequestStatus.FAILED, many)

    async def _answer(self, name: str, question: Question) -> None:
        """From one replica, behind what is there. question: its `generated` grows by what comes."""
        pieces, finished = self._ask(question._replace(generated=question.generated[:])), False
        try:
            async for piece in pieces:
                question.generated.extend(piece.tokens)
                self.longest, finished = piece.longest, piece.finished
                status = RequestStatus.FINISHED if finished else RequestStatus.DECODING
                self._tell(name, question, RequestStatus.FAILED if piece.error else status, piece.error)
        finally:
            if not finished and (cancel := getattr(pieces, "cancel", None)) is not None:
                cancel()
        if not finished:
            raise ReplicaEnded("its answer stopped before the end")

    def _tell(self, name: str, question: Question, status: RequestStatus, error: str | None) -> None:
        output = GenerationOutput(
            request_id=name,
            prompt_ids=question.prompt,
            generated_tokens=question.generated[:],
            error=error,
            status=status,
        )
        self._callbacks[name](output)

    def _forget(self, name: str, _: object) -> None:
        self._tasks.pop(name, None)
        self._callbacks.pop(name, None)


def name_and_revision(model: str) -> tuple[str, str]:
    """From "name@revision"; from transformers 5.24 on a folder comes without one, and an "@" in it is part of it."""
    name, _, revision = (model, "", "") if Path(model).exists() else model.partition("@")
    return name, revision or "main"


class ModelsWithoutWeights(OwnModels):
    """Models without weights, which are the replicas'. The server asks them for their class, settings and tokenizer."""

    def __init__(self, replicas: Replicas, **options: Any) -> None:
        self._replicas = replicas
        super().__init__(**options)

    def load(self, name: str) -> Any:
        name, revision = name_and_revision(name)
        given = {"revision": revision, "trust_remote_code": self.trust_remote_code}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name, **given))
        with contextlib.suppress(OSError):  # there need not be such a file
            model.generation_config = GenerationConfig.from_pretrained(name, revision=revision)
        model.init_continuous_batching = lambda *_, **__: self._replicas
        return model


class Front(Serve):
    """The server of one model that replicas hold: all that `accel serve MODEL --continuous-batching` has.

    model: a folder or a name, the replicas' own. ask, lost, attempts: see `Replicas`. options: those of transformers'
    server. app: what an ASGI server runs. transformers' server means other classes than its own from here to `close`.
    """

    def __init__(
        self, model: str, ask: Ask, lost: Iterable[type[BaseException]] = (), attempts: int = ATTEMPTS, **options: Any
    ) -> None:
        self.replicas = Replicas(ask, lost, attempts)
        self._meant = contextlib.ExitStack()
        self._meant.enter_context(optimized_serving(partial(ModelsWithoutWeights, self.replicas)))
        try:
            super().__init__(model, continuous_batching=True, non_blocking=True, **options)
        except BaseException:
            self.close()
            raise
        self.app: Any = self.server.config.app

    def start_server(self) -> None:
        """Does nothing: the engine runs the app on a server of its own."""

    def close(self) -> None:
        """Ends all requests; transformers' server means its own classes again."""
        self.replicas.stop()
        self._meant.close()
