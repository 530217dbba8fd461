"""The published configurations of the language models that are measured: model type, then its keyword arguments."""


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


LLAMA = dict(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_parameters=_llama3_rope(8.0),
)
QWEN = dict(max_position_embeddings=32768, rms_norm_eps=1e-6, rope_parameters=_plain_rope(1e6))
MISTRAL = dict(
    vocab_size=32768,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    sliding_window=None,
    rope_parameters=_plain_rope(1e6),
)

CONFIGS: dict[str, tuple[str, dict]] = {
    "llama-8b": ("llama", LLAMA),  # Llama 3.1
    "llama-70b": (  # Llama 3.1
        "llama",
        LLAMA | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
    ),
    "llama-3b": (  # Llama 3.2
        "llama",
        LLAMA
        | dict(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24)
        | dict(tie_word_embeddings=True, rope_parameters=_llama3_rope(32.0)),
    ),
    "llama-1b": (
        "llama",
        LLAMA
        | dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16)
        | dict(tie_word_embeddings=True, rope_parameters=_llama3_rope(32.0)),
    ),
    "qwen-0.5b": (  # Qwen 2.5
        "qwen2",
        QWEN
        | dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24)
        | dict(num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True),
    ),
    "qwen-7b": (
        "qwen2",
        QWEN
        | dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28)
        | dict(num_attention_heads=28, num_key_value_heads=4),
    ),
    "qwen3-0.6b": (
        "qwen3",
        QWEN
        | dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28)
        | dict(num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960)
        | dict(tie_word_embeddings=True),
    ),
    "qwen3-8b": (
        "qwen3",
        QWEN
        | dict(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36)
        | dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960),
    ),
    "mistral-7b": ("mistral", MISTRAL),  # v0.3
    "gemma2-2b": (
        "gemma2",
        dict(
            vocab_size=256000,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=8192,
            sliding_window=4096,
            attn_implementation="eager",  # the only one that has its softcap in every version
        ),
    ),
    "gemma3-4b": (  # its text part
        "gemma3_text",
        dict(
            vocab_size=262208,
            hidden_size=2560,
            intermediate_size=10240,
            num_hidden_layers=34,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=1024,
            max_position_embeddings=131072,
        ),
    ),
    "phi3-mini": (
        "phi3",
        dict(
            vocab_size=32064,
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            rope_parameters=_plain_rope(1e4),
            pad_token_id=32000,
        ),
    ),
    # Convolutions between the attention layers, as LiquidAI/LFM2-1.2B has them.
    "lfm2-1.2b": (
        "lfm2",
        dict(
            vocab_size=65536,
            hidden_size=2048,
            intermediate_size=12288,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=128000,
            norm_eps=1e-5,
            layer_types=["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
            rope_parameters=_plain_rope(1e6),
        ),
    ),
    # Mixtures of experts: some 3, 13 and 4 billion weights to a token.
    "qwen3-30b-a3b": (
        "qwen3_moe",
        QWEN
        | dict(vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, intermediate_size=6144)
        | dict(num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
        | dict(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=40960),
    ),
    "mixtral-8x7b": ("mixtral", MISTRAL | dict(vocab_size=32000, num_local_experts=8, num_experts_per_tok=2)),
    "gpt-oss-20b": (
        "gpt_oss",
        dict(
            vocab_size=201088,
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=24,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            attention_bias=True,
            sliding_window=128,
            layer_types=["full_attention" if i % 2 else "sliding_attention" for i in range(24)],
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            swiglu_limit=7.0,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
    ),
    "gpt2": ("gpt2", {}),
    # Everything at a size a CPU runs in milliseconds: for smoke tests, not for figures.
    "tiny": (
        "llama",
        dict(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            rope_parameters=_plain_rope(1e4),
        ),
    ),
}
