"""Transformers that diffusers divides along the sequence: our blocks between its collectives, in either order."""

import pytest

from support.parallel import diffusion_ranks as told_to

NAMES = ("FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel")


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_planned_on_the_local_sequence(ranks, name):
    for found in ranks.run(told_to.sequence, name, False):
        assert found.pop("stock") <= 1e-5
        for off, ran, told, restored in found.values():
            assert off <= 1e-5 and ran and all(ran) and not told and restored, name


def test_attention_that_writes_into_tensors_of_others_runs_stock(ranks):
    """Sequences of any length: ranks tell each other their sizes."""
    for found in ranks.run(told_to.sequence, NAMES[0], True):
        assert found.pop("stock") <= 1e-5
        for off, ran, told, restored in found.values():
            assert off == 0 and ran and not any(ran) and restored
            assert told and all("cannot be recorded: ranks write into tensors of each other" in one for one, _ in told)
