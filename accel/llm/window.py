"""Which keys a query sees, asked of the function that a model makes its masks by."""

import torch

from accel.llm.understanding import NotUnderstood

QUERIES = (3, 77, 1500, 5003, 40_009, 200_003, 1_100_009)  # positions of queries whose view is looked at


def window(visible) -> int | None:
    """How many keys a query sees at most, itself included; None for all. Raises NotUnderstood for any other view."""
    found = None
    for query in QUERIES:
        keys = torch.arange(query + 2)
        zero = torch.zeros((), dtype=torch.int64)
        seen = torch.as_tensor(visible(zero, zero, torch.full_like(keys, query), keys)).expand(query + 2)
        count = int(seen.sum())
        if not count or not bool(seen[query + 1 - count : query + 1].all()) or bool(seen[query + 1]):
            raise NotUnderstood("its attention mask is neither causal nor a sliding window")
        if found is not None and count != found:
            raise NotUnderstood("its attention mask is not one sliding window")
        if count < query + 1:
            found = count
    return found
