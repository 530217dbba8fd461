"""Denoisers on a GPU: inputs, outputs, and which graphs there are."""

import torch

import accel
from support.diffusion.outputs import in_dtype, run


def on_gpu(inputs, dtype=torch.float16):
    return in_dtype(inputs, dtype, "cuda")


def close(got, wanted, share=4e-3):
    error = float((got.float() - wanted.float()).abs().max())
    assert error <= share * float(wanted.float().abs().max()), error


def graphs(model):
    return [row for row in accel.report(model).graphs if row["status"] == "graph"]


def warmed(model, inputs):
    accel.optimize(model, graphs=True)
    for _ in range(2):
        run(model, inputs)
    assert len(graphs(model)) == 1, accel.report(model).graphs
    return model
