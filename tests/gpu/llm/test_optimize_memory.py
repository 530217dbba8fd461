"""What accel.optimize needs of a GPU for a moment, beyond the model: nothing that grows with the number of layers."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import accel
from accel.llm.generation.trial_warmup import WIDE
from accel.llm.kv_cache.blocks import BLOCK
from support.device_memory import allocated

pytestmark = pytest.mark.usefixtures("exact")

HEADS, KV_HEADS, DIM = 8, 2, 128
FIRST, SHALLOW, DEEP = 2, 8, 24  # layers; the first model only has libraries take what they keep


def llama(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=4096, hidden_size=HEADS * DIM, intermediate_size=3584, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


@pytest.mark.parametrize("options", [{}, {"kv_cache": "int8"}], ids=["as it is", "rounded cache"])
def test_a_deep_model_is_optimized_in_the_memory_of_a_shallow_one(options):
    """The bound is what the warmup stores for one layer; all 16 more would take 33 MiB, their records 14."""
    peaks = {}
    for layers in (FIRST, SHALLOW, DEEP):
        model = llama(layers)
        before = allocated()
        torch.cuda.reset_peak_memory_stats()
        accel.optimize(model, **options)
        torch.cuda.synchronize()
        peaks[layers] = torch.cuda.max_memory_allocated() - before
        assert "forward" in vars(model)
        del model
    one_layer = max(WIDE) * BLOCK * 2 * KV_HEADS * DIM * torch.bfloat16.itemsize
    assert peaks[DEEP] - peaks[SHALLOW] < one_layer, peaks
