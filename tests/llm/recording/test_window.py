"""A mask function is asked about every key, one block of them after the other; of several masks all must be alike."""

import pytest
import torch
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from accel.llm.recording.errors import NotUnderstood
from accel.llm.recording.record import Record
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


def test_a_model_that_keeps_its_attention_is_judged_by_all_masks_it_makes():
    """It may have added something to its mask: which one a layer was given cannot be told, and all must be alike."""
    zeros, sliding = torch.zeros(1), sliding_window_causal_mask_function(5)
    alike = [(zeros, causal_mask_function), (None, causal_mask_function)]
    assert Record([], own=True, masks=alike).window(zeros + 1) is None
    with pytest.raises(NotUnderstood, match="in a way of its own"):
        Record([], own=True, masks=[*alike, (zeros, sliding)]).window(zeros)
    assert Record([], masks=[*alike, (None, sliding)]).window(zeros) is None
