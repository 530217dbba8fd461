"""Oracles: rows rounded as ours, and steps skipped as ours."""

import torch

import accel
from support.llm.quantized import by_token, rounded
from support.patched import sites

INT8 = {"weights": "int8", "activations": "int8"}
EXACT = 1e-9  # how far apart float64 may be


def options(kind: str) -> dict:
    return {"weights": kind.partition("-")[0], "activations": kind}


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


STEPS = torch.tensor([950, 800, 650, 500, 350, 200, 80])


class Oracle:
    """A stock UNet in which the output of the last layer but one is replaced between whole calls.

    Written down from the definition: after whole calls at a and b, call i gets f(b) + (f(b) - f(a)) (i - b) / (b - a).
    """

    def __init__(self, unet, interval):
        self.model, self.interval = unet, interval
        block = unet.up_blocks[-1]
        boundary = block.attentions[-2] if hasattr(block, "attentions") else block.resnets[-2]
        unet.register_forward_pre_hook(self.begin)
        boundary.register_forward_hook(self.replace)
        self.restart()

    def restart(self):
        self.calls, self.kept = -1, []

    def begin(self, *args):
        self.calls += 1

    def replace(self, module, args, output):
        value = output[0] if isinstance(output, tuple) else output
        if self.calls % self.interval == 0:
            self.kept = [*self.kept[-1:], (self.calls, value.clone())]
            return None
        b, newest = self.kept[-1]
        line = newest.clone()
        if len(self.kept) == 2:
            a, older = self.kept[0]
            line += (newest - older) * (self.calls - b) / (b - a)
        return (line,) if isinstance(output, tuple) else line


def run(model, call, **more):
    with torch.no_grad():
        output = model(**call | more)
    output = output[0] if isinstance(output, tuple) else output.sample
    return torch.stack(output) if isinstance(output, list) else output


def close(got, wanted, share=2e-5):
    torch.testing.assert_close(got, wanted, rtol=0, atol=share * float(wanted.detach().abs().max()))


def loop(tiny, model, steps=STEPS, **shape):
    """Inputs of a loop: another sample and timestep in every call, the prompt the same tensor."""
    first = tiny.inputs(model, **shape)
    return [first | {"timestep": t, "sample": first["sample"] + 0.1 * i} for i, t in enumerate(steps)]


def agree(model, oracle, calls):
    for call in calls:
        close(run(model, call), run(oracle.model, call))


def reasons(model):
    """Why calls were computed whole that need not have been."""
    return [reason for _, reason, _ in accel.report(model).fallbacks if "step cache" in reason]
