"""A batch of prompts of different lengths, filled up on the left: each row is what its prompt gives by itself.

Run from the root of a checkout.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import accel

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "examples/models/tiny-lm"  # or any other causal language model
PROMPTS = [
    "Mr. Darcy",
    "The weather continued much the same all the following morning; and",
    '"My dear sister," said she,',
]
on_gpu = torch.cuda.is_available()
tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")  # generate() writes on at the right
if tokenizer.pad_token is None:  # as with Llama 3 and others
    tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16 if on_gpu else torch.float32)
accel.optimize(model.to("cuda" if on_gpu else "cpu"))


def write(texts: list[str]) -> list[str]:
    """Greedy, so that rows can be compared; yours: do_sample=True and as many prompts as memory holds."""
    inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


together = write(PROMPTS)
for text in together:
    print(repr(text))
alone = [write([prompt])[0] for prompt in PROMPTS]
# In half precision a row may take another turn where two tokens are equally likely but for rounding, as in stock.
print("rows as by themselves:", sum(a == b for a, b in zip(together, alone, strict=True)), "of", len(PROMPTS))
