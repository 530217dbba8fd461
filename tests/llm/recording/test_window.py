"""Windows that are read from a mask, and a recording that leaves no trace."""

import pytest
import torch
from transformers.masking_utils import (
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

import accel
from accel.llm.recording.record import NotUnderstood, Record
from accel.llm.recording.recorder import NAME
from accel.llm.recording.window import BLOCK, Chunk, window, window_through
from support.llm.edits.modules import llama_with
from support.llm.families import make


def causal(row, head, query, key):
    return key <= query


@pytest.mark.parametrize("size", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, None])
def test_how_many_keys_are_seen(size):
    def sliding(row, head, query, key):
        return (key <= query) & (key > query - size)

    assert window(causal if size is None else sliding) == size


def chunked(size):
    return lambda row, head, query, key: causal(row, head, query, key) & (key // size == query // size)


@pytest.mark.parametrize("size", [1, 3, 6, 4096, 8192, 12_345])
def test_chunks_are_seen(size):
    found = window(chunked(size))
    assert found == size and isinstance(found, Chunk) == (size > 1)


@pytest.mark.parametrize(
    "other",
    [
        lambda row, head, query, key: causal(row, head, query, key) & (key != 5 * BLOCK),
        lambda row, head, query, key: causal(row, head, query, key) & (key != 0) & (query > 40_009),
        lambda row, head, query, key: key <= query + 1,
        lambda row, head, query, key: key < query,
        lambda row, head, query, key: causal(row, head, query, key) & ((key + 7) // 4096 == (query + 7) // 4096),
        lambda row, head, query, key: (
            chunked(4096)(row, head, query, key) | (causal(row, head, query, key) & (key < 4))
        ),
        lambda row, head, query, key: causal(row, head, query, key) & ((key > query - 9) | (key < 4)),
        lambda row, head, query, key: key < 0,
    ],
    ids=["one left out", "blind", "the next", "not itself", "begun chunks", "chunks and sinks", "sinks", "nothing"],
)
def test_any_other_view_is_not_understood(other):
    with pytest.raises(NotUnderstood):
        window(other)


def test_a_model_that_keeps_its_attention_is_judged_by_all_masks_it_makes():
    """It may have added something to its mask: which one a layer was given cannot be told, and all must be alike."""
    zeros, sliding = torch.zeros(1), sliding_window_causal_mask_function(5)
    alike = [(zeros, causal_mask_function), (None, causal_mask_function)]
    assert window_through(Record([], own=True, masks=alike), zeros + 1) is None
    with pytest.raises(NotUnderstood, match="in a way of its own"):
        window_through(Record([], own=True, masks=[*alike, (zeros, sliding)]), zeros)
    assert window_through(Record([], masks=[*alike, (None, sliding)]), zeros) is None


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-alibi", "llama-rope-dynamic", "phi3-longrope", "jamba"])
def test_looking_leaves_no_trace(name, tiny):
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    model = make(name).train()
    before, registries = tiny.snapshot(model), [AttentionInterface, AttentionMaskInterface]
    entries = [dict(registry._global_mapping) for registry in registries]
    config, rng = model.config.to_dict(), torch.get_rng_state()
    accel.restore(accel.optimize(model))
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert [registry._global_mapping for registry in registries] == entries
    assert NAME not in AttentionInterface._global_mapping
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), rng)


def test_an_error_while_looking_leaves_no_trace(tiny):
    def broken(layer):
        layer.mlp.__class__ = type("Broken", (type(layer.mlp),), {"forward": lambda self, x: 1 / 0})

    model = llama_with(broken)
    before = tiny.snapshot(model)
    sites = accel.report(accel.optimize(model)).sites
    reason = "its forward refuses the examined call: ZeroDivisionError: division by zero"
    assert sites[0] == ("", "language model", "skipped", reason)
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_optimizing_twice_plans_anew(tiny):
    model = make("llama")
    before = tiny.snapshot(model)
    accel.optimize(model)
    accel.optimize(model, graphs=False)
    assert accel.report(model).summary().startswith("5 sites patched, 0 skipped")
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


@pytest.mark.parametrize("width", [None, 5])
@pytest.mark.share(1)
def test_blocks_of_images_that_a_text_has_none_of_change_nothing(width):
    plain = causal_mask_function if width is None else sliding_window_causal_mask_function(width)
    assert window(or_masks(plain, blockwise_overlay(torch.full((2, 9), -1)))) == width


@pytest.mark.parametrize("block", [0, 3])
@pytest.mark.share(1)
def test_blocks_that_a_text_is_in_are_not_understood(block):
    with pytest.raises(NotUnderstood, match="attention mask"):
        window(or_masks(causal_mask_function, blockwise_overlay(torch.full((2, 9), block))))
