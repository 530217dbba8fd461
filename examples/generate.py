"""Text generation: a stock transformers script with one line added. Run from the root of a checkout."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import accel

folder = sys.argv[1] if len(sys.argv) > 1 else "examples/models/tiny-lm"  # or "meta-llama/Llama-3.1-8B", "Qwen/..."
on_gpu = torch.cuda.is_available()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if on_gpu else torch.float32)
model.to("cuda" if on_gpu else "cpu")

accel.optimize(model)  # the one line

torch.manual_seed(0)
inputs = tokenizer("It was a beautiful evening, and", return_tensors="pt").to(model.device)
tokens = model.generate(**inputs, max_new_tokens=80, do_sample=True, temperature=0.8, top_p=0.9)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
print(accel.report(model).summary())
