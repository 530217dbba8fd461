"""Read a long text with its keys and values kept in 8 bits, and ask for more of it twice, over the same cache.

python examples/kv_int8_long_context.py [--model FOLDER] [--text FILE] [--kind int8]
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import accel

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--model", default="examples/models/tiny-lm")
arguments.add_argument("--text", default="examples/models/tiny-lm/held_out.txt")
arguments.add_argument("--kind", default="int8", help="or fp8, on GPUs of compute capability 8.9 and later")
chosen = arguments.parse_args()

device, new = "cuda" if torch.cuda.is_available() else "cpu", 40
tokenizer = AutoTokenizer.from_pretrained(chosen.model)
model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype="auto").to(device).eval()
most = min(32768, model.config.max_position_embeddings) - 2 * new
inputs = tokenizer(Path(chosen.text).read_text(), return_tensors="pt", truncation=True, max_length=most).to(device)
with torch.no_grad():
    before = model(**inputs, labels=inputs["input_ids"]).loss.exp()
    accel.optimize(model, kv_cache=chosen.kind)
    after = model(**inputs, labels=inputs["input_ids"]).loss.exp()
print(*(reason for *_, reason in accel.report(model).sites if "bytes a token" in reason), sep="\n")
print(f"perplexity {before:.3f} before, {after:.3f} after")

given = {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True}
first = model.generate(**inputs, **given)
more = model.generate(first.sequences, past_key_values=first.past_key_values, **given)  # reads nothing twice
length = inputs["input_ids"].shape[1]
print(f"after {length} tokens: {tokenizer.decode(more.sequences[0, length:], skip_special_tokens=True)!r}")
