"""Models that are understood in part or not at all, whole calls, stock beside accel: no ratio may be below 1 by more
than noise. Needs a GPU.

python benchmarks/pays.py [--json FILE] [NAME...]: real widths, few layers, random weights, one row of text. Each call
is made in turns; the least time of each counts. What accel left stock is printed with its reason.
"""

import argparse
import copy
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSpeechSeq2Seq

import accel

LAYERS = 4
TOKENS = 48
ROUNDS = 7
LEAST = 0.97  # below this a row is a fault

QWEN35 = {
    "hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 256, "num_hidden_layers": LAYERS,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "whisper-large-v3": (
        "whisper",
        {
            "d_model": 1280, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": 20,
            "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "num_mel_bins": 128,
            "vocab_size": 51866,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
            "hybrid_override_pattern": "M-M*", "layers_block_type": ["mamba", "mlp", "mamba", "attention"],
        },
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 16,
            "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "first_k_dense_replace": 1, "num_hidden_layers": LAYERS, "vocab_size": 102400,
        },
    ),
    "mamba-2": (
        "mamba2",
        {
            "hidden_size": 4096, "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "expand": 2,
            "num_hidden_layers": LAYERS, "vocab_size": 32768,
        },
    ),
    "qwen3.5": ("qwen3_5_text", QWEN35),
}  # fmt: skip


def made(kind: str, changes: dict[str, Any]) -> torch.nn.Module:
    """The model on the GPU in bfloat16, random weights. Fields that a version's configuration lacks are left out."""
    known = vars(CONFIG_MAPPING[kind]()).keys() | {"num_hidden_layers"}
    config = CONFIG_MAPPING[kind](**{name: value for name, value in changes.items() if name in known})
    auto = AutoModelForSpeechSeq2Seq if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("cuda"):
        model = auto.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def call_of(model: Any) -> Callable[[], Any]:
    """A whole `generate`, of a window of sound or of a text."""
    length = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    if model.config.is_encoder_decoder:
        sound = torch.randn(1, model.config.num_mel_bins, 3000, device="cuda", dtype=torch.bfloat16)
        return lambda: model.generate(input_features=sound, **length)
    ids = torch.arange(1, 65, device="cuda")[None]
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **length)


def seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def row(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    stock = made(*CONFIGS[name])
    fused = copy.deepcopy(stock)
    optimizing = seconds(lambda: accel.optimize(fused))
    calls = {"stock": call_of(stock), "accel": call_of(fused)}
    times: dict[str, list[float]] = {which: [] for which in calls}
    for turn in range(ROUNDS + 2):
        for which in sorted(calls, reverse=bool(turn % 2)):
            taken = seconds(calls[which])
            if turn > 1:
                times[which].append(taken)
    sites = [site for site in accel.report(fused).to_dict()["sites"] if site["status"] == "patched"]
    reasons = {(s["rule"], s["reason"]) for s in accel.report(fused).to_dict()["sites"] if "would not" in s["reason"]}
    least = {which: 1e3 * min(taken) / TOKENS for which, taken in times.items()}
    return {
        "name": name,
        "stock_ms_a_token": least["stock"],
        "accel_ms_a_token": least["accel"],
        "ratio": least["stock"] / least["accel"],
        "optimize_s": optimizing,
        "patched": sorted({site["rule"] for site in sites}),
        "left": sorted(": ".join(pair) for pair in reasons),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CONFIGS)}; all without any")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    unknown = set(given.names) - CONFIGS.keys()
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: names are {', '.join(CONFIGS)}")
    rows = []
    for name in given.names or CONFIGS:
        try:
            rows.append(row(name))
        except Exception as error:  # a class that this version of transformers lacks, or makes of other settings
            rows.append({"name": name, "error": f"{type(error).__name__}: {error}"})
        gc.collect()
        torch.cuda.empty_cache()
        found = rows[-1]
        if "error" in found:
            print(f"{name:18} {found['error']}")
            continue
        print(f"{name:18} stock {found['stock_ms_a_token']:7.2f} ms a token, accel {found['accel_ms_a_token']:7.2f}: "
              f"{found['ratio']:.3f}x, patched: {', '.join(found['patched']) or 'nothing'}")  # fmt: skip
        for reason in found["left"]:
            print(f"{'':18} {reason}")
    if given.json is not None:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        given.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    sys.exit(any(found.get("ratio", 0.0) < LEAST for found in rows))


if __name__ == "__main__":
    main()
