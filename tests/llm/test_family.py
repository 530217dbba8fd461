"""What is taken for a causal language model."""

from torch import nn

from accel.libraries.models import is_causal_lm
from support.llm.families import make


def test_what_is_a_causal_lm():
    from transformers import AutoModel, CLIPTextConfig, CLIPTextModel, T5Config, T5ForConditionalGeneration

    model = make("llama")
    assert is_causal_lm(model) and is_causal_lm(make("gpt2"))
    assert not is_causal_lm(AutoModel.from_config(model.config)) and not is_causal_lm(nn.Linear(2, 2))
    text = CLIPTextConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    assert not is_causal_lm(CLIPTextModel(text))
    both = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20, decoder_start_token_id=0)
    assert not is_causal_lm(T5ForConditionalGeneration(both))
