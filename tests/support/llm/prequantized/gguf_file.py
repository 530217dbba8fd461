"""A tiny Llama as a GGUF file of random blocks."""

from pathlib import Path

import torch
from accel_kernels.gemm.blocks.ggml import GGML

from support.kernels.ggml import random_blocks

WIDTH, INNER, HEADS, KEYS, WORDS = 256, 512, 8, 4, 128


def write_llama(path: Path, name: str, layers: int = 2) -> None:
    """Matrices in the format of this name, norms in float32."""
    import gguf

    format, kind = GGML[name], gguf.GGMLQuantizationType[name]
    spread = 0.25 / 2 ** (format.low.bits + (format.packing != "") * 5)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(WORDS)
    keys, generator = WIDTH // HEADS * KEYS, torch.Generator().manual_seed(0)
    inside = {
        "attn_q": (WIDTH, WIDTH), "attn_k": (keys, WIDTH), "attn_v": (keys, WIDTH), "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
    }  # fmt: skip
    matrices = {f"blk.{layer}.{place}": shape for layer in range(layers) for place, shape in inside.items()}
    matrices |= {"token_embd": (WORDS, WIDTH), "output": (WORDS, WIDTH)}
    for seed, (place, (rows, columns)) in enumerate(matrices.items()):
        data = random_blocks(format, rows * columns // format.columns, seed, spread).reshape(rows, -1)
        writer.add_tensor(f"{place}.weight", data.numpy(), raw_dtype=kind)
    for place in ("output", *(f"blk.{layer}.{part}" for layer in range(layers) for part in ("attn", "ffn"))):
        writer.add_tensor(f"{place}_norm.weight", (1 + torch.randn(WIDTH, generator=generator) / 8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
