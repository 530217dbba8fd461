"""A tiny configuration of any language model of transformers: its own default one, each field made small by its name.

What a field means is told by its name, so that a new family needs a line only where its fields bound one another.
"""

import re

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY, DEPTH, WIDTH, HEADS, HEAD_DIM = 99, 2, 64, 4, 16
POSITIONS = 128

# What a field is in a tiny model, by the first pattern that its whole name fits. A default that is smaller stays, so
# that 0 and 1 go on meaning none and one.
SIZES = (
    (r"(swa_)?num_key_value_heads|num_kv_heads|num_query_groups|linear_num_key_heads", HEADS // 2),
    (r"(.*_)?num_(hidden_)?layers(_per_stack)?|(.*_)?layers|n_layers?|depth|num_blocks", DEPTH),
    (r"(.*_)?(num|n)_.*heads?|.*attention_heads|n_heads?|num_heads", HEADS),
    (r"qk_rope_head_dim|qk_nope_head_dim|index_head_dim|rotary_dim", HEAD_DIM // 2),
    (r".*head_dim|d_kv|kv_channels|dim_head|d_head|.*head_size|mamba_headdim|mamba_d_head", HEAD_DIM),
    (r".*_rank|hc_lowrank", HEAD_DIM),
    (r".*vocab_size(_per_layer_input)?", VOCABULARY),
    (r"hidden_size_per_layer_input", 8),
    (r"index_topk(_blocks)?|.*experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_(k|topk|top_k)", 2),
    (r"n_group|num_expert_group|o_groups|n_groups|topk_group", 2),
    (r".*intermediate_size(_mlp)?|.*ffn_dim|.*ffn_hidden_size|dff|dim_ff|d_ff|mlp_dim|feed_forward_size|d_inner", 96),
    (r"(.*_)?hidden_size(_global)?|d_model|n_embd|(word_)?embed_proj_dim|.*embedding_(dim|size)|lru_width", WIDTH),
    (r"emb(ed)?_dim|out_hidden_size|projection_dim", WIDTH),
    (r"mamba_d_ssm", 2 * WIDTH),
    (r"base_channels", 32),
    (r".*state_size|mamba_d_state|.*chunk_size|block_size", 8),
    (r"(attention_)?(sliding_)?window(_size)?|local_attention_window_len|keep_window_size", 5),
    (r"local_attention|query_pre_attn_scalar", 10),
    (r".*max_position_embeddings|n_positions|n_ctx|max_(seq_len|(target|source)_positions)", POSITIONS),
    (r"model_max_length|context_length", POSITIONS),
    (r"image_size|crop_size", 16),
    (r"patch_size|time_step_rank|mamba_dt_rank", 4),
)
TEXT = {"bos": 1, "eos": 2, "pad": 0}
SPECIAL = range(85, 98)  # where other special tokens lie
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}}
GEMMA_ASSISTANT = {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
                                   "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL]}}  # fmt: skip

# What a family demands besides.
FAMILIES = {
    "bailing_hybrid": {"num_experts": 4},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "cohere_compass_text": {"layer_types": [SLIDING, FULL], "rope_parameters": {SLIDING: ROPE, FULL: ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note": {"audio_config": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
                   "vision_config": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH}},
    "emu3": {"vocabulary_map": {"<image>": 90}},
    "florence2": {"vision_config": {"embed_dim": [8, 16, 32, 32],
                                    "num_heads": [1, 2, 4, 4], "num_groups": [1, 2, 4, 4]}},
    "gemma4_assistant": GEMMA_ASSISTANT,
    "gemma4_unified_assistant": GEMMA_ASSISTANT,
    "glm4v_moe_text": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "glm4v_text": MROPE,
    "glm_ocr_text": MROPE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "hrm_text": {"num_layers_per_stack": None},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "hunyuan_vl_text": {"head_dim": HEAD_DIM, "rope_parameters": ROPE | {"mrope_section": [2, 2, 2, 2]}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", FULL], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": HEAD_DIM},
    "nemotron": {"head_dim": HEAD_DIM, "num_key_value_heads": 2},
    "paddleocr_vl_text": MROPE,
    "qwen2_5_omni_text": MROPE,
    "qwen2_5_omni_vision_encoder": {"window_size": 16},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 85},
    "qwen2_5_vl_text": MROPE,
    "qwen2_5_vl_vision": {"window_size": 16},
    "qwen2_vl_text": MROPE,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 85},
    "qwen4_exp_text": {"layer_types": [LINEAR, "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
                       "indexer_head_dim": HEAD_DIM, "indexer_budget": 4, "indexer_compress_ratio": 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32]},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 4, "chunk_size": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": [LINEAR, "hybrid", "hybrid"], "num_hidden_layers": 3,
              "attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM},
}  # fmt: skip


