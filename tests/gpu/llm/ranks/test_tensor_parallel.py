"""A model divided over two GPUs by transformers: tokens of one, graphs, and sums through memory that both can read."""

import pytest
import torch

from support.llm import families
from support.llm.parallel import ranks
from support.ranks import RankPool

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CALLS = 3  # the second call of a shape captures, the third replays
STEPS = 12


@pytest.fixture(scope="module")
def pool():
    made = RankPool(2, "nccl")
    yield made
    made.close()


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen3", "gpt-neox", "mixtral"])
def test_tokens_of_one_gpu(name, pool, tmp_path):
    model = families.make(name, vocab_size=100)  # which transformers 5.17 wants to be even
    model.save_pretrained(tmp_path)
    tokens = model.cuda().generate(**ranks.padded_call("cuda", STEPS)).tolist()
    for found in pool.run(ranks.write_on_gpus, str(tmp_path), CALLS, STEPS, {"tp_size": 2}, timeout=240.0):
        assert found["stock"] == [tokens] * CALLS and found["optimized"] == [tokens] * CALLS
        assert found["fallbacks"] == [] and found["restored"]
        assert [row for row in found["graphs"] if row["status"] == "graph"]
        assert found["shared_memory"]
