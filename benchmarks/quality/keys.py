"""What rounding keys to 8 bits loses where a few of their channels are constants, and whether the guard sees it.

The shipped text model with a bias planted into two channels of every key head of one layer, as Qwen2.5 has them. By
size of the bias and kind of code: the decibels that `kv_cache` judges that layer by, and the perplexity of held-out
text where all layers are rounded all the same, emulated in float32.
"""

from pathlib import Path
from unittest import mock

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import accel
from accel.llm.runtime import kv_quantization as cache_rounding
from benchmarks.quality.text import HELD_OUT, chapters, perplexity, windows
from benchmarks.quality.ways import rounding_cache
from benchmarks.study import ROOT, Study

FOLDER = ROOT / "examples" / "models" / "tiny-lm"
LAYER, SIZES = 2, (0, 10, 30, 100, 300)


def planted(size: float) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    keys = model.model.layers[LAYER].self_attn.k_proj
    keys.bias = nn.Parameter(torch.zeros(keys.out_features))
    dim = model.config.head_dim
    for head in keys.bias.data.view(-1, dim):  # those that turn slowest
        head[dim // 2 - 1], head[dim - 1] = size, -size
    return model


def judged(size: float, kind: str) -> float:
    """Decibels of the layer."""
    found = []

    def decibels(*given):
        found.append(real(*given))
        return found[-1]

    real = cache_rounding.key_decibels
    with mock.patch.object(cache_rounding, "key_decibels", decibels):
        accel.optimize(planted(size), kv_cache=kind)
    return found[LAYER]


def main(out: Path) -> None:
    rows = windows(AutoTokenizer.from_pretrained(FOLDER), chapters(HELD_OUT))
    about = f"{FOLDER.name}, layer {LAYER}"
    record = Study("key-constants", out, about, dtype=torch.float32, least_db=cache_rounding.LEAST, rows=[])
    for size in SIZES:
        model = planted(size)
        row = {"bias": size, "perplexity": perplexity(model, rows)}
        for kind in cache_rounding.KV_DTYPES:
            with rounding_cache(kind):
                change = perplexity(model, rows) / row["perplexity"] - 1
            row[kind] = {"db": round(judged(size, kind), 1), "change": change}
        record.add("rows", row)
