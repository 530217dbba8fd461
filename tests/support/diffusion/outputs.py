"""What a denoiser gives for inputs, and how near two outputs are."""

import torch


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def close(got, wanted, share=1e-5):
    """Apart by at most this share of the largest value."""
    torch.testing.assert_close(got, wanted, rtol=0, atol=share * float(wanted.abs().max()))


def error(output, truth) -> float:
    """Root mean square, relative to the truth's."""
    return float((output.double() - truth.double()).norm() / truth.double().norm())
