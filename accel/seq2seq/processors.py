"""Processors of scores that give what stock's give, which read the device or find out anew at each step what to do."""

from collections.abc import Iterable

import torch
from accel_kernels import timestamp_rule
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)


class Suppressed(LogitsProcessor):
    """Some of stock's that suppress tokens, one behind another. masks: of each (V,) bool, made once."""

    def __init__(self) -> None:
        self.stock: list[SuppressTokensLogitsProcessor | SuppressTokensAtBeginLogitsProcessor] = []
        self.masks: dict[int, torch.Tensor] = {}

    def mask(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor | None:
        """(V,) bool, the tokens that do not come now; None for none."""
        found = None
        for number, one in enumerate(self.stock):
            tokens = one.suppress_tokens if type(one) is SuppressTokensLogitsProcessor else one.begin_suppress_tokens
            if getattr(one, "begin_index", input_ids.shape[1]) != input_ids.shape[1]:
                continue
            if number not in self.masks:
                places = torch.arange(scores.shape[1], device=scores.device)
                self.masks[number] = torch.isin(places, tokens.to(scores.device))
            found = self.masks[number] if found is None else found | self.masks[number]
        return found

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        mask = self.mask(input_ids, scores)
        return scores if mask is None else torch.where(mask, -float("inf"), scores)


class TimestampRule(WhisperTimeStampLogitsProcessor):
    """Scores as its class gives them, behind those that suppress tokens."""

    def __init__(self, rule: WhisperTimeStampLogitsProcessor, before: Suppressed):
        self.__dict__.update(vars(rule))
        self.before, self.counters = before, torch.zeros(0, dtype=torch.int32, device="cpu")

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        if len(self.counters) != len(scores):
            self.counters = torch.zeros(len(scores), dtype=torch.int32, device=scores.device)
        return timestamp_rule(
            scores,
            input_ids[:, self.begin_index :],
            self.before.mask(input_ids, scores),
            self.counters,
            first=self.timestamp_begin,
            end=self.eos_token_id,
            initial=self.max_initial_timestamp_index,
            by_sum=self._detect_timestamp_from_logprob,
        )


class FirstRow(LogitsProcessor):
    """Changes nothing, and notes the tokens of the first row at each step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids[0].clone())
        return scores


def quicker(processors: Iterable[LogitsProcessor]) -> LogitsProcessorList:
    """The same, of which those that are known are ours."""
    found = LogitsProcessorList()
    for one in processors:
        behind = found[-1] if found and type(found[-1]) is Suppressed else Suppressed()
        if type(one) in (SuppressTokensLogitsProcessor, SuppressTokensAtBeginLogitsProcessor):
            behind.stock.append(one)
            found += [] if behind in found else [behind]
        elif type(one) is WhisperTimeStampLogitsProcessor:
            found[len(found) - (behind in found) :] = [TimestampRule(one, behind)]
        else:
            found.append(one)
    return found
