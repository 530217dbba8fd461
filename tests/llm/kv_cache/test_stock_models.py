"""Stock models over a cache of ours: what generate() makes of it is what it makes of its own."""

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from accel.llm.kv_cache.blocks import Shape
from accel.llm.kv_cache.cache import adopt, is_ours

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=400, pad_token_id=0, eos_token_id=None, bos_token_id=1,
)  # fmt: skip
MODELS = {
    "llama, sdpa": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "mistral, sdpa": lambda: MistralForCausalLM(MistralConfig(sliding_window=9, **SMALL)),
    "mistral, eager": lambda: MistralForCausalLM(MistralConfig(sliding_window=9, **SMALL)),
    "gemma2, eager": lambda: Gemma2ForCausalLM(Gemma2Config(sliding_window=9, **SMALL)),
    "gemma3, sdpa": lambda: Gemma3ForCausalLM(Gemma3TextConfig(sliding_window=9, layer_types=ALTERNATE, **SMALL)),
}
ALTERNATE = ["sliding_attention", "full_attention"]
MODES = {
    "greedy": {},
    "beams": dict(num_beams=3),
    "beam sample": dict(num_beams=2, do_sample=True),
    "several": dict(do_sample=True, num_return_sequences=3),
    "chunked prefill": dict(prefill_chunk_size=7),
    "prompt lookup": dict(prompt_lookup_num_tokens=4),
}


@pytest.fixture(autouse=True)
def small():
    """One thread: several only wait for each other over tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.share(4)
def test_stock_models_generate_the_same_over_it(name, mode):
    model = MODELS[name]().eval()
    model.set_attn_implementation(name.split()[-1])
    rows = 1 if mode == "prompt lookup" else 2
    ids = torch.randint(2, 64, (rows, 14)).repeat(1, 2)
    mask = torch.ones_like(ids)
    mask[0, :5] = rows == 1  # left padding, in a batch
    outputs = []
    for _ in range(2):
        torch.manual_seed(1)
        cache = DynamicCache(config=model.config)
        if outputs:
            shapes = [Shape(2, 8, torch.float32, model.device)] * 2
            assert not isinstance(adopt(cache, shapes), str)
        out = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=40, output_scores=True,
            return_dict_in_generate=True, **{"do_sample": False} | MODES[mode],
        )  # fmt: skip
        assert out.past_key_values is cache
        outputs.append(out)
    assert is_ours(cache)
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    for stock, ours in zip(outputs[0].scores, outputs[1].scores, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)
    assert outputs[0].past_key_values.get_seq_length() == cache.get_seq_length()
