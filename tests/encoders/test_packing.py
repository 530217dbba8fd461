"""Tokens one behind another in the sizes that graphs have, and which calls are one graph of the whole forward."""

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import packed_attention

import accel
import accel.encoders.packing
from accel.cuda_graphs.small_calls import MOST_TOKENS, SmallCalls
from accel.encoders.packing import Sight, bucket, padded, unpadded
from accel.errors import Unfit
from support.noted import noted
from support.objects.encoders import assert_same, fallbacks, ids_and_mask, made

X = torch.randn(3, 37, 16, generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([37, 1, 20])
MASK = torch.arange(37) < LENGTHS[:, None]


def attended(packing):
    """What one head gives in the packed order, and back in rows."""
    x = packing.pack(X)[:, None]
    y = packed_attention.reference(x, x, x, packing.starts, 0.25, longest=packing.longest, keys=packing.keys)
    return packing.unpack(y, *X.shape[:2])


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.share(1)
def test_padded_texts_in_the_size_of_a_graph(hidden):
    packing = padded(X, MASK, hidden, Sight(False, True, False, True), graph=True).packing(X)
    tokens = int(LENGTHS.sum()) if hidden else X.shape[:2].numel()
    assert (packing.size, len(packing.starts), len(packing.keys)) == (bucket(tokens), 5, 4)  # 3 rows as 4
    assert int(packing.starts[-1]) == tokens and packing.longest == 64 and packing.rows.shape == (packing.size,)
    wanted = F.scaled_dot_product_attention(X, X, X, MASK[:, None], scale=0.25)
    got = attended(packing)
    torch.testing.assert_close(got[MASK], wanted[MASK])
    if hidden:
        assert not got[~MASK].any()
    else:
        torch.testing.assert_close(got, wanted)


def test_rows_of_padding_from_which_a_mask_hides_all():
    x, shown = X * MASK[..., None], MASK[:, None] & MASK[..., None]
    packing = padded(x, MASK, False, Sight(True, False, False, True, alike=True), graph=True).packing(x)
    assert packing.padding.tolist() == [0, 36, 17, 0] and int(packing.starts[-1]) == int(LENGTHS.sum()) + 2
    p = packing.pack(x)[:, None]
    y = packed_attention.reference(
        p, p, p + 1, packing.starts, 0.25, longest=37, keys=packing.keys, padding=packing.padding
    )
    wanted = (0.25 * x @ x.mT).masked_fill(~shown, torch.finfo().min).softmax(-1) @ (x + 1)
    torch.testing.assert_close(packing.unpack(y, 3, 37), wanted)
    places = Sight(False, False, False, True)
    assert [padded(one, MASK, False, places).differ for one in (X, x, None)] == [True, False, False]
    with pytest.raises(Unfit, match="rows of padding that differ"):
        padded(X, MASK, False, Sight(True, False, False, True, alike=True)).packing(X)


def test_rows_are_known_while_kernels_are_only_compiled(monkeypatch):
    """Which are places, from which a GPU then reads."""
    monkeypatch.setattr(accel.encoders.packing, "warming_up", lambda: True)
    ran = noted(monkeypatch, accel.encoders.packing.packed_rows.__class__, "__call__", lambda *given: True)
    assert int(padded(X, MASK, True, Sight(False, True, False, True)).facts[0]) == int(LENGTHS.sum()) and not ran


def test_texts_without_padding_in_the_size_of_a_graph():
    packing = unpadded(X, graph=True)
    assert packing.size == bucket(111) == 112 and packing.starts.tolist() == [0, 37, 74, 111, 111]
    assert not packing.pack(X)[111:].any()
    torch.testing.assert_close(attended(packing), F.scaled_dot_product_attention(X, X, X, scale=0.25))


IDS = torch.ones(2, 8, dtype=torch.int64)
CASES = {
    "no mask": ({"input_ids": IDS}, True),
    "a full mask": ({"input_ids": IDS, "attention_mask": IDS}, True),
    "padding": ({"input_ids": IDS, "attention_mask": IDS.tril()}, False),
    "a mask of another form": ({"input_ids": IDS, "attention_mask": IDS[None, None]}, False),
    "many tokens": ({"input_ids": IDS.new_ones(2, MOST_TOKENS)}, False),
    "images": ({"pixel_values": X}, True),
    "images with a mask of patches": ({"pixel_values": X, "pixel_attention_mask": IDS}, False),
    "sound with a mask of frames": ({"input_features": X, "input_features_mask": IDS}, False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.share(1)
def test_calls_that_are_one_graph(case):
    given, taken = CASES[case]
    small = SmallCalls()
    small.packed = True
    assert small.takes(given) is taken and not small.unpadded
    with small.taken():
        assert small.unpadded
    assert not small.unpadded


def test_rows_of_padding_are_zeros_where_the_user_asks_for_that():
    model, stock = made("Bert")
    accel.optimize(model, padding="zeros")
    call = ids_and_mask()
    real = call["attention_mask"].bool()
    with torch.no_grad():
        got, wanted = (one(**call).last_hidden_state for one in (model, stock))
    torch.testing.assert_close(got[real], wanted[real], rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))
    assert not got[~real].any() and not fallbacks(model)
    with pytest.raises(ValueError, match="padding='none' is not one of 'stock', 'zeros'"):
        accel.optimize(model, padding="none")


@pytest.mark.parametrize(("family", "side"), [("Bert", "empty"), ("MPNet", "holes")])
def test_a_hook_in_front_of_the_layers_is_called_once(family, side):
    """Also where its mask has a call run stock, which is known before the model's code begins."""
    (model, stock), heard = made(family), []
    accel.optimize(model)
    for one in (model.embeddings, stock.embeddings):
        one.register_forward_hook(lambda module, *_: heard.append(module is model.embeddings))
    for padding in ("right", side):
        assert_same(model, stock, **ids_and_mask(padding))
    assert heard == [True, False] * 2 and len(fallbacks(model)) == 1
