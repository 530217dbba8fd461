"""A mask function is asked about every key, one block of them after the other."""

import pytest

from accel.llm.recording.errors import NotUnderstood
from accel.llm.recording.window import BLOCK, window


def causal(row, head, query, key):
    return key <= query


@pytest.mark.parametrize("size", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, None])
def test_how_many_keys_are_seen(size):
    def sliding(row, head, query, key):
        return (key <= query) & (key > query - size)

    assert window(causal if size is None else sliding) == size


@pytest.mark.parametrize(
    "other",
    [
        lambda row, head, query, key: causal(row, head, query, key) & (key != 5 * BLOCK),
        lambda row, head, query, key: causal(row, head, query, key) & (key != 0) & (query > 40_009),
        lambda row, head, query, key: key <= query + 1,
        lambda row, head, query, key: key < query,
        lambda row, head, query, key: causal(row, head, query, key) & (key // 4096 == query // 4096),
        lambda row, head, query, key: causal(row, head, query, key) & ((key > query - 9) | (key < 4)),
        lambda row, head, query, key: key < 0,
    ],
    ids=["one left out", "blind", "the next", "not itself", "chunks", "sinks", "nothing"],
)
def test_any_other_view_is_not_understood(other):
    with pytest.raises(NotUnderstood):
        window(other)
