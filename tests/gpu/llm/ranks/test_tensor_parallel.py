"""A model divided over two GPUs by transformers: tokens of one, graphs, and sums through memory that both can read."""

import subprocess
import sys

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


ENDING = """
import sys, time, torch, torch.distributed as dist, accel
from transformers import AutoModelForCausalLM
dist.init_process_group("nccl", device_id=torch.device("cuda", int(__import__("os").environ["LOCAL_RANK"])))
torch.cuda.set_device(dist.get_rank())
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto")
accel.optimize(model)
ids = torch.arange(1, 9, device=model.device)[None]
for _ in range(3):
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
assert any(row["status"] == "graph" for row in accel.report(model).graphs)
start = time.perf_counter()
dist.destroy_process_group()
assert time.perf_counter() - start < 10
"""


def test_process_groups_end_while_graphs_are_held(tmp_path):
    families.make("llama", vocab_size=100).save_pretrained(tmp_path)
    (tmp_path / "ending.py").write_text(ENDING)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "ending.py")]
    subprocess.run([*command, str(tmp_path)], check=True, timeout=180)
