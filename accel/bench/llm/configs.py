"""Published configurations of the measured language models: model type, and what differs from its defaults."""

from typing import Any


def _llama3_rope(factor: float) -> dict:
    given = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0}
    return given | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _plain_rope(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any) -> dict:
    sizes: dict = dict(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, vocab_size=vocabulary)
    return sizes | dict(num_attention_heads=heads, num_key_value_heads=kv_heads) | more


YARN = dict(rope_type="yarn", factor=40.0, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707)
YARN |= dict(original_max_position_embeddings=4096)
LLAMA = dict(max_position_embeddings=131072, rms_norm_eps=1e-5, rope_parameters=_llama3_rope(8.0))
LLAMA_32 = LLAMA | dict(tie_word_embeddings=True, rope_parameters=_llama3_rope(32.0))
QWEN = dict(max_position_embeddings=32768, rms_norm_eps=1e-6, rope_parameters=_plain_rope(1e6))
QWEN3 = QWEN | dict(head_dim=128, max_position_embeddings=40960)
MISTRAL = QWEN | dict(rms_norm_eps=1e-5, sliding_window=None)
GEMMA3 = dict(sliding_window=1024, max_position_embeddings=131072, head_dim=256)
MIXTURE = QWEN3 | dict(moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)
LFM2 = dict(layer_types=["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)])
GPT_OSS: dict = dict(num_hidden_layers=24, num_local_experts=32, num_experts_per_tok=4)
GPT_OSS |= dict(layer_types=["full_attention" if i % 2 else "sliding_attention" for i in range(24)])
QWEN3_5: dict = dict(linear_num_key_heads=16, head_dim=256, max_position_embeddings=262144)
# Nemotron-H has layers of Mamba (M), of attention (*) and MLPs (-) one by one.
NEMOTRON = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
SPACES = dict(ssm_state_size=128, mamba_num_heads=128, mamba_head_dim=80, n_groups=8)
FALCON: dict = dict(head_dim=128, mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128, max_position_embeddings=262144)
GRANITE: dict = dict(shared_intermediate_size=1536, num_local_experts=72, num_experts_per_tok=10, mamba_d_state=128)
GRANITE |= dict(layer_types=["full_attention" if i % 10 == 5 else "linear_attention" for i in range(40)])
MAMBA: dict = dict(hidden_size=2560, num_hidden_layers=64, num_heads=80, state_size=128, n_groups=1, vocab_size=50288)
MAMBA |= dict(tie_word_embeddings=True, initializer_range=0.02)  # with 0.1, rounding alone makes logits unrelated
V2_LITE: dict = dict(q_lora_rank=None, first_k_dense_replace=1, moe_intermediate_size=1408, num_experts_per_tok=6)
V2_LITE |= dict(max_position_embeddings=163840, rope_parameters=_plain_rope(1e4) | YARN)
TINY = dict(max_position_embeddings=2048, rope_parameters=_plain_rope(1e4))
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
    # The only attention that has its softcap in every version.
    "gemma2-2b": ("gemma2", dict(attn_implementation="eager")),
    "gemma3-4b": ("gemma3_text", _sizes(2560, 10240, 34, 8, 4, 262208, **GEMMA3)),  # its text part
    "phi3-mini": ("phi3", {}),
    # Three layers of four keep a state instead of keys and values.
    "qwen3.5-9b": ("qwen3_5_text", _sizes(4096, 12288, 32, 16, 4, 248320, **QWEN3_5)),
    "qwen3.6-27b": ("qwen3_5_text", _sizes(5120, 17408, 64, 24, 4, 248320, linear_num_value_heads=48, **QWEN3_5)),
    "qwen3.6-35b-a3b": ("qwen3_5_moe_text", dict(max_position_embeddings=262144)),
    "nemotron-h-9b": (
        "nemotron_h",
        _sizes(4480, 15680, 56, 40, 8, 131072, head_dim=128, hybrid_override_pattern=NEMOTRON, **SPACES),
    ),  # Nano v2
    "falcon-h1-7b": ("falcon_h1", _sizes(3072, 12288, 44, 12, 2, 130048, **FALCON)),
    "granite4-h-small": ("granitemoehybrid", _sizes(4096, 768, 40, 32, 8, 100352, tie_word_embeddings=True, **GRANITE)),
    "mamba2-2.7b": ("mamba2", MAMBA),
    "kimi-linear": ("kimi_linear", {}),  # 48B-A3B
    # Latent attention.
    "deepseek-v2-lite": ("deepseek_v2", _sizes(2048, 10944, 27, 16, 16, 102400, **V2_LITE)),
    "glm-4.7-flash": ("glm4_moe_lite", dict(rope_parameters=_plain_rope(1e6))),
    # Convolutions between the attention layers, as LiquidAI/LFM2-1.2B has them.
    "lfm2-1.2b": ("lfm2", _sizes(2048, 12288, 16, 32, 8, 65536, **LFM2)),
    # Mixtures of experts: some 3, 13 and 4 billion weights to a token.
    "qwen3-30b-a3b": ("qwen3_moe", _sizes(2048, 6144, 48, 32, 4, 151936, **MIXTURE)),
    "mixtral-8x7b": ("mixtral", dict(max_position_embeddings=32768)),
    "gpt-oss-20b": ("gpt_oss", GPT_OSS),
    "gpt-oss-20b-mxfp4": ("gpt_oss", GPT_OSS),  # packed again by accel.optimize
    # Latent attention and mixtures of experts: 2.7 and 3.9 billion weights to a token.
    "gpt2": ("gpt2", {}),
    # Everything at a size a CPU runs in milliseconds: for smoke tests, not for figures.
    "tiny": ("llama", _sizes(32, 64, 2, 4, 2, 256, **TINY)),
}
