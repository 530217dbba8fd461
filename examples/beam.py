"""Beam search: the likeliest of many continuations, with the beams and scores that stock finds.

Run from the root of a checkout.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import accel

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "examples/models/tiny-lm"  # or any other causal language model
on_gpu = torch.cuda.is_available()
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16 if on_gpu else torch.float32)
model.to("cuda" if on_gpu else "cpu")
inputs = tokenizer("She was so much surprised that", return_tensors="pt").to(model.device)


def search():
    """Four beams, the best three of them given back; yours: also do_sample=True, length_penalty, early_stopping."""
    beams = {"num_beams": 4, "num_return_sequences": 3, "no_repeat_ngram_size": 4, "output_scores": True}
    return model.generate(**inputs, **beams, max_new_tokens=24, do_sample=False, return_dict_in_generate=True)


stock = search()
with accel.optimized(model):  # for this block only
    fast = search()
for tokens, score in zip(fast.sequences, fast.sequences_scores, strict=True):
    print(f"{score:6.3f} {tokenizer.decode(tokens, skip_special_tokens=True)!r}")
same = stock.sequences.tolist() == fast.sequences.tolist()
apart = float((stock.sequences_scores - fast.sequences_scores).abs().max())
# In half precision beams may change places that are as good as each other but for rounding.
print(f"the same beams as stock: {same}; scores apart {apart:.1e}")
