"""How a model wants to be called is found by trying."""

import accel
from support.llm.families import make


def test_the_manner_of_a_model_is_found_by_trying():
    model = accel.optimize(make("opt"))
    assert vars(model)["forward"].convention.positions == "counted by the mask"
    assert vars(accel.optimize(make("llama")))["forward"].convention.positions == "0, 1, 2 .."
    assert not vars(accel.optimize(make("bloom")))["forward"].convention.mask
