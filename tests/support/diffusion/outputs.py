"""What a denoiser gives for inputs, and how near two outputs are."""

import torch
from torch.utils._pytree import tree_map_only


def in_dtype(tree, dtype, device=None):
    """Nested inputs on a device, those of fractions in this dtype."""
    return tree_map_only(torch.Tensor, lambda t: t.to(device, dtype if t.is_floating_point() else None), tree)


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def close(got, wanted, share=1e-5):
    """Apart by at most this share of the largest value."""
    torch.testing.assert_close(got, wanted, rtol=0, atol=share * float(wanted.abs().max()))


def error(output, truth) -> float:
    """Root mean square, relative to the truth's."""
    return float((output.double() - truth.double()).norm() / truth.double().norm())
