"""Causal LMs in miniature, one line a family: its configuration, and whether accel must have its layers fast.

A new family is a line here; test_generate.py and tests/gpu/llm/test_generate.py run stock and ours through all of them.
"""

import functools
import itertools

import pytest
import torch
from torch import nn

from support.everything import EVERYTHING
from support.llm.miniatures.family import (
    DELTA,
    GEMMA4,
    GPT2,
    INDEX,
    KIMI,
    LATENT,
    LATENT_EXPERTS,
    LONG,
    MHA,
    MINIMAX,
    NO_SIZES,
    ROTARY,
    SIZES,
    TOKENS,
    VOCAB,
    Family,
    llama,
    scaled,
    with_holes,
    with_louder_holes,
)
from support.llm.random_weights import randomize

ALIKE = (  # of the same parts as others
    Family("glm4-moe-lite", "glm4_moe_lite", LATENT | LATENT_EXPERTS | {"n_group": 1, "topk_group": 1}),
    Family("youtu", "youtu", LATENT | {"rope_interleave": False}),
    Family("axk1", "axk1", LATENT | LATENT_EXPERTS | {"n_group": 2, "topk_group": 1}),
    # The second layer sees what the first has chosen.
    Family("glm-moe-dsa", "glm_moe_dsa", LATENT | LATENT_EXPERTS | INDEX | {"indexer_types": ["full", "shared"]},
           expected="around"),
    Family("axk2", "axk2", LATENT | LATENT_EXPERTS | INDEX | {"gated_norm_rank": 8}, expected="around"),
    llama("three-to-one", hidden_size=96, num_attention_heads=6),
    Family("mistral-wide", "mistral", {"sliding_window": None}),
    Family("qwen2-sliding", "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    Family("seed-oss", "seed_oss", {"head_dim": 16, "attention_bias": True}),
    Family("cwm", "cwm", {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}),
    Family("helium", "helium", {"head_dim": 16}),
    Family("starcoder2-sliding", "starcoder2", {"use_bias": True, "sliding_window": 5}),
    Family("gpt-neox-sequential", "gpt_neox", MHA | {"use_parallel_residual": False}),
    Family("phi-qk-norm", "phi", {"qk_layernorm": True}),
    Family("arcee", "arcee"),
    Family("vaultgemma", "vaultgemma", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 10},
           expected="either"),
    Family("stablelm", "stablelm", {"use_qkv_bias": True}),
    Family("phi3-partial", "phi3", {"sliding_window": None, "rope_parameters": ROTARY | {
        "rope_type": "default", "partial_rotary_factor": 0.5}}),
)  # fmt: skip
FAMILIES = (
    Family("llama", "llama", core=True),
    llama("biases", attention_bias=True, mlp_bias=True),
    llama("tied", tie_word_embeddings=True),
    llama("mha", num_key_value_heads=4),
    llama("mqa", num_key_value_heads=1),
    llama("head-dim-24", head_dim=24),
    llama("head-dim-10", head_dim=10),
    llama("one-layer", num_hidden_layers=1),
    llama("rope-llama3", **scaled("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                  original_max_position_embeddings=32)),
    llama("rope-yarn", **scaled("yarn", factor=4.0, original_max_position_embeddings=32)),
    llama("rope-linear", **scaled("linear", factor=4.0)),
    # Its frequencies change with the longest position a call sees.
    Family("llama-rope-dynamic", "llama", {"max_position_embeddings": 12} | scaled("dynamic", factor=2.0)),
    Family("mistral", "mistral", {"sliding_window": 5, "head_dim": 16}, core=True),
    Family("ministral", "ministral", {"sliding_window": 5, "head_dim": 16,
                                      "layer_types": ["sliding_attention", "full_attention"]}),
    Family("qwen2", "qwen2"),
    Family("qwen3", "qwen3", {"head_dim": 24}),
    Family("phi3", "phi3", {"sliding_window": None}),
    Family("phi3-sliding", "phi3", {"sliding_window": 5}),
    # Two tables of frequencies, the second from a length on; some versions of transformers drop the cache there.
    Family("phi3-longrope", "phi3", {"sliding_window": None, "max_position_embeddings": 64,
                                     "original_max_position_embeddings": 12, "rope_parameters": ROTARY | {
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": 12}}, expected="either"),
    Family("gemma", "gemma", {"head_dim": 16}),
    Family("gemma2", "gemma2", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 10,
                                "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
           attention="eager", core=True),
    Family("gemma3", "gemma3_text", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 10,
                                     "layer_types": ["sliding_attention", "full_attention"]}),
    # The last two layers attend to what the first two have stored; each has an embedding of its own.
    Family("gemma4-shared", "gemma4_text", GEMMA4 | {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    # Keys that are values, and experts beside the MLP.
    Family("gemma4-experts", "gemma4_text", GEMMA4 | {
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}),
    # Code of its own runs around the attention of every layer.
    Family("gemma3n", "gemma3n_text", {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16,
        "sliding_window": 5, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 8,
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.0] * 2}, expected="either"),
    Family("granite", "granite", {"embedding_multiplier": 0.5, "logits_scaling": 2.0, "residual_multiplier": 0.4,
                                  "attention_multiplier": 0.2}),
    Family("olmo", "olmo"),
    Family("olmo-clipped", "olmo", {"clip_qkv": 0.5}, expected="either"),
    Family("olmo2", "olmo2"),
    Family("olmo3", "olmo3", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    Family("smollm3", "smollm3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    Family("starcoder2", "starcoder2", {"use_bias": True, "sliding_window": None}),
    Family("stablelm-parallel", "stablelm", {"use_parallel_residual": True}),
    Family("stablelm-qk-norm", "stablelm", {"qk_layernorm": True}),
    Family("phi", "phi", {"num_key_value_heads": 4}),
    Family("gpt2", "gpt2", GPT2, core=True),
    Family("gpt2-scaled-by-layer", "gpt2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    Family("gpt-neox", "gpt_neox", MHA | {"use_parallel_residual": True}, core=True),
    Family("gpt-neo", "gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
                                  "window_size": 5, "num_hidden_layers": None, "num_attention_heads": None} | MHA),
    Family("gpt-neo-holes", "gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]],
                                        "num_hidden_layers": None, "num_attention_heads": None} | MHA,
           expected="around", edit=with_holes),
    Family("gpt-neo-louder", "gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]],
                                        "num_hidden_layers": None, "num_attention_heads": None} | MHA,
           expected="some", edit=with_louder_holes),
    Family("gptj", "gptj", GPT2 | {"rotary_dim": 8}),
    Family("codegen", "codegen", GPT2 | {"rotary_dim": 8, "n_ctx": LONG}),
    Family("opt", "opt", MHA | {"ffn_dim": 96, "word_embed_proj_dim": 64, "intermediate_size": None}),
    Family("opt-post-norm", "opt", MHA | {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False,
                                          "intermediate_size": None}),
    Family("opt-relu-without-bias", "opt", MHA | {"ffn_dim": 96, "word_embed_proj_dim": 64, "enable_bias": False,
                                                  "intermediate_size": None}),
    Family("falcon-one-key", "falcon", MHA | {"multi_query": True, "parallel_attn": True, "bias": False,
                                              "new_decoder_architecture": False, "ffn_hidden_size": 96}),
    Family("falcon-grouped", "falcon", MHA | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False,
                                              "ffn_hidden_size": 96}),
    Family("falcon-alibi", "falcon", MHA | {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True,
                                            "new_decoder_architecture": False, "ffn_hidden_size": 96}),
    Family("bloom", "bloom", {"n_layer": 2, "n_head": 4, "num_hidden_layers": None, "num_attention_heads": None,
                              "intermediate_size": None, "max_position_embeddings": None} | MHA, core=True),
    Family("mpt", "mpt", NO_SIZES | {"d_model": 64, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2,
                                     "max_seq_len": LONG, "use_cache": True, "max_position_embeddings": None}),
    Family("cohere", "cohere", {"logit_scale": 0.5}),
    Family("cohere-qk-norm", "cohere", {"logit_scale": 0.5, "use_qk_norm": True}),
    Family("cohere2", "cohere2", {"logit_scale": 0.5, "sliding_window": 5,
                                  "layer_types": ["sliding_attention", "full_attention"]}),
    Family("glm", "glm", {"head_dim": 16}),
    Family("glm4", "glm4", {"head_dim": 16}),
    Family("nemotron", "nemotron", {"head_dim": 16}),
    # Each layer is either attention or an MLP; to the cache the MLPs are layers too.
    Family("nemotron-h", "nemotron_h", {
        "layers_block_type": ["mlp", "full_attention", "moe", "full_attention"], "num_hidden_layers": None,
        "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 48}, stateful=True),
    Family("exaone4", "exaone4", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    Family("apertus", "apertus", expected="either"),
    Family("ernie", "ernie4_5", {"head_dim": 16}),
    Family("gpt-bigcode", "gpt_bigcode", GPT2 | {"multi_query": True}),
    Family("persimmon", "persimmon", MHA),
    Family("biogpt", "biogpt", MHA),
    Family("xglm", "xglm", NO_SIZES | {"d_model": 64, "ffn_dim": 96, "attention_heads": 4, "num_layers": 2}),
    Family("gpt-oss", "gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5,
                                  "layer_types": ["sliding_attention", "full_attention"],
                                  "rope_parameters": ROTARY | {"rope_type": "default"}}, attention="eager"),
    Family("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
           core=True),
    Family("qwen2-moe", "qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                                      "shared_expert_intermediate_size": 80}),
    Family("qwen2-moe-some-dense", "qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2,
                                                 "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
                                                 "mlp_only_layers": [0]}),
    Family("qwen3-moe", "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                                      "head_dim": 16, "norm_topk_prob": True}),
    Family("olmoe", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("granite-moe", "granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.4}),
    Family("phi-moe", "phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    Family("llama4", "llama4_text", {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96,
                                     "attention_chunk_size": 6, "no_rope_layers": [1, 0], "floor_scale": 9,
                                     "attn_scale": 0.7}),
    Family("ministral3", "ministral3", {"head_dim": 16, "rope_parameters": ROTARY | {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 9, "llama_4_scaling_beta": 0.7}}),
    Family("glm4-moe", "glm4_moe", {"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
                                    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
                                    "moe_intermediate_size": 48}, expected="either"),
    Family("ernie-moe", "ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48,
                                         "moe_num_shared_experts": 1}, expected="either"),
    Family("afmoe", "afmoe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                              "num_dense_layers": 1, "sliding_window": 5, "global_attn_every_n_layers": 2,
                              "layer_types": ["sliding_attention", "full_attention"]}),
    Family("qwen3-next-attention", "qwen3_next", {
        "layer_types": ["full_attention"] * 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}),
    Family("qwen3.5-attention", "qwen3_5_text", {
        "layer_types": ["full_attention"] * 2, "head_dim": 32, "rope_parameters": ROTARY | {
            "rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
            "mrope_interleaved": True}}, stateful=True, core=True),
    Family("modernbert-decoder", "modernbert-decoder", {"local_attention": 10, "cls_token_id": 1, "sep_token_id": 2},
           expected="either"),
    Family("hunyuan", "hunyuan_v1_dense", {"head_dim": 16}),
    Family("nanochat", "nanochat"),
    Family("laguna", "laguna", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                                "shared_expert_intermediate_size": 48, "mlp_layer_types": ["dense", "sparse"],
                                "sliding_window": 5, "num_attention_heads_per_layer": [4, 2],
                                "layer_types": ["full_attention", "sliding_attention"]}),
    Family("bert", "bert", MHA | {"is_decoder": True}),
    Family("bart", "bart", NO_SIZES | {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "decoder_ffn_dim": 96, "decoder_attention_heads": 4,
        "is_decoder": True, "is_encoder_decoder": False}),
    Family("diffllama", "diffllama", expected="around"),
    Family("deepseek-v3", "deepseek_v3", LATENT | LATENT_EXPERTS | {"n_group": 2, "topk_group": 1}, core=True),
    Family("qwen3.5-moe-attention", "qwen3_5_moe_text", {
        "layer_types": ["full_attention"] * 2, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}, stateful=True),
    Family("qwen3-next", "qwen3_next", DELTA | {
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48}, stateful=True),
    Family("qwen3.5", "qwen3_5_text", DELTA | {"head_dim": 16}, stateful=True, core=True),
    Family("olmo-hybrid", "olmo_hybrid", DELTA, stateful=True, core=True),
    Family("bamba", "bamba", {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 24,
                              "attn_layer_indices": [1], "mamba_chunk_size": 16}, stateful=True, core=True),
    Family("deepseek-v2", "deepseek_v2", LATENT | LATENT_EXPERTS | {"q_lora_rank": ..., "head_dim": 8}),
    Family("minicpm3", "minicpm3", LATENT | {"head_dim": 8, "scale_depth": 0.7}),
    Family("granite-hybrid", "granitemoehybrid", {
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_chunk_size": 16,
        "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 80, "residual_multiplier": 0.4}, stateful=True),
    Family("jamba", "jamba", {"mamba_d_state": 8, "mamba_dt_rank": 6, "attn_layer_offset": 1, "attn_layer_period": 2,
                              "expert_layer_offset": 1, "expert_layer_period": 2, "num_experts": 4}, stateful=True),
    Family("falcon-h1", "falcon_h1", {
        "head_dim": 16, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2,
        "mamba_d_state": 24, "mamba_chunk_size": 16, "ssm_multipliers": [0.4, 0.3, 1.7, 0.6, 0.5],
        "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.7, "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 0.9, "key_multiplier": 0.6, "mlp_multipliers": [0.9, 0.6]},
        stateful=True, core=True),
    Family("zamba2", "zamba2", {
        "layer_types": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1], "num_mem_blocks": 1,
        "n_mamba_heads": 8, "mamba_d_state": 24, "mamba_ngroups": 2, "chunk_size": 16, "use_mem_rope": True,
        "num_key_value_heads": 4}, expected="either", stateful=True),
    Family("kimi-linear", "kimi_linear", KIMI, expected="either", stateful=True),
    Family("bailing-hybrid", "bailing_hybrid", KIMI, stateful=True),
    # Experts are chosen by logits and a bias, their shares are sigmoids.
    Family("kolibri", "kolibri1", {
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48}, expected="either"),
    # Norms before the last projection of attention and of the MLP.
    Family("bitnet", "bitnet"),
    # Values of fewer channels than keys, which are multiplied; sinks.
    Family("mimo", "mimo_v2_flash", {
        "head_dim": 16, "v_head_dim": 12, "attention_value_scale": 0.7, "sliding_window": 5, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 48,
        "mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention", "sliding_attention"]}),
    # Two attentions a layer, each with a place in the cache; experts of which some give what they are given.
    Family("longcat", "longcat_flash", LATENT | {
        "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 96, "n_routed_experts": 4, "zero_expert_num": 2,
        "moe_topk": 3, "expert_ffn_hidden_size": 48, "head_dim": 8}, expected="either"),
    Family("rwkv", "rwkv", MHA | {"num_attention_heads": None, "max_position_embeddings": None,
                                  "context_length": LONG}, expected="stock"),
    Family("recurrent-gemma", "recurrent_gemma", {"attention_window_size": 5, "lru_width": 64, "head_dim": 16,
                                                  "block_types": ["recurrent", "attention"]}, expected="either"),
    Family("lfm2", "lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2,
                            "block_auto_adjust_ff_dim": False}),
    Family("lfm2-biases", "lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2,
                                   "block_auto_adjust_ff_dim": False, "conv_bias": True}, expected="around"),
    Family("deepseek-v32", "deepseek_v32", LATENT | LATENT_EXPERTS | INDEX | {"n_group": 2, "topk_group": 1},
           expected="around"),
    Family("minimax", "minimax", MINIMAX, stateful=True),
    *(ALIKE if EVERYTHING else ()),
)  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}


def make(family: Family | str, dtype: torch.dtype = torch.float32, seed: int = 1, **changes):
    """A model with random weights, on the CPU; every weight counts, norms' and biases' too.

    Skips the test where this transformers has no such family.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    family = BY_NAME[family] if isinstance(family, str) else family
    if not available(family.kind):
        pytest.skip(f"this transformers has no {family.kind}")
    given = SIZES | TOKENS | family.config | changes
    given = {name: None if value is ... else value for name, value in given.items() if value is not None}
    config = CONFIG_MAPPING[family.kind](**given)
    how = {"attn_implementation": family.attention} if family.attention else {}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, **how).eval()
    if family.edit is not None:
        family.edit(model)
    generator = torch.Generator().manual_seed(seed)
    # Where words are read out by the matrix they are read in by, a large one has every word follow itself.
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        randomize(model.get_submodule(name.rpartition(".")[0]), parameter.data, generator, 0.05 if tied else 1.0)
    for name, buffer in model.named_buffers():
        if buffer.numel() == 1 and name in model.state_dict():
            buffer.fill_(0.7)  # a factor of a layer
    # A random model would end a text at once, or never; tests that want an end ask for it.
    model.generation_config.update(eos_token_id=None, forced_eos_token_id=None, pad_token_id=0)
    return model.to(dtype)


@functools.cache
def available(kind: str) -> bool:
    """Whether this transformers has it."""
    from transformers import CONFIG_MAPPING

    return kind in CONFIG_MAPPING


def layers(model) -> dict[str, nn.Module]:
    """The decoder layers by path: the first list of modules as long as the model is deep, or the longest there is."""
    depth = model.config.get_text_config().num_hidden_layers
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    path = max(lists, key=lambda one: (len(lists[one]) == depth, len(lists[one])))
    return {f"{path}.{name}": layer for name, layer in lists[path].named_children()}


def prompt(batch: int = 1, length: int = 9, seed: int = 0) -> torch.Tensor:
    """Ids from 3 on: none that is special."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths=(9, 5), seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) of prompts of these lengths, padded on the left."""
    ids = prompt(len(lengths), max(lengths), seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = 0
        mask[row, : max(lengths) - length] = 0
    return ids, mask


def in_turn(*lists) -> list[tuple]:
    """Their product, where ACCEL_TEST_EVERYTHING=1; else that of all but the last, with its items in turn."""
    return every(len(lists[-1]), *lists)


def every(share: int, *lists) -> list[tuple]:
    """Of their product one in so many, each item with others in turn; where ACCEL_TEST_EVERYTHING=1 all of it."""
    numbered = itertools.product(*(enumerate(items) for items in lists))
    return [
        tuple(item for _, item in row)
        for row in numbered
        if EVERYTHING or sum(number for number, _ in row) % share == 0
    ]
