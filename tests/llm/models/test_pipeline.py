"""Language models in a pipeline and with a chat template: the texts that stock gives."""

import torch

import accel
from support.llm.calls import tokenizer
from support.llm.families import make

TALK = [
    {"role": "user", "content": "abc"},
    {"role": "assistant", "content": "de"},
    {"role": "user", "content": "f"},
]


def test_the_text_generation_pipeline():
    from transformers import pipeline

    model, stock = make("llama"), make("llama")
    calls = [
        ("abcdef", {}),
        (["abcdef", "xyz", "PQRSTUV"], {"batch_size": 3}),
        (["abcdef", "xyz"], {"num_return_sequences": 2, "do_sample": True, "return_full_text": False}),
        ("abcdef", {"num_beams": 3, "return_tensors": True}),
        (TALK, {}),
        ([TALK, TALK[:1]], {"batch_size": 2, "do_sample": True, "top_k": 9}),
    ]
    pipe, twin = (pipeline("text-generation", model=m, tokenizer=tokenizer(), device="cpu") for m in (model, stock))
    assert accel.optimize(pipe) is pipe and accel.report(pipe).sites

    def answers(pipe):
        found = []
        for given, call in calls:
            torch.manual_seed(2)
            found.append(pipe(given, max_new_tokens=6, **({"do_sample": False} | call)))
        return found

    wanted = answers(twin)
    assert answers(pipe) == wanted and answers(pipe) == wanted
    accel.restore(pipe)
    assert answers(pipe) == wanted and accel.report(pipe).sites == []
