"""Many requests of different lengths at once: each ends when it ends, and the next one takes its place.

Run from the root of a checkout.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

import accel

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "examples/models/tiny-lm"  # or any other causal language model
BEGINNINGS = ["Mr. Darcy", "The weather continued much the same all the following morning; and", '"My dear sister,"']
on_gpu = torch.cuda.is_available()
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16 if on_gpu else torch.float32)
# On a CPU small models run stock, and so does their batching; this shows accel's. A GPU needs no cpu="fuse".
accel.optimize(model.to("cuda" if on_gpu else "cpu"), cpu="fuse")

# transformers' own call. Prompts are lists of token ids, as a tokenizer gives them; nothing is padded.
prompts = [tokenizer(f"{number}. {text}")["input_ids"] for number in range(3) for text in BEGINNINGS]
config = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=tokenizer.eos_token_id)
outputs = model.generate_batch(prompts, generation_config=config)
for output in list(outputs.values())[:3]:
    print(repr(tokenizer.decode(output.prompt_ids + output.generated_tokens)))
print(sum(output.error is None for output in outputs.values()), "of", len(prompts), "requests answered")

# Or one by one, each with settings of its own, and their tokens as they come.
sampling = GenerationConfig(max_new_tokens=20, do_sample=True, temperature=0.8, eos_token_id=tokenizer.eos_token_id)
each = ContinuousBatchingConfig(per_request_processors=True)  # stock asks for it; where accel batches, it is always so
with model.continuous_batching_context_manager(sampling, continuous_batching_config=each) as manager:
    manager.add_request(prompts[0], request_id="lively", temperature=1.2, streaming=True)
    for output in manager.request_id_iter("lively"):
        print(len(output.generated_tokens), end=" ")
    print(repr(tokenizer.decode(output.generated_tokens)))
