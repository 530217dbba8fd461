"""Requests batched by two GPUs that share a model: the tokens of one, from one graph a step on each."""

import pytest
import torch

from support.llm import families
from support.llm.parallel.batches import several
from support.ranks import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
PROMPTS = [[5, 6, 7], [9] * 9, [3, 4], [8] * 20, [5, 6, 7, 8]]
NEW = 40
DRAWN = {"do_sample": True, "num_return_sequences": 2, "top_k": 30, "max_new_tokens": NEW}


@pytest.fixture(scope="module")
def pool():
    made = RankPool(2, "nccl")
    yield made
    made.close()


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_batches_have_the_tokens_of_one_gpu(name, pool, tmp_path):
    model = families.make(name, vocab_size=100)
    model.save_pretrained(tmp_path)
    model.cuda()
    calls = [(PROMPTS, {"max_new_tokens": NEW}, {})] * 3 + [(PROMPTS, DRAWN, {})] * 2
    first, second = pool.run(several, str(tmp_path), calls, timeout=240.0)
    wanted = {}
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt], device="cuda")
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        wanted[f"req_{number}"] = (written[0, len(prompt) :].tolist(), None)
    assert [answers for answers, _ in first["calls"]] == [answers for answers, _ in second["calls"]]
    for answers, _ in first["calls"][:3]:
        assert answers == wanted
    assert first["calls"][3][0] == first["calls"][4][0]  # the same seeds, also once graphs are there
    assert first["fallbacks"] == second["fallbacks"] == []
    assert all(any(row["status"] == "graph" for row in rank["graphs"]) for rank in (first, second))
