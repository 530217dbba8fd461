"""Whatever may be done with a model and a cache, in random order: the same logits as stock's after every step."""

import pytest

import accel
from support.llm.walks import walk


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "bloom", "mixtral"])
@pytest.mark.share(3)
def test_a_random_walk(name, seed, pair_of):
    ours, stock = pair_of(name)
    assert ("", "language model", "patched") in {site[:3] for site in accel.report(ours).sites}
    walk(ours, stock, seed)
