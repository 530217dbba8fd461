"""Any order of changes under a budget: what stock gives all along, and no buffer is left.

All of it: ACCEL_TEST_EVERYTHING=1 python -m pytest tests/offload/test_budget_soak.py
"""

import copy
import random
from functools import partial

import pytest
import torch
from diffusers.utils.peft_utils import recurse_remove_peft_layers
from peft import LoraConfig, inject_adapter_in_model

import accel
from support.everything import EVERYTHING
from support.objects.streaming import flux, llama, stored, within

SIZES = (4, 9, 16, 40)


class Soak:
    """A model that is changed and its twin, which accel never saw. options: as it was optimized, if it is."""

    def __init__(self, make, seed):
        torch.manual_seed(seed)
        self.model, self.call = make()
        self.twin, self.random = copy.deepcopy(self.model), random.Random(seed)
        self.options, self.adapted, self.made = None, False, 0

    def both(self, change):
        for one in (self.model, self.twin):
            torch.manual_seed(self.made)
            change(one)
        self.made += 1

    def optimize(self):
        memory = int(1.1 * within(self.twin, self.random.choice((0.3, 0.6, 1.0))))  # adapters go to the card
        weights = self.random.choice((None, None, "int8")) if "generate" in dir(self.model) else None
        self.options = {"weights": weights}
        accel.optimize(self.model, memory=memory, **self.options)

    def restore(self):
        accel.restore(self.model)
        self.options = None

    def adapt(self):
        config = LoraConfig(r=2, target_modules=["to_q", "q_proj"], init_lora_weights=False)
        put_on = partial(inject_adapter_in_model, config)
        self.both(recurse_remove_peft_layers if self.adapted else put_on)
        self.adapted = not self.adapted

    def edit(self):
        def change(one):
            weights = [weight for name, weight in one.named_parameters() if name.endswith("weight")]
            weight = weights[self.random.choice(range(len(weights)))] if one is self.model else weights[self.last]
            self.last = next(i for i, other in enumerate(weights) if other is weight)
            weight.data += 0.01

        if self.options is None or self.options["weights"] is None:  # else weights are rounded already
            self.both(change)

    def cast(self):
        self.both(lambda one: one.to(torch.float64).to(torch.float32))

    def copied(self):
        self.model = copy.deepcopy(self.model)

    def reload(self):
        if self.options is None or self.options["weights"] is None:
            self.model.load_state_dict(stored(self.twin))

    def compare(self):
        wanted, size = self.twin, self.random.choice(SIZES)
        if self.options is not None and self.options["weights"] is not None:
            wanted = accel.optimize(copy.deepcopy(self.twin), **self.options)
        apart = (self.call(self.model, size).float() - self.call(wanted, size).float()).abs().max()
        assert float(apart) < 5e-5
        if wanted is self.twin:
            found, there = self.model.state_dict(), self.twin.state_dict()
            assert found.keys() == there.keys() and all(torch.equal(found[name], there[name]) for name in there)


@pytest.mark.parametrize("make", [flux, llama])
@pytest.mark.parametrize("seed", range(5 if EVERYTHING else 1))
@torch.no_grad()
@pytest.mark.turns(2)
def test_any_order_of_changes(make, seed, streaming):
    soak = Soak(make, seed)
    changes = [soak.optimize, soak.optimize, soak.restore, soak.adapt, soak.edit, soak.cast, soak.copied, soak.reload]
    for number in range(30 if EVERYTHING else 4):
        change = soak.optimize if number == 0 else soak.random.choice(changes)
        change()
        soak.compare()
        assert streaming() <= 4, change
    soak.restore()
    soak.compare()
    del soak, change, changes
    assert streaming() == 0
