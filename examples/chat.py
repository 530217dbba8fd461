"""A chat of several turns that keeps its cache: each turn reads only what is new. Run from the root of a checkout."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import accel

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "examples/models/tiny-lm"  # or any model with a chat template
SAID = ["Have you heard that Netherfield is let?", "And is he married or single?", "What do you think of him?"]
on_gpu = torch.cuda.is_available()
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16 if on_gpu else torch.float32)
accel.optimize(model.to("cuda" if on_gpu else "cpu"))

chat, cache, known = [], DynamicCache(config=model.config), torch.empty(0, dtype=torch.long, device=model.device)
for said in SAID:  # yours: while said := input("> ")
    chat.append({"role": "user", "content": said})
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(model.device)
    tokens = inputs.input_ids[0]

    # A reply read again as text may be cut into other tokens than it was written in: the cache keeps what is the same.
    shared = min(len(tokens), len(known), cache.get_seq_length())
    kept = int((tokens[:shared] == known[:shared]).cumprod(0).sum())
    if kept < cache.get_seq_length():
        cache.crop(kept - cache.get_seq_length())  # a negative number: so many tokens fewer

    torch.manual_seed(0)
    call = {"max_new_tokens": 60, "do_sample": True, "temperature": 0.7}
    known = model.generate(**inputs, past_key_values=cache, **call)[0]
    reply = tokenizer.decode(known[len(tokens) :], skip_special_tokens=True)
    chat.append({"role": "assistant", "content": reply})
    print(f"> {said}\n{reply}\n({kept} of {len(tokens)} tokens were in the cache)\n")
