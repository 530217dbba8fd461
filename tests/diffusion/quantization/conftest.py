"""UNets whose linears can be quantized, and whose rows can be rounded."""

import pytest
import torch

from support.diffusion.outputs import in_dtype


@pytest.fixture
def unet(tiny):
    """Maker of a UNet of a family, whose prompt is wide enough for weights in 8 bits."""
    return lambda family="sd15": tiny.unet(family, cross_attention_dim=16)


@pytest.fixture
def unet_and_inputs(tiny):
    """Maker of a UNet of a family, all of whose linears can be multiplied in 8 bits, and of its inputs."""

    def make(family="sd15", dtype=torch.float64):
        sizes = {"block_out_channels": (16, 32), "cross_attention_dim": 16}
        model = tiny.unet(family, **sizes).to(dtype)
        inputs = tiny.inputs(model, height=16, width=18)
        return model, in_dtype(inputs, torch.float64) if dtype == torch.float64 else inputs

    return make
