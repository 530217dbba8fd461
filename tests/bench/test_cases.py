"""The cases of `accel bench`: which run where, and that real ones are the published sizes."""

import pytest
import torch

from accel.bench.cases import CASES, select
from accel.bench.dit.published import PUBLISHED


def test_without_names_every_unet_and_its_decoder_or_the_tiny_one():
    assert [case.name for case in select([], torch.device("cpu"))] == ["tiny"]
    on_gpu = {case.name for case in select([], torch.device("cuda"))}
    assert on_gpu == set(CASES) - {"tiny"} - {published.name for published in PUBLISHED}
    assert [case.name for case in select(["sdxl", "sd15", "sdxl"], torch.device("cpu"))] == ["sdxl", "sd15"]


@pytest.mark.parametrize("case", select([], torch.device("cuda")), ids=lambda case: case.name)
def test_these_are_the_published_sizes(case):
    """Built on the meta device, so that it costs nothing: the parameter counts everybody knows."""
    millions = sum(p.numel() for p in case.build(torch.device("meta"), torch.float16).parameters()) / 1e6
    unets = {"sd15": 859.5, "sd15-b16": 859.5, "sd21": 865.9, "sdxl": 2567.5}
    known = unets | dict.fromkeys(("vae512", "vae1024", "vae-sdxl"), 83.7)
    assert millions == pytest.approx(known[case.name], abs=0.1)
