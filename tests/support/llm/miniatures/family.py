"""One family of causal LMs in miniature: its sizes, and what is expected of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

VOCAB = 99
EVEN_VOCAB = 100  # for ranks: transformers before 5.18 divides no other number of words
LONG = 128  # positions
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONG,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# The same sizes in other words; None for what a configuration does not know.
GPT2 = {
    "n_embd": 64,
    "n_inner": 96,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LONG,
    **dict.fromkeys(SIZES.keys() - {"vocab_size"}),
}
MHA = {"num_key_value_heads": None}
NO_SIZES = dict.fromkeys(SIZES.keys() - {"vocab_size", "max_position_embeddings"})
ROTARY = {"rope_theta": 10000.0}
# By stock, of what is stateful.
UNTAKEN = ("assisted", "embeddings", "fanned-out", "given-cache-plain", "prompt-lookup")
DELTA = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
         "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
          "num_key_value_heads": 4}  # fmt: skip
LATENT_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
                  "moe_intermediate_size": 48}  # fmt: skip
INDEX = {"index_topk": 6, "index_n_heads": 2, "index_head_dim": 16}
GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 5, "vocab_size_per_layer_input": VOCAB,
          "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
KIMI = {"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 20, "linear_num_heads": 4,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
        "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}  # fmt: skip

# Of the last layer the states hardly decay.
MINIMAX = {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"],
           "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "block_size": 4,
           "full_attn_alpha_factor": 3.5, "linear_attn_alpha_factor": 2.5, "linear_attn_beta_factor": 0.8,
           "mlp_alpha_factor": 1.7, "mlp_beta_factor": 0.9}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """kind: transformers' model_type. config: what differs from SIZES; None leaves a key out, ... is None.

    expected: "fast", every decoder layer is patched; "around", so they are, but something in them runs stock over the
    caller's cache; "some", some are, and the others run stock between them; "stock",
    none is, and the report says why; "either", only what it computes matters.
    attention: the implementation asked for, where the default one is not the one to compare with.
    stateful: transformers refuses some modes, as tokens cannot be taken back; of some of these families others too.
    edit: changes the model once it is made.
    core: structurally unlike the others that are: these run the whole product of families and modes.
    """

    name: str
    kind: str
    config: dict = field(default_factory=dict)
    expected: str = "fast"
    attention: str | None = None
    stateful: bool = False
    edit: Callable | None = None
    core: bool = False

    def takes(self, mode: str) -> bool:
        """Whether stock can do what a mode of this name asks for."""
        return not (self.stateful and mode.startswith(UNTAKEN))

    def __str__(self) -> str:
        return self.name


def llama(name: str, **config) -> Family:
    return Family(f"llama-{name}", "llama", config)


def with_holes(model) -> None:
    """The tables of every other layer of a GPT-Neo hide another key than a window does."""
    for layer in model.transformer.h[1::2]:
        layer.attn.attention.bias[..., 100, 99] = False


def with_louder_holes(model) -> None:
    """The same, and every other layer is louder."""
    from support.llm.miniatures.louder_block import LouderBlock  # which imports Triton, whose interpreter comes first

    with_holes(model)
    for number, layer in enumerate(model.transformer.h):
        layer.__class__, layer.louder = LouderBlock, float(number % 2)


def scaled(kind: str, **parameters) -> dict:
    return {"rope_parameters": ROTARY | {"rope_type": kind, **parameters}}
