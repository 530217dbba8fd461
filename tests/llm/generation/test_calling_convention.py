"""How a model wants to be called is found by trying."""

import accel
from support.llm.direct_calls import both, shown
from support.llm.families import make, padded


def test_the_manner_of_a_model_is_found_by_trying():
    model = accel.optimize(make("opt"))
    assert vars(model)["forward"].convention.positions == "counted by the mask"
    assert vars(accel.optimize(make("llama")))["forward"].convention.positions == "0, 1, 2 .."
    assert not vars(accel.optimize(make("bloom")))["forward"].convention.mask


def test_positions_that_a_model_counts_by_its_mask(pair_of):
    ids, mask = padded((9, 5))
    both(pair_of("opt"), lambda model: {"logits": shown(model(ids, attention_mask=mask).logits, mask)})
