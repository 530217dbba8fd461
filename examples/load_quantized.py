"""Load a model that was saved in fewer bits, never whole in memory, and write with it.

python examples/load_quantized.py [--model FOLDER], a folder that examples/quantize_and_save.py wrote, or another in
the layout of compressed-tensors. With that package installed, AutoModelForCausalLM.from_pretrained does too.
"""

import argparse

import torch
from transformers import AutoTokenizer

import accel

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--model", default="tiny-lm-int4")
arguments.add_argument("--prompt", default="It was a beautiful evening, and")
chosen = arguments.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(chosen.model)
model = accel.load(chosen.model, device=device)
accel.optimize(model)

inputs = tokenizer(chosen.prompt, return_tensors="pt").to(device)
written = model.generate(**inputs, max_new_tokens=60, do_sample=False)
print(tokenizer.decode(written[0], skip_special_tokens=True))
held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
print(f"{held / 1e6:.1f} MB in memory; {accel.report(model).summary()}")
