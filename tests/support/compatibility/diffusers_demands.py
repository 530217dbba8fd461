"""What a model class of diffusers demands to be built tiny and called, where sizes and inputs by name do not do.

config: fields of it. main: the shape of the first argument of forward, None where it is among the inputs. inputs: other
arguments, None for one to leave out. parts: from a maker of models, the arguments by position its class is made with.
"""

import torch

W = 32  # the width of everything that has one
TEXT = 7  # tokens of a text


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 40, shape, generator=torch.Generator().manual_seed(0))


def t(*values) -> torch.Tensor:
    return torch.tensor(values)


def twice(name: str):
    return lambda build: ([build(name), build(name)],)


FOUR = (32, 32, 64, 64)
HUNYUAN = {"text_embedding_mask": ones(2, 7), "encoder_hidden_states_t5": r(2, 5, W),
           "text_embedding_mask_t5": ones(2, 5),
           "image_meta_size": r(2, 6), "style": t(0, 0), "image_rotary_emb": (r(16, 16), r(16, 16))}  # fmt: skip
MODELS = {
    "AceStepTransformer1DModel": {"config": {"in_channels": 24, "audio_acoustic_hidden_dim": 8}, "main": (2, 16, 8),
        "inputs": {"context_latents": r(2, 16, 16)}},
    "AnimaTextConditioner": {"main": (2, 7, W), "inputs": {"target_input_ids": ids(2, 9)}},
    "AnyFlowFARTransformer3DModel": {"main": (2, 3, 16, 8, 8), "inputs": {"chunk_partition": [1, 2], "timestep": r(2,
        3).abs(), "r_timestep": r(2, 3).abs()}},
    "AnyFlowTransformer3DModel": {"main": (2, 3, 16, 8, 8), "inputs": {"timestep": r(2, 3).abs(), "r_timestep": r(2,
        3).abs()}},
    "AutoencoderKLHunyuanImage": {"config": {"in_channels": 3, "out_channels": 3, "latent_channels": 8,
        "block_out_channels": (32, 64), "layers_per_block": 1, "spatial_compression_ratio": 2, "sample_size": 16},
        "main": (2, 3, 16, 16)},
    "AutoencoderKLKVAE": {"config": {"channels": 32}, "main": (1, 3, 16, 16)},
    "AutoencoderKLMiniMaxH3": {"config": {"clip_length": 9, "token_drop": 1}, "main": (1, 3, 17, 64, 64)},
    "AutoencoderKLMiniMaxH3Audio": {"config": {"encoder_dim": 8, "decoder_dim": 256, "latent_dim": 64}, "main": (1, 1,
        1600)},
    "AutoencoderKLMochi": {"config": {"encoder_block_out_channels": FOUR, "decoder_block_out_channels": FOUR}, "main":
        (1, 3, 7, 16, 16)},
    "AutoencoderKLQwenImage21": {"main": (1, 4, 1, 32, 32)},
    "AutoencoderKLTemporalDecoder": {"config": {"block_out_channels": (32,)}, "main": (2, 3, 16, 16), "inputs":
        {"num_frames": 2}},
    "AutoencoderOobleck": {"config": {"decoder_input_channels": 16}, "main": (1, 2, 4096)},
    "AutoencoderRAE": {"config": {"encoder_patch_size": 14, "encoder_input_size": 28, "patch_size": 8,
        "encoder_hidden_size": 64}, "main": (1, 3, 28, 28)},
    "BriaFibo2Transformer2DModel": {"config": {"injection_layer_ids": (0,), "min_num_gist_tokens": 8,
        "max_num_gist_tokens": 16, "gist_step": 8, "gist_min_text_len": 8, "gist_max_text_len": 16, "axes_lens": (64,
        32, 32)}, "main": (2, 16, 8, 8), "inputs": {"encoder_hidden_states": r(2, 2, 9, W), "encoder_attention_mask":
        ones(2, 9)}},
    "BriaFiboTransformer2DModel": {"config": {"text_encoder_dim": 16}, "main": (2, 16, 16), "inputs":
        {"text_encoder_layers": [r(2, 7, 16), r(2, 7, 16)]}},
    "CogVideoXTransformer3DModel": {"config": {"sample_frames": 9, "temporal_compression_ratio": 4,
        "max_text_seq_length": 7}, "main": (2, 3, 16, 8, 8)},
    "ConsisIDTransformer3DModel": {"config": {"sample_frames": 9, "temporal_compression_ratio": 4,
        "max_text_seq_length": 7}, "main": (2, 3, 16, 8, 8)},
    "ControlNetUnionModel": {"config": {"block_out_channels": (8, 16, 16, 16), "num_trans_channel": 8,
        "num_trans_head": 2, "num_trans_layer": 1, "num_proj_channel": 8, "num_control_type": 2,
        "addition_time_embed_dim": 16, "projection_class_embeddings_input_dim": 32}, "main": (2, 4, 8, 8), "inputs":
        {"controlnet_cond": [r(2, 3, 64, 64)], "control_type": r(2, 2), "control_type_idx": [0]}},
    "Cosmos3AVAEAudioTokenizer": {"config": {"vocoder_input_dim": 4}, "main": (1, 2, 7680)},
    "Cosmos3OmniTransformer": {"config": {"latent_channel": 8, "patch_latent_dim": 32}, "main": None, "inputs":
        {"input_ids": ids(6), "text_indexes": torch.arange(6), "position_ids": torch.arange(10).repeat(3, 1),
        "und_len": 6, "sequence_length": 10, "vision_tokens": [r(1, 8, 1, 4, 4)], "vision_token_shapes": [(1, 2, 2)],
        "vision_sequence_indexes": torch.arange(6, 10), "vision_mse_loss_indexes": torch.arange(6, 10),
        "vision_timesteps": torch.full((4,), 7.0), "vision_noisy_frame_indexes": [t(0)]}},
    "CosmosControlNetModel": {"main": (2, 8, 2, 8, 8), "inputs": {"latents": r(2, 8, 2, 8, 8), "condition_mask": r(2,
        1, 2, 8, 8), "padding_mask": torch.zeros(1, 1, 8, 8)}},
    "CosmosTransformer3DModel": {"config": {"concat_padding_mask": False, "rope_scale": (1.0, 1.0, 1.0), "max_size":
        (8, 16, 16)}},
    "DreamLiteTransformer2DModel": {"config": {"in_channels": 32, "cross_attention_dim": W}, "main": (2, 32, 8, 8)},
    "DreamLiteUNetModel": {"config": {"block_out_channels": (16, 32, 32), "attention_head_dim": 2, "ff_mult": 2,
        "num_kv_heads": 1}},
    "EasyAnimateTransformer3DModel": {"config": {"in_channels": 16, "out_channels": 16, "patch_size": 2}},
    "ErnieImageTransformer2DModel": {"main": (2, 16, 4, 4), "inputs": {"text_bth": r(2, 7, W), "text_lens": t(7, 4)}},
    "FluxMultiControlNetModel": {"parts": twice("FluxControlNetModel"), "main": (2, 16, 16), "inputs":
        {"controlnet_cond": [r(2, 16, 16)] * 2, "controlnet_mode": [t(0, 0)] * 2, "conditioning_scale": [1.0, 0.5]}},
    "GlmImageTransformer2DModel": {"main": (2, 16, 8, 8), "inputs": {"prior_token_id": ids(2, 16), "prior_token_drop":
        torch.zeros(2, 16, dtype=torch.bool)}},
    "HiDreamImageTransformer2DModel": {"config": {"patch_size": 2, "in_channels": 4, "out_channels": 4,
        "caption_channels": [W, W], "llama_layers": [0, 1], "max_resolution": (8, 8), "axes_dims_rope": (4, 6, 6),
        "force_inference_output": True}, "main": (2, 4, 8, 8), "inputs": {"timesteps": torch.full((2,), 7.0),
        "encoder_hidden_states_t5": r(2, 7, W), "encoder_hidden_states_llama3": r(2, 2, 7, W),
        "encoder_hidden_states": None}},
    "HunyuanDiT2DControlNetModel": {"config": {"in_channels": 4, "patch_size": 2, "text_len": 7, "text_len_t5": 5,
        "transformer_num_layers": 4}, "main": (2, 4, 8, 8), "inputs": {"controlnet_cond": r(2, 4, 8, 8)} | HUNYUAN},
    "HunyuanDiT2DModel": {"config": {"in_channels": 4, "patch_size": 2, "text_len": 7, "text_len_t5": 5, "num_layers":
        2}, "main": (2, 4, 8, 8), "inputs": {} | HUNYUAN},
    "HunyuanDiT2DMultiControlNetModel": {"parts": twice("HunyuanDiT2DControlNetModel"), "main": (2, 4, 8, 8),
        "inputs": {"controlnet_cond": [r(2, 4, 8, 8)] * 2, "conditioning_scale": [1.0, 0.5]} | HUNYUAN},
    "HunyuanImageTransformer2DModel": {"config": {"rope_axes_dim": (8, 8), "text_embed_2_dim": W}, "main": (2, 16, 8,
        8), "inputs": {"encoder_hidden_states_2": r(2, 5, W), "encoder_attention_mask_2": ones(2, 5)}},
    "HunyuanVideo15Transformer3DModel": {"config": {"rope_axes_dim": (4, 6, 6)}, "main": (2, 16, 3, 8, 8), "inputs":
        {"encoder_hidden_states_2": r(2, 5, W), "encoder_attention_mask_2": ones(2, 5), "image_embeds": r(2, 6, W)}},
    "HunyuanVideoFramepackTransformer3DModel": {"config": {"has_image_proj": True, "image_proj_dim": W,
        "has_clean_x_embedder": True}, "main": (2, 16, 3, 8, 8), "inputs": {"image_embeds": r(2, 6, W),
        "indices_latents": torch.arange(3), "guidance": t(3.0, 3.0)}},
    "I2VGenXLUNet": {"config": {"attention_head_dim": 8, "cross_attention_dim": W}, "main": (1, 4, 2, 8, 8), "inputs":
        {"image_latents": r(1, 4, 2, 8, 8), "image_embeddings": r(1, W), "fps": t(8)}},
    "Ideogram4Transformer2DModel": {"config": {"mrope_section": (4, 2, 2)}, "main": (2, 12, 16), "inputs":
        {"encoder_hidden_states": r(2, 12, W), "position_ids": torch.arange(12)[None, :, None].repeat(2, 1, 3),
        "segment_ids": torch.ones(2, 12, dtype=torch.long), "indicator": t(*[3] * 5, *[2] * 7).repeat(2, 1)}},
    "JoyImageEditPlusTransformer3DModel": {"main": (2, 8, 16, 1, 2, 2), "inputs": {"shape_list": [[(1, 2, 2), (1, 2,
        2)]] * 2}},
    "Kandinsky3UNet": {"config": {"attention_head_dim": 4, "block_out_channels": (16, 16, 16, 16), "groups": 4,
        "time_embedding_dim": 16, "cross_attention_dim": 16}, "main": (2, 4, 8, 8)},
    "Kandinsky5Transformer3DModel": {"main": (1, 2, 8, 8, 4), "inputs": {"visual_rope_pos": [torch.arange(2),
        torch.arange(4), torch.arange(4)], "text_rope_pos": torch.arange(7)}},
    "Kandinsky6SRLatentUpscalerBank": {"main": (1, 16, 2, 8, 8), "inputs": {"scale": 2}},
    "Kandinsky6SRTransformer3DModel": {"main": (1, 1, 16, 16, 33)},
    "Kandinsky6Transformer3DModel": {"main": (1, 2, 8, 8, 33), "inputs": {"encoder_attention_mask": None}},
    "Krea2Transformer2DModel": {"config": {"num_text_layers": 2}, "main": (2, 16, 16), "inputs":
        {"encoder_hidden_states": r(2, 7, 2, W), "position_ids": torch.arange(23)[:, None].repeat(1, 3)}},
    "LatteTransformer3DModel": {"config": {"in_channels": 4, "out_channels": 4, "patch_size": 2,
        "num_embeds_ada_norm": 50, "norm_type": "ada_norm_single", "caption_channels": W, "cross_attention_dim": W,
        "norm_elementwise_affine": False, "video_length": 2}, "main": (2, 4, 2, 8, 8), "inputs": {"timestep": t(7, 7),
        "encoder_attention_mask": None}},
    "LongCatAudioDiTTransformer": {"main": (2, 16, 8), "inputs": {"latent_cond": r(2, 16, 8), "attention_mask":
        ones(2, 16)}},
    "LongCatAudioDiTVae": {"config": {"c_mults": [1, 2], "strides": [2, 2], "downsampling_ratio": 4, "latent_dim": 8,
        "encoder_latent_dim": 16}, "main": (1, 1, 256)},
    "LTX2VideoDiffusionDecoderModel": {"config": {"decoder_head_dim": 8, "decoder_stage_channels": (64, 32, 16, 16,
        8), "decoder_stage_depths": (1, 1, 1, 1, 2), "decoder_stage_kernels": ((1, 1, 1),) * 4,
        "decoder_stage5_kernel": (1, 3, 3), "decoder_t_emb_dim": 16}, "main": (1, 8, 1, 2, 2)},
    "LTX2VideoTransformer3DModel": {"main": (2, 32, 16), "inputs": {"audio_hidden_states": r(2, 6, 16),
        "audio_encoder_hidden_states": r(2, 7, W), "num_frames": 2, "height": 4, "width": 4, "audio_num_frames": 6,
        "timestep": torch.full((2, 32), 7.0), "audio_timestep": torch.full((2, 6), 7.0)}},
    "LTXVideoTransformer3DModel": {"main": (2, 32, 16), "inputs": {"num_frames": 2, "height": 4, "width": 4}},
    "LuminaNextDiT2DModel": {"config": {"num_kv_heads": 2, "multiple_of": 8}, "main": (2, 4, 8, 8), "inputs":
        {"encoder_mask": ones(2, 7), "image_rotary_emb": torch.polar(torch.ones(4, 4, 8), r(4, 4, 8))}},
    "MiniMaxH3Transformer3DModel": {"config": {"rope_freq_dim": 2}, "main": (1, 4, 64), "inputs":
        {"audio_hidden_states": r(1, 3, 16), "encoder_hidden_states": r(1, 5, W), "timestep": t(1.0, 7.0),
        "timestep_indices": t(*[0] * 5, *[1] * 7), "token_tags": t(*[0] * 5, *[1] * 4, *[2] * 3), "position_ids":
        torch.arange(12)[:, None].repeat(1, 3), "text_indices": torch.arange(5), "video_indices": torch.arange(5, 9),
        "audio_indices": torch.arange(9, 12)}},
    "MiniMaxMusic3ConditionEncoder": {"config": {"num_condition_layers": 2}, "main": (1, 4, 64)},
    "MiniMaxMusic3RVQDepthDecoder": {"main": (2, 5, W)},
    "MiniMaxMusic3Transformer1DModel": {"config": {"rotary_dim": 8}, "main": (2, 16, 9), "inputs":
        {"encoder_hidden_states": r(2, 9, W)}},
    "MMAudioVAE": {"main": (1, 8192)},
    "MMAudioVocoder": {"config": {"upsample_initial_channel": 128}, "main": (1, 128, 8)},
    "MultiAdapter": {"parts": twice("T2IAdapter"), "main": None, "inputs": {"xs": [r(2, 3, 64, 64)] * 2}},
    "MultiControlNetModel": {"parts": twice("ControlNetModel"), "main": (2, 4, 8, 8), "inputs": {"controlnet_cond":
        [r(2, 3, 64, 64)] * 2, "conditioning_scale": [1.0, 0.5]}},
    "MultiControlNetUnionModel": {"parts": twice("ControlNetUnionModel"), "main": (2, 4, 8, 8), "inputs":
        {"controlnet_cond": [[r(2, 3, 64, 64)]] * 2, "control_type": [r(2, 2)] * 2, "control_type_idx": [[0], [1]],
        "conditioning_scale": [1.0, 0.5]}},
    "OmniGenTransformer2DModel": {"config": {"pad_token_id": 0, "num_key_value_heads": 2, "rope_scaling":
        {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}}, "main": (2, 4, 8, 8), "inputs":
        {"input_ids": ids(2, 9), "input_img_latents":
        [], "input_image_sizes": {}, "attention_mask": torch.ones(2, 26, 26), "position_ids":
        torch.arange(26).repeat(2, 1)}},
    "PriorTransformer": {"main": (2, W), "inputs": {"proj_embedding": r(2, W)}},
    "PRXTransformer2DModel": {"config": {"axes_dim": [8, 8]}},
    "QwenImage21Transformer2DModel": {"main": (1, 16, 16), "inputs": {"encoder_hidden_states": r(1, 7, W),
        "img_shapes": [[(1, 4, 4)]], "img_mask": torch.tensor([[False] * 7 + [True] * 4]), "timestep": t(7.0),
        "encoder_hidden_states_mask": ones(1, 7)}},
    "QwenImageMultiControlNetModel": {"parts": lambda build: ([build("QwenImageControlNetModel")],), "main": (2, 16,
        16), "inputs": {"controlnet_cond": [r(2, 16, 16)] * 2, "conditioning_scale": [1.0, 0.5]}},
    "SanaWMLTX2RefinerTransformer3DModel": {"main": (2, 32, 16), "inputs": {"timestep": torch.full((2, 32), 7.0),
        "video_rotary_emb": (r(1, 32, W), r(1, 32, W))}},
    "SanaWMTransformer3DModel": {"config": {"hidden_size": 32, "linear_head_dim": 16, "num_layers": 2}, "main": (1,
        16, 2, 4, 4), "inputs": {"encoder_hidden_states": r(1, 1, 7, W), "mask": ones(1, 7), "chunk_plucker": r(1, 48,
        2, 4, 4), "camera_conditions": None, "encoder_attention_mask": None}},
    "SD3MultiControlNetModel": {"parts": twice("SD3ControlNetModel"), "main": (2, 16, 8, 8), "inputs":
        {"controlnet_cond": [r(2, 16, 8, 8)] * 2, "conditioning_scale": [1.0, 0.5]}},
    "SparseControlNetModel": {"main": (1, 4, 2, 8, 8), "inputs": {"encoder_hidden_states": r(2, 7, W),
        "controlnet_cond": r(1, 4, 2, 8, 8), "conditioning_mask": torch.ones(1, 1, 2, 8, 8)}},
    "StableCascadeUNet": {"config": {"timestep_ratio_embedding_dim": 16, "conditioning_dim": W, "block_out_channels":
        (32, 32), "clip_text_pooled_in_channels": W}, "main": (2, 16, 8, 8), "inputs": {"clip_text_pooled": r(2, 1,
        W)}},
    "T5FilmDecoder": {"config": {"input_dims": 16, "targets_length": 8}, "main": None, "inputs":
        {"encodings_and_masks": [(r(2, 7, W), ones(2, 7))], "decoder_input_tokens": r(2, 8, 16), "decoder_noise_time":
        t(0.3, 0.5)}},
    "Transformer2DModel": {"config": {"in_channels": 32, "cross_attention_dim": W}, "main": (2, 32, 8, 8), "inputs":
        {"encoder_attention_mask": None}},
    "TransformerTemporalModel": {"config": {"in_channels": 32, "norm_num_groups": 4}, "main": (4, 32, 8, 8), "inputs":
        {"num_frames": 2, "encoder_hidden_states": None}},
    "UNet1DModel": {"config": {"extra_in_channels": 64, "block_out_channels": (32, 32, 64)}, "main": (2, 2, 64)},
    "UNet3DConditionModel": {"config": {"attention_head_dim": 8}},
    "UNetControlNetXSModel": {"main": (2, 4, 8, 8), "inputs": {"controlnet_cond": r(2, 3, 64, 64)}},
    "UNetMotionModel": {"main": (1, 4, 2, 8, 8), "inputs": {"encoder_hidden_states": r(2, 7, W)}},
    "UNetSpatioTemporalConditionModel": {"config": {"block_out_channels": (32, 64), "down_block_types":
        ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"), "up_block_types": ("UpBlockSpatioTemporal",
        "CrossAttnUpBlockSpatioTemporal"), "num_attention_heads": (2, 4), "projection_class_embeddings_input_dim": 96,
        "addition_time_embed_dim": 32}, "main": (1, 2, 8, 8, 8), "inputs": {"added_time_ids": r(1, 3),
        "encoder_hidden_states": r(1, 1, W)}},
    "UVit2DModel": {"config": {"micro_cond_embed_dim": 160, "micro_cond_encode_dim": 32, "sample_size": 8,
        "block_num_heads": 2}, "main": None, "inputs": {"input_ids": ids(2, 8, 8), "pooled_text_emb": r(2, W),
        "micro_conds": r(2, 5)}},
    "WanAnimate2Transformer3DModel": {"config": {"in_dim": 20, "text_len": 7}, "main": None, "inputs":
        {"hidden_states": [r(16, 1, 4, 4)], "condition_latents": [r(4, 1, 4, 4)], "encoder_hidden_states": [r(5, W)],
        "timestep": t(7.0), "kv_cache": {}, "kv_cache_mode": "extract", "seq_len": 4, "encoder_hidden_states_image":
        r(1, 257, 1280), "reference_grid_sizes": t([1, 2, 2])}},
    "WanAnimateTransformer3DModel": {"config": {"in_channels": 20, "latent_channels": 8, "out_channels": 8,
        "num_layers": 2, "inject_face_latents_blocks": 1, "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
        "motion_encoder_size": 16, "motion_style_dim": 8, "motion_dim": 4, "face_encoder_num_heads": 2}, "main": (1,
        20, 3, 8, 8), "inputs": {"encoder_hidden_states_image": r(1, 6, W), "pose_hidden_states": r(1, 8, 2, 8, 8),
        "face_pixel_values": r(1, 3, 5, 16, 16)}},
    "WanVACETransformer3DModel": {"config": {"vace_layers": [0, 1], "num_layers": 2, "vace_in_channels": 12}, "main":
        (2, 16, 3, 8, 8), "inputs": {"control_hidden_states": r(2, 12, 3, 8, 8)}},
    "ZImageControlNetModel": {"config": {"control_layers_places": [0], "control_refiner_layers_places": [0],
        "control_in_dim": 16, "add_control_noise_refiner": "control_noise_refiner"}, "main": None, "inputs": {"x":
        [r(16, 1, 8, 8)] * 2, "t": t(0.5, 0.5), "cap_feats": [r(7, W)] * 2, "control_context": [r(16, 1, 8, 8)] * 2}},
}  # fmt: skip
