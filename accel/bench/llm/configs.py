"""The published configurations of the language models that are measured: model type, then its keyword arguments."""

from typing import Any


def _llama3_rope(factor: float) -> dict:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _plain_rope(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any) -> dict:
    sizes: dict = dict(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, vocab_size=vocabulary)
    return sizes | dict(num_attention_heads=heads, num_key_value_heads=kv_heads) | more


LLAMA = dict(max_position_embeddings=131072, rms_norm_eps=1e-5, rope_parameters=_llama3_rope(8.0))
LLAMA_32 = LLAMA | dict(tie_word_embeddings=True, rope_parameters=_llama3_rope(32.0))
QWEN = dict(max_position_embeddings=32768, rms_norm_eps=1e-6, rope_parameters=_plain_rope(1e6))
QWEN3 = QWEN | dict(head_dim=128, max_position_embeddings=40960)
MISTRAL = QWEN | dict(rms_norm_eps=1e-5, sliding_window=None)
GEMMA = dict(head_dim=256)
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

CONFIGS: dict[str, tuple[str, dict]] = {
    "llama-8b": ("llama", _sizes(4096, 14336, 32, 32, 8, 128256, **LLAMA)),  # Llama 3.1
    "llama-70b": ("llama", _sizes(8192, 28672, 80, 64, 8, 128256, **LLAMA)),
    "llama-3b": ("llama", _sizes(3072, 8192, 28, 24, 8, 128256, **LLAMA_32)),  # Llama 3.2
    "llama-1b": ("llama", _sizes(2048, 8192, 16, 32, 8, 128256, **LLAMA_32)),
    "qwen-0.5b": ("qwen2", _sizes(896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True, **QWEN)),  # Qwen 2.5
    "qwen-7b": ("qwen2", _sizes(3584, 18944, 28, 28, 4, 152064, **QWEN)),
    "qwen3-0.6b": ("qwen3", _sizes(1024, 3072, 28, 16, 8, 151936, tie_word_embeddings=True, **QWEN3)),
    "qwen3-8b": ("qwen3", _sizes(4096, 12288, 36, 32, 8, 151936, **QWEN3)),
    "mistral-7b": ("mistral", _sizes(4096, 14336, 32, 32, 8, 32768, **MISTRAL)),  # v0.3
    "gemma2-2b": (
        "gemma2",
        _sizes(2304, 9216, 26, 8, 4, 256000, max_position_embeddings=8192, sliding_window=4096, **GEMMA)
        | dict(attn_implementation="eager"),  # the only one that has its softcap in every version
    ),
    "gemma3-4b": (  # its text part
        "gemma3_text",
        _sizes(2560, 10240, 34, 8, 4, 262208, sliding_window=1024, max_position_embeddings=131072, **GEMMA),
    ),
    "phi3-mini": (
        "phi3",
        _sizes(3072, 8192, 32, 32, 32, 32064, max_position_embeddings=4096, rms_norm_eps=1e-5, pad_token_id=32000)
        | dict(rope_parameters=_plain_rope(1e4)),
    ),
    # Convolutions between the attention layers, as LiquidAI/LFM2-1.2B has them.
    "lfm2-1.2b": (
        "lfm2",
        _sizes(2048, 12288, 16, 32, 8, 65536, max_position_embeddings=128000, norm_eps=1e-5)
        | dict(layer_types=["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)])
        | dict(rope_parameters=_plain_rope(1e6)),
    ),
    # Mixtures of experts: some 3, 13 and 4 billion weights to a token.
    "qwen3-30b-a3b": (
        "qwen3_moe",
        _sizes(2048, 6144, 48, 32, 4, 151936, moe_intermediate_size=768, **QWEN3)
        | dict(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True),
    ),
    "mixtral-8x7b": (
        "mixtral", _sizes(4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2, **MISTRAL)
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        _sizes(2880, 2880, 24, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4)
        | dict(attention_bias=True, sliding_window=128, max_position_embeddings=131072, rms_norm_eps=1e-5)
        | dict(layer_types=["full_attention" if i % 2 else "sliding_attention" for i in range(24)])
        | dict(swiglu_limit=7.0, rope_parameters=YARN),
    ),
    "gpt2": ("gpt2", {}),
    # Everything at a size a CPU runs in milliseconds: for smoke tests, not for figures.
    "tiny": (
        "llama", _sizes(32, 64, 2, 4, 2, 256, max_position_embeddings=2048, rope_parameters=_plain_rope(1e4))
    ),
}  # fmt: skip
