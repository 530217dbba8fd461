"""Store a language model in 4 bits and save it: a folder that transformers, vLLM and accel.load read.

python examples/quantize_and_save.py [--model FOLDER] [--scheme int4-g64] [--method rtn] [--out FOLDER]
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import accel

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--model", default="examples/models/tiny-lm")
arguments.add_argument("--scheme", default="int4-g64")
arguments.add_argument("--method", default="rtn")
arguments.add_argument("--out", default="tiny-lm-int4")
chosen = arguments.parse_args()

tokenizer = AutoTokenizer.from_pretrained(chosen.model)
model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype="auto").eval()
text = Path("examples/models/tiny-lm/held_out.txt").read_text()
inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)


def perplexity() -> float:
    with torch.no_grad():
        return float(model(**inputs, labels=inputs["input_ids"]).loss.exp())


before = perplexity()
# "gptq" and "awq" look at calibration texts: calibration=[...], tokenizer=tokenizer. Interrupted, it goes on next time.
accel.quantize(model, chosen.scheme, method=chosen.method, tokenizer=tokenizer, out=chosen.out)
size = sum(file.stat().st_size for file in Path(chosen.out).glob("*.safetensors"))
print(f"perplexity {before:.1f} before, {perplexity():.1f} after; {size / 1e6:.1f} MB saved in {chosen.out}")
