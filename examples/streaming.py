"""Streaming: the text appears word by word while generate() runs in another thread, as a chat server does it.

Run from the root of a checkout.
"""

import sys
import time
from threading import Thread

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import accel

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "examples/models/tiny-lm"  # or the model you serve
NEW = 80
on_gpu = torch.cuda.is_available()
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16 if on_gpu else torch.float32)
accel.optimize(model.to("cuda" if on_gpu else "cpu"))
inputs = tokenizer("The carriage was at the door, and", return_tensors="pt").to(model.device)
model.generate(**inputs, max_new_tokens=NEW)  # the first call of all makes things ready; a server does so at its start

streamer = TextIteratorStreamer(tokenizer, skip_special_tokens=True)
call = {**inputs, "streamer": streamer, "max_new_tokens": NEW, "do_sample": True, "temperature": 0.8}
call["min_new_tokens"] = NEW  # so that their number is known; yours: leave this away, and the text ends by itself
torch.manual_seed(0)
start, times = time.perf_counter(), []
Thread(target=model.generate, kwargs=call).start()
for piece in streamer:
    times.append(time.perf_counter() - start)
    print(piece, end="", flush=True)
print(f"\n{times[1] * 1e3:.0f} ms to the first words, {NEW / times[-1]:.0f} tokens a second")
