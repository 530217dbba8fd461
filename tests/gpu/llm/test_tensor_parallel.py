"""A model divided over two GPUs by transformers: tokens of one, graphs, and sums through memory that both can read."""

import pytest
import torch

from support.llm import families, ranks
from support.ranks import RankPool

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CALLS = 3  # the second call of a shape captures, the third replays
STEPS = 12


@pytest.fixture(scope="module")
def pool():
    made = RankPool(2, "nccl")
    yield made
    made.close()


def call() -> dict:
    ids, mask = families.padded((9, 5))
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda(), "max_new_tokens": STEPS, "do_sample": False}


def on_gpus(folder: str, calls: int, plan: dict, given: dict) -> dict:
    found = ranks.write(folder, [call() for _ in range(calls)], {}, plan, given)
    return {name: value for name, value in found.items() if name != "collectives"}


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen3", "gpt-neox", "mixtral"])
def test_tokens_of_one_gpu(name, pool, tmp_path):
    model = families.make(name)
    model.save_pretrained(tmp_path)
    tokens = model.cuda().generate(**call()).tolist()
    for found in pool.run(on_gpus, str(tmp_path), CALLS, {"tp_size": 2}, {}, timeout=240.0):
        assert found["stock"] == [tokens] * CALLS and found["optimized"] == [tokens] * CALLS
        assert found["fallbacks"] == [] and found["restored"]
        assert [row for row in found["graphs"] if row["status"] == "graph"]
        assert found["shared_memory"]
