"""Patch embeddings as products."""

import pytest
import torch
import transformers as t
from torch import nn

import accel
from accel.encoders.inputs import inputs_of, small_call
from accel.fusion.patch_embedding import PatchEmbeddingForward


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv2d(3, 8, (4, 2), (4, 2)), (2, 3, 13, 8)),  # with a rest at an edge
        (nn.Conv2d(3, 8, 4, 4, bias=False).to(memory_format=torch.channels_last), (1, 3, 8, 12)),
        (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)), (2, 3, 5, 8, 8)),
        (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)), (7, 3, 2, 4, 4)),
    ],
)
def test_a_patch_embedding_is_one_product(convolution, shape):
    model = nn.Sequential(convolution).eval()
    forward = PatchEmbeddingForward(
        convolution, "", accel.patching.fast_forward.Kernels(None, nn.functional.linear), None
    )
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(forward.fast(x), model(x), rtol=1e-5, atol=1e-5)
        assert forward.unfit(x) is None and forward.unfit(x[0]) and forward.unfit(x.double())
        assert forward.unfit(x[..., : convolution.kernel_size[-1] - 1])  # of which PVT v2 would give logits


VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}


@pytest.mark.parametrize("name", ["Siglip2Vision", "ViT"])
def test_patches_are_known_where_a_library_replaced_their_layer(name):
    sizes = VIT | ({"num_patches": 16} if name == "Siglip2Vision" else {"image_size": 16})
    model = getattr(t, f"{name}Model")(getattr(t, f"{name}Config")(**sizes)).eval()
    wanted = small_call(model, inputs_of(model))
    for one in model.modules():
        if type(one) in (nn.Linear, nn.Conv2d):
            one.__class__ = type("Quantized", (type(one),), {})
    assert small_call(model, inputs_of(model))["pixel_values"].shape == wanted["pixel_values"].shape
