"""One of many copies of a language model: it answers the requests that an engine, such as Ray Serve, hands to it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from transformers import ContinuousBatchingConfig

import accel
from accel.commands.serving import OptimizedModels, longest_request
from accel.libraries.batching import GenerationOutput
from accel.llm.batching.manager import BatchManager

FUSED = accel.Options(cpu="fuse")


class Question(NamedTuple):
    """What a replica is asked; it can be pickled.

    prompt: token ids. settings: what else `BatchManager.add_request` is given; with streaming=True tokens are sent as
    they come, else all at the end. generated: tokens that the answer begins with, from a replica that was lost.
    """

    prompt: list[int]
    settings: dict[str, Any]
    generated: list[int]


class AnswerPart(NamedTuple):
    """Part of an answer: its new tokens, whether it is finished, its error; longest: tokens it may come to."""

    tokens: list[int]
    finished: bool
    error: str | None
    longest: int | None


class ReplicaEnded(RuntimeError):
    """The replica answers nobody any more; others can. Its engine is to make it anew."""


class Replica:
    """A model, optimized, whose requests are batched continuously. For one process and its card or cards.

    model: a folder or a name, loaded as `accel serve` does. options: for `accel.optimize`; on a CPU the default fuses
    too, since no batching but ours can go on with an answer. batching: how much memory, how many tokens a step. server:
    what transformers' server has for models, such as device, dtype, trust_remote_code. Raises what loading raises,
    RuntimeError where accel does not batch the model, with the report.
    """

    def __init__(
        self,
        model: str,
        options: accel.Options = FUSED,
        batching: ContinuousBatchingConfig | None = None,
        **server: Any,
    ) -> None:
        models = OptimizedModels(options=options, model_timeout=-1, **server)
        self.model, processor = models.load_model_and_processor(models.process_model_name(model))
        self.tokenizer = getattr(processor, "tokenizer", processor)
        manager = self.model.init_continuous_batching(self.model.generation_config, batching)
        if not isinstance(manager, BatchManager):
            raise RuntimeError(f"{model} is not batched by accel: {accel.report(self.model).summary()}")
        self.manager = manager
        self.manager.start()

    async def answer(self, question: Question) -> AsyncIterator[AnswerPart]:
        """The answer, in pieces. Where the caller hangs up, the request is cancelled. Raises ReplicaEnded."""
        outputs: asyncio.Queue[GenerationOutput] = asyncio.Queue()
        name = self.manager.add_request(
            question.prompt,
            generated=question.generated,
            tokenizer=self.tokenizer if "stop_strings" in question.settings else None,
            **question.settings,
        )
        if name is None:
            raise ReplicaEnded("the replica takes no more requests")
        self.manager.register_result_handler(name, outputs.put_nowait)
        sent, finished = len(question.generated), False
        try:
            while not finished:
                output = await outputs.get()
                while not outputs.empty():  # each holds all tokens so far
                    output = outputs.get_nowait()
                if output.error is not None:
                    self.check_health()  # the request failed with all others: another replica will answer it
                tokens, finished = output.generated_tokens[sent:], output.is_finished()
                sent += len(tokens)
                yield AnswerPart(tokens, finished, output.error, longest_request(self.manager))
        finally:
            if not finished:
                self.manager.cancel_request(name)

    def check_health(self) -> None:
        """What Ray Serve asks now and then. Raises ReplicaEnded where the thread that answers has ended."""
        fatal = self.manager.background_thread_status.fatal_error  # there before the thread has come to its end
        if fatal is not None or not self.manager.is_running():
            raise ReplicaEnded(f"the replica has ended: {fatal}")

    def close(self) -> None:
        """Ends the thread, and gives the memory back that answers took."""
        self.manager.stop(hard_stop=True)
        self.manager.destroy()
