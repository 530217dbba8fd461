"""A model to optimize beside its untouched twin."""

import copy

import pytest


@pytest.fixture
def pair(tiny):
    """A model, its untouched twin, and inputs."""
    model = tiny.unet()
    return model, copy.deepcopy(model), tiny.inputs(model)
