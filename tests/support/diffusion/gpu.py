"""Denoisers on a GPU: inputs, outputs, and which graphs there are."""

import torch
from torch.utils._pytree import tree_map_only

import accel
from support.diffusion.outputs import run


def on_gpu(inputs, dtype=torch.float16):
    """All tensors of nested inputs, those of fractions in this dtype."""
    return tree_map_only(torch.Tensor, lambda t: t.to("cuda", dtype if t.is_floating_point() else None), inputs)


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
