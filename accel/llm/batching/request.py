"""One request: what is asked for, how far it has come, and what came out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accel.libraries.batching import GenerationOutput, RequestStatus

CUT = "cut after"  # how the error of an answer begins that ended at a limit of the engine, short of what was asked for


@dataclass(eq=False)
class Request:
    """A prompt and what is to be done with it. The engine alone writes its state.

    prompt: token ids. max_new_tokens: None for no bound but the room there is. eos: ids that end it, which are part of
    what it gives. sampling: how tokens are chosen, see `accel.llm.batching.sampling`. ends: asked with all tokens of
    prompt and answer after each new one, whether that was the last. children: how many more answers are drawn for the
    same prompt, each a request of its own under `child_id`. settings: by which `sampling` was found.

    tokens, logprobs, timestamps: of the answer so far; the last in seconds of `time.perf_counter`. started, ended:
    seconds as well, -1 before.
    """

    id: str
    prompt: list[int]
    max_new_tokens: int | None
    eos: frozenset[int]
    sampling: Any
    ends: Callable[[Sequence[int]], bool] | None = None
    streaming: bool = False
    record_timestamps: bool = False
    children: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    status: RequestStatus = RequestStatus.PENDING
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)
    error: str | None = None
    created: float = field(default_factory=time.perf_counter)
    started: float = -1
    ended: float = -1

    @property
    def finished(self) -> bool:
        """Whether nothing more will come of it: it ended, or failed."""
        return self.status >= RequestStatus.FINISHED

    def child_id(self, number: int) -> str:
        """The id of one of its children, as transformers names them."""
        return f"{self.id}__child#{number}"

    def further(self) -> list["Request"]:
        """Its children."""
        new: dict[str, Any] = {"children": 0, "status": RequestStatus.PENDING, "created": time.perf_counter()}
        return [
            replace(
                self, id=self.child_id(number), sampling=self.sampling.fork(number), tokens=[], logprobs=[],
                timestamps=[], **new,
            )
            for number in range(self.children)
        ]  # fmt: skip

    def output(self) -> GenerationOutput:
        """What a caller of `generate_batch` gets of it; a copy, so that what follows does not change it."""
        return GenerationOutput(
            request_id=self.id,
            prompt_ids=self.prompt,
            generated_tokens=self.tokens[:],
            logprobs=self.logprobs[:],
            error=self.error,
            status=self.status,
            created_time=self.created,
            lifespan=(self.started, self.ended),
            timestamps=self.timestamps[:] if self.record_timestamps else None,
        )


def was_cut(output: GenerationOutput) -> bool:
    """Whether the answer ended at a limit of the engine, with fewer tokens than were asked for."""
    return output.error is not None and output.error.startswith(CUT)
