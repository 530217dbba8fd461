"""What rounding keys to 8 bits loses where a few of their channels are constants, and whether the guard sees it.

python benchmarks/key_constants.py OUT.json: the shipped text model with a bias planted into two channels of every key
head of one layer, as Qwen2.5 has them. By size of the bias and kind of code: the decibels that `kv_cache` judges that
layer by, and the perplexity of held-out text where all layers are rounded all the same, emulated in float32.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
from quality_text import HELD_OUT, ROOT, chapters, perplexity, windows
from quality_ways import rounding_cache
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import accel
from accel.bench.machine import commit, machine, now
from accel.llm.analysis import kv_quantization as cache_rounding

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
    with mock.patch.object(cache_rounding, "decibels", decibels):
        accel.optimize(planted(size), kv_cache=kind)
    return found[LAYER]


@torch.no_grad()
def main(path: Path) -> None:
    rows = windows(AutoTokenizer.from_pretrained(FOLDER), chapters(HELD_OUT))
    result = {"case": "key-constants", "about": f"{FOLDER.name}, layer {LAYER}", "date": now(), "commit": commit()}
    result |= {"machine": machine(torch.device("cpu")), "least_db": cache_rounding.LEAST, "rows": []}
    for size in SIZES:
        model = planted(size)
        row = {"bias": size, "perplexity": perplexity(model, rows)}
        for kind in cache_rounding.CODES:
            with rounding_cache(kind):
                change = perplexity(model, rows) / row["perplexity"] - 1
            row[kind] = {"db": round(judged(size, kind), 1), "change": change}
        result["rows"].append(row)
        print(row, flush=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
