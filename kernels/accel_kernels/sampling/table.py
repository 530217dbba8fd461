"""How tokens are chosen, for each of the requests that a model answers at once."""

from typing import NamedTuple

import torch

WORD = 32  # places of the vocabulary to a word of `seen`


class SamplingTable(NamedTuple):
    """Settings and state of R requests on one device. `sample` finds a request by its row.

    temperature: (R,) fp32; 0 means greedy, and no filter is looked at. top_k: (R,) int32, 0 means off. top_p, min_p:
    (R,) fp32, 1 and 0 mean off. penalty: (R,) fp32, the repetition penalty, 1 means off. seeds: (R,) int64.

    State, which `sample` changes in place: drawn: (R,) int64, how many tokens a request has drawn with its seed.
    seen: (R, words) int32, a bit for each place of the vocabulary, the lowest first: the tokens the penalty is for.
    None where no request has a penalty. split_counters: (R,) int32 zeros, by which programs of one launch count
    themselves and which they leave as zeros.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    penalty: torch.Tensor
    seeds: torch.Tensor
    drawn: torch.Tensor
    split_counters: torch.Tensor
    seen: torch.Tensor | None = None


def seen_words(vocabulary: int) -> int:
    """Words of `seen` to a request."""
    return -(-vocabulary // WORD)
