"""How far a token sees both ways, as told by the function that its mask was made by."""

from collections.abc import Callable
from typing import Any

import torch

from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.window import of_any_length

QUERIES = (3, 77, 5003, 200_003)  # positions of queries whose view is looked at
MOST = 1 << 17  # how far

Reach = tuple[int | None, int | None]  # to the left and to the right, each None for all


def reach_of(visible: Callable[..., Any]) -> Reach | None:
    """How far a query sees to both sides by visible(row, head, query, key). Raises NotUnderstood for other views."""
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    found, whole, visible = set(), 0, of_any_length(visible)
    for query in QUERIES:
        keys = torch.arange(max(0, query - MOST), query + MOST, device="cpu")
        try:
            seen = torch.as_tensor(visible(zero, zero, torch.full_like(keys, query), keys)).expand(len(keys)).nonzero()
        except (IndexError, RuntimeError) as error:  # it looks positions up
            raise NotUnderstood("its attention mask is made of more than positions") from error
        first, last = (int(keys[seen[at]]) if len(seen) else -1 for at in (0, -1))
        if last - first + 1 != len(seen) or not first <= query <= last:
            raise NotUnderstood("its attention mask is no window")
        # Where the view ends with the keys that are looked at, it may go on.
        whole = max(whole, query - first) if first == keys[0] else whole
        found.add((None if first == keys[0] else query - first, None if last == keys[-1] else last - query))
    lefts, rights = {left for left, _ in found} - {None}, {right for _, right in found}
    # In chunks the first queries see all, which in a window of that width they would not.
    if len(lefts) > 1 or len(rights) != 1 or min(filter(None, lefts), default=MOST) < whole:
        raise NotUnderstood("its attention mask is no window that is known")
    reach = next(iter(lefts), None), rights.pop()
    return None if reach == (None, None) else reach
