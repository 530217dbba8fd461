"""What optimizing leaves in memory: nothing but the weights, and at once, not when the garbage collector comes."""

import gc
import warnings

import pytest
import torch

import accel
from support.everything import EVERYTHING
from support.llm.families import BY_NAME, FAMILIES, available, make

FAST = ["llama", "gemma2", "bloom", "mixtral", "phi3-longrope", *(["gpt2", "falcon-grouped", "granite"] * EVERYTHING)]
OTHERS = [family.name for family in FAMILIES if family.expected != "fast"][: 4 if EVERYTHING else 1]


def tensors() -> list[torch.Tensor]:
    """All that are not set aside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects do not like to be asked what they are
        return [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]


@pytest.mark.parametrize("name", [*FAST, *OTHERS])
@pytest.mark.share(4)
def test_optimizing_keeps_nothing_of_what_it_looked_at(name, few_objects):
    """A record of an 8B model is 200 MB; in a circle of references it stayed for many calls."""
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    model = make(name)
    gc.collect()
    known = {id(tensor) for tensor in tensors()}
    gc.disable()
    try:
        accel.optimize(model)
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        left = sum(one.nbytes for one in tensors() if id(one) not in known | own)
    finally:
        gc.enable()
    assert left <= 1024, f"{left} bytes"
