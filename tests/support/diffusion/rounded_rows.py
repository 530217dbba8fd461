"""Denoisers that round rows, and the same by the formula."""

import torch

import accel
from support.llm.quantized import by_token, rounded
from support.patched import sites

INT8 = {"weights": "int8", "activations": "int8"}
EXACT = 1e-9  # how far apart float64 may be


def options(kind: str) -> dict:
    return {"weights": kind.partition("-")[0], "activations": kind}


def double(inputs: dict) -> dict:
    return torch.utils._pytree.tree_map(
        lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, inputs
    )


def oracle(stock, ours):
    """A copy of stock over the weights of ours, with the inputs rounded of those linears that the report names."""
    twin = rounded(stock, ours)
    for row in accel.report(ours).weights:
        held = ours.get_submodule(row["path"]).quantized
        twin.get_submodule(row["path"]).weight.data = held.numbers().double() * held.scales.double()
    for path, (status, reason) in sites(ours, "activations").items():
        if path and status == "patched":
            kind = reason.split("activations ")[1].split()[0]
            twin.get_submodule(path).register_forward_pre_hook(
                lambda module, args, kind=kind: (by_token(args[0], kind), *args[1:])
            )
    return twin
