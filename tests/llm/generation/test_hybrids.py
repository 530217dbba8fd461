"""Hybrids with linear attention beyond the table of modes: what padding may be, looks at states, repeated forwards."""

import copy
import itertools

import pytest
import torch

import accel
from accel.comparison import relative_rms_by_token
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.layer_forward import LayerForward
from accel.llm.kv_cache.cache import store_of
from accel.llm.kv_cache.state_layer import StateLayer
from support.llm.families import layers as layers_of
from support.llm.families import make, padded
from support.llm.miniatures.mambas import MAMBAS
from support.llm.outputs import same

HYBRIDS = ("qwen3.5", "bamba", "falcon-h1")


@pytest.fixture(scope="module", params=HYBRIDS)
def pair(request):
    return accel.optimize(make(request.param)), make(request.param)


def logits(model, ids, mask, cache=None, positions=None):
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": True, "position_ids": positions}
    with torch.no_grad():
        return model(**given, **({} if cache is None else {"past_key_values": cache}))


def fallbacks(model) -> dict[str, int]:
    return {reason: calls for path, reason, calls in accel.report(model).fallbacks if path == ""}


@pytest.mark.parametrize("hidden", [1, 3, 8])
@pytest.mark.share(1)
def test_padding_stands_in_front_or_stock_runs(pair, hidden):
    """Stock takes padding between or behind tokens for zeros, over which states decay and windows move on."""
    ours, _ = pair
    ids, mask = padded((9, 9))
    mask[1, hidden] = 0
    positions, before = (mask.cumsum(1) - 1).clamp_min(0), sum(fallbacks(ours).values())
    mine, theirs = (logits(model, ids, mask, positions=positions).logits[mask.bool()] for model in pair)
    assert sum(fallbacks(ours).values()) > before
    same({"logits": mine}, {"logits": theirs}, 4e-5)


def test_looking_at_states_makes_a_stock_layer_which_is_taken_back(pair):
    ours, _ = pair
    ids, mask = padded((9, 5))
    found = [logits(model, ids, mask, positions=(mask.cumsum(1) - 1).clamp_min(0)) for model in pair]
    caches = [one["cache"] if "cache" in one else one["past_key_values"] for one in found]
    layer = caches[0].layers[0]
    assert isinstance(layer, StateLayer) and store_of(caches[0]) is not None
    held = layer.recurrent_states[0]
    assert not isinstance(layer, StateLayer) and store_of(caches[0]) is None
    torch.testing.assert_close(held, caches[1].layers[0].recurrent_states[0], rtol=2e-4, atol=2e-5)
    more = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
    given = ids[:, :1], more
    place = (more.cumsum(1) - 1)[:, -1:]
    mine, theirs = (logits(m, *given, cache, place).logits for m, cache in zip(pair, caches, strict=True))
    same({"logits": mine}, {"logits": theirs}, 4e-5)
    assert isinstance(caches[0].layers[0], StateLayer) and not fallbacks(ours).get("a cache layer of another kind")


def test_a_step_may_be_repeated_and_taken_back(pair):
    """As where a graph is captured and timed, or a step is launched that nobody wants."""
    ours, _ = pair
    forward = vars(ours)["forward"]
    ids, _ = padded((9, 9))
    output = logits(ours, ids, None)
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    store = store_of(cache)
    positions = torch.full((2, 1), 9)
    step = (ids[:, :1], positions)

    def run(tokens, positions):
        with torch.no_grad():
            store.reserve(2, store.length + 1)
            return forward.eager(store, False, tokens, positions, store.metadata, 0)

    once, again = run(*step), run(*step)
    assert torch.equal(once, again)
    store.advance(1)
    other = run(ids[:, 1:2], positions + 1)
    store.advance(1)
    store.crop(10)
    assert torch.equal(run(ids[:, 1:2], positions + 1), other)
    with pytest.raises(RuntimeError, match="does not track past states"):
        store.crop(3)


def test_what_is_optimized_copies_and_is_put_back(pair):
    ours, stock = pair
    twin = copy.deepcopy(ours)
    ids, mask = padded((9, 5))
    call = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    wanted = stock.generate(ids, **call)
    assert torch.equal(twin.generate(ids, **call), wanted)
    accel.restore(twin)
    assert "forward" not in vars(twin) and torch.equal(twin.generate(ids, **call), wanted)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", MAMBAS, ids=str)
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_a_model_of_states_alone_writes_what_stock_writes(family, beams):
    ours, stock = accel.optimize(make(family)), make(family)
    ids, mask = padded((9, 2))
    call = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    assert torch.equal(ours.generate(ids, **call), stock.generate(ids, **call))
    assert "forward" in vars(ours) and not fallbacks(ours)


def test_states_are_not_rounded():
    ours, stock = accel.optimize(make(MAMBAS[2]), kv_cache="int8"), make(MAMBAS[2])
    told = next(row[3] for row in accel.report(ours).sites if row[1] == "language model")
    assert told.startswith("nothing in int8: states stay as they are")
    call = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(padded()[0], **call), stock.generate(padded()[0], **call))


def test_a_token_at_a_time_padding_is_read_as_stock_reads_it(pair):
    """No mask is made of a single token, at the beginning neither."""
    ids, mask = padded((9, 7))
    call = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "prefill_chunk_size": 1}
    assert torch.equal(*(model.generate(ids, **call) for model in pair))


@pytest.mark.parametrize("cuts", [(1, 9, 14), (2, 7, 8, 11), (3, 8, 16)], ids=str)
def test_pieces_of_a_padded_text_are_read_as_stock_reads_them(pair, cuts):
    """Padding that was read alone counts as words, and then a mask hides more of it."""
    ids, mask = padded((20, 8))
    found, positions = [], (mask.cumsum(1) - 1).clamp_min(0)
    for model in pair:
        cache, pieces = None, []
        for start, end in itertools.pairwise((0, *cuts, 20)):
            output = logits(model, ids[:, start:end], mask[:, :end], cache, positions[:, start:end])
            cache = output["cache"] if "cache" in output else output["past_key_values"]
            pieces.append(output.logits)
        found.append(torch.cat(pieces, 1)[mask.bool()])
    same({"logits": found[0]}, {"logits": found[1]}, 4e-5)


def error(model, ids, wanted):
    """The usual one: in random models a few tokens hang on the rounding of one number."""
    return relative_rms_by_token(logits(model, ids, None).logits, wanted).log().mean().exp()


@pytest.mark.parametrize("family", (*MAMBAS, "jamba", "lfm2"), ids=str)
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_in_16_bits_it_is_as_near_to_full_precision_as_stock(family):
    """Some keep the sum that all layers share in float32."""
    stock = make(family, torch.bfloat16)
    wide, ours = copy.deepcopy(stock).float(), accel.optimize(copy.deepcopy(stock))
    ids, _ = padded((50, 50, 50))
    wanted = logits(wide, ids, None).logits
    assert error(ours, ids, wanted) <= 1.1 * error(stock, ids, wanted)
    assert type(vars(ours)["forward"]) is DecoderForward and not fallbacks(ours)
    assert all(type(vars(layer)["forward"]) is LayerForward for layer in layers_of(ours).values())


def test_a_sum_that_may_be_wider_than_weights_runs_stock():
    """Whether it is cannot be seen where all is in float32."""
    ours, stock = accel.optimize(make(MAMBAS[0])), make(MAMBAS[0])
    ids, _ = padded((9, 9))
    mine, theirs = (logits(model.bfloat16(), ids, None).logits for model in (ours, stock))
    assert torch.equal(mine, theirs)
    assert any("looked at in float32" in reason for reason in fallbacks(ours))
