"""Whisper's rule of timestamps, by tensors alone."""

import torch
from transformers import WhisperTimeStampLogitsProcessor

NEVER = -float("inf")


class TimestampRule(WhisperTimeStampLogitsProcessor):
    """Scores as its class gives them. That reads every row from the device at each step; this does not."""

    def __init__(self, rule: WhisperTimeStampLogitsProcessor):
        self.__dict__.update(vars(rule))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        first, begun = self.timestamp_begin, input_ids[:, self.begin_index :]
        scores = scores.clone()
        text, times = scores[:, :first], scores[:, first:]
        scores[:, self.no_timestamps_token_id] = NEVER
        if begun.shape[1]:
            stamped = begun >= first
            last, before = stamped[:, -1:], stamped[:, -2:-1] if begun.shape[1] > 1 else stamped.new_ones(1, 1)
            pair, opened = last & before, last & ~before
            times.masked_fill_(pair, NEVER)
            scores[:, : self.eos_token_id].masked_fill_(opened, NEVER)
            places = torch.arange(1, begun.shape[1] + 1, device=begun.device)
            latest = (stamped * places).amax(1, keepdim=True)  # 0 for none
            least = begun.gather(1, (latest - 1).clamp(min=0)) - first + ~opened
            columns = torch.arange(times.shape[1], device=begun.device)
            times.masked_fill_((latest > 0) & (columns < least), NEVER)
        else:
            text.fill_(NEVER)
            if self.max_initial_timestamp_index is not None:
                times[:, self.max_initial_timestamp_index + 1 :] = NEVER
        if self._detect_timestamp_from_logprob:
            logprobs = torch.nn.functional.log_softmax(scores.float(), dim=-1)
            likelier = logprobs[:, first:].logsumexp(-1) > logprobs[:, :first].amax(-1)
            text.masked_fill_(likelier[:, None], NEVER)
        return scores