def tiny(kind: str) -> PreTrainedConfig:
    """The tiny configuration of this model_type."""
    return tiny_of(CONFIG_MAPPING[kind], FAMILIES.get(kind, {}))


def tiny_of(config_class: type, demanded: dict | None = None) -> PreTrainedConfig:
    """A tiny configuration of this class, with what is demanded."""
    default = defaults(config_class, demanded := demanded or {})
    known = {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
    known |= {real for name, real in config_class.attribute_map.items() if name in known}
    given, inner = {}, {}
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig) and name in {*known, *config_class.sub_configs}:
            inner[name] = tiny_of(type(value), FAMILIES.get(value.model_type, {}) | demanded.get(name, {}))
        elif name in known and (found := small(name, value)) is not None:
            given[name] = found
    given |= layers(default)
    if "kv_lora_rank" in known and "head_dim" in known:  # there it is that of the part that is rotated
        given["head_dim"] = HEAD_DIM // 2
    heads = next((vars(default)[name] for name in ("num_attention_heads", "n_head") if name in vars(default)), None)
    if heads is not None and vars(default).get("num_key_value_heads") == heads and "num_key_value_heads" in known:
        given["num_key_value_heads"] = HEADS
    if vars(default).get("is_decoder") is False:
        given["is_decoder"] = True
    if isinstance(kinds := demanded.get("layer_types"), list):
        given["num_hidden_layers"] = len(kinds)
    rope = vars(default).get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        pairs = int(given.get("head_dim", HEAD_DIM) * rope.get("partial_rotary_factor", 1.0)) // 2
        given["rope_parameters"] = rope | {"mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
    return config_class(**(given | demanded | inner))


def defaults(config_class: type, demanded: dict) -> PreTrainedConfig:
    """What the class has by default, with what is demanded where it goes together."""
    try:
        return config_class(**{name: value for name, value in demanded.items() if not isinstance(value, dict)})
    except Exception:
        return config_class()


def small(name: str, value):
    """What a field of this name and default is in a tiny model; None where it stays."""
    if isinstance(value, int | list) and (special := re.fullmatch(r"(.*)_token_(id|index)", name)):
        return TEXT.get(special[1], SPECIAL[sum(map(ord, name)) % len(SPECIAL)])
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
    return size if size is not None and value > size else None


def layers(default: PreTrainedConfig) -> dict:
    """Lists with an entry a layer, cut to one layer of each kind there is and DEPTH at least, and their number."""
    depth = getattr(default, "num_hidden_layers", None)
    if not isinstance(depth, int) or depth <= DEPTH:
        return {}
    lists = {
        name: list(value)
        for name, value in vars(default).items()
        if isinstance(value, list | tuple) and len(value) == depth and not name.startswith("_")
    }
    if not lists:
        return {}
    rows = list(zip(*lists.values(), strict=True))
    kinds = [number for number, row in enumerate(rows) if row not in rows[:number]]
    if len(kinds) == depth > 4:  # numbers of layers
        kinds = kinds[:DEPTH]
    rest = [number for number in range(depth) if number not in kinds]
    chosen = sorted((kinds + rest)[: max(DEPTH, len(kinds))])
    real = default.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    made = {name: [entry(name, values[number]) for number in chosen] for name, values in lists.items()}
    return made | {real: len(chosen)}


def entry(name: str, value):
    """A layer's entry in a list."""
    name = "num_attention_heads" if "heads" in name else name
    found = small(name, value)
    return value if found is None else found
