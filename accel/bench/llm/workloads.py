"""Batches of requests to measure `generate_batch` with: how many, how long, how much they share."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from accel.bench.llm.request import IN_FLIGHT
from accel.bench.weights import SEED

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Workload:
    """Requests of one batch. shortest, longest: tokens of a prompt; new: of an answer; shared: tokens that all prompts
    begin with, counted among theirs.
    """

    name: str
    requests: int
    shortest: int
    longest: int
    new: int
    shared: int = 0

    @property
    def about(self) -> dict:
        length = f"{self.shortest}" if self.shortest == self.longest else f"{self.shortest} to {self.longest}"
        told = {"workload": self.name, "requests": self.requests, "prompt tokens": length, "new tokens": self.new}
        return told | ({"shared tokens": self.shared} if self.shared else {})

    def first(self, requests: int) -> "Workload":
        """The same of fewer requests."""
        return replace(self, requests=min(requests, self.requests))

    def answering(self, new: int) -> "Workload":
        """The same with no more than so many new tokens each."""
        return replace(self, new=min(new, self.new))

    def prompts(self, model: "PreTrainedModel") -> list[list[int]]:
        """Random token ids; those of the first requests do not depend on how many there are."""
        vocabulary = model.config.get_text_config().vocab_size
        g = torch.Generator().manual_seed(SEED)
        begin = torch.randint(1, vocabulary, (self.shared,), generator=g).tolist()
        prompts = []
        for _ in range(self.requests):
            length = int(torch.randint(self.shortest, self.longest + 1, (), generator=g))
            prompts.append(begin + torch.randint(1, vocabulary, (length - self.shared,), generator=g).tolist())
        return prompts

    def scaled(self, most: int) -> "Workload":
        """With prompts and answers that together have at most so many tokens."""
        over = max(1.0, (self.longest + self.new) / most)
        shortest, longest, new = (max(1, int(number / over)) for number in (self.shortest, self.longest, self.new))
        return replace(self, shortest=shortest, longest=longest, new=new, shared=int(self.shared / over))


WORKLOADS = (
    Workload("different lengths", 128, 32, 512, 128),
    Workload("questions", 1319, 94, 94, 256),  # as many and as long as those of gsm8k's test
    Workload("rollouts", 32, 256, 256, 1024),
    Workload("nothing shared", 256, 1000, 1000, 64),
    Workload("shared prompt", 256, 1000, 1000, 64, shared=900),
    *(Workload(f"{number} in flight", number, 128, 128, 64) for number in IN_FLIGHT),
    Workload("long", 256, 1024, 1024, 1024),
)
