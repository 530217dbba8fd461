"""A model on the GPU beside its untouched twin."""

import copy

import pytest


@pytest.fixture
def pair(tiny):
    """A half-precision model on the GPU and its untouched twin."""
    model = tiny.unet(sample_size=16).cuda().half()
    return model, copy.deepcopy(model)
