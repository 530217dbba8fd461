"""The speed of two source trees, side by side on one device: what a change costs or gains, whatever the host's mood.

    git archive COMMIT accel kernels | tar x -C FOLDER
    python -m benchmarks before-after OUT.json FOLDER [--cases sd15,llama-8b,llama-8b:weights=int8]

Each tree has a process of its own that holds its optimized model. The two are timed in turns, so that clocks,
temperature and neighbors hit both alike. A case is one of `accel bench`, or a language model of `accel bench llm`
with options of `accel.optimize` behind colons. ms: medians over the rounds, of one call or of one decode step;
ratio: after / before, the median over the rounds, with the smallest and largest. difference: the largest
difference of the two outputs, relative to the largest value; of a language model the share of tokens that differ.
"""

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import torch

TEXT = ("", ":weights=int8", ":weights=int4", ":kv_cache=int8", ":weights=int8:activations=int8")
DEFAULT = ("sd15", "sdxl", "vae1024", *(f"llama-8b{way}" for way in TEXT))
BATCHES, CONTEXT, PREFILL = (1, 8, 32), 512, 2048
FEW, MANY = 8, 56  # tokens of two calls of generate(), whose difference is that of so many decode steps
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a CPU tries the script out
CALLS = 20  # of an image model in one round

# This file alone runs over the tree that it is given: what it imports of accel, both trees have.


class Images:
    """A UNet or VAE of `accel bench`, optimized."""

    points = ("call",)

    def __init__(self, name: str, options: dict) -> None:
        import accel
        from accel.bench.diffusion.cases import CASES

        self.case, dtype = CASES[name], torch.float16
        self.inputs = self.case.inputs(DEVICE, dtype)
        self.module = accel.optimize(self.case.build(DEVICE, dtype), **options)

    def step(self, index: int) -> torch.Tensor:
        return self.case.call(self.module, self.inputs[index % len(self.inputs)])

    def output(self) -> list:
        return [self.step(i).float().cpu().numpy() for i in range(len(self.inputs))]

    def milliseconds(self, point: str) -> float:
        from accel.bench.timing import burst

        return statistics.median(burst(self.step, CALLS, DEVICE))


class Text:
    """A language model with random weights, optimized."""

    points = (*(f"decode {rows}" for rows in BATCHES), f"prefill {PREFILL}")

    def __init__(self, name: str, options: dict) -> None:
        import accel
        from accel.bench.llm.models import build, prompt

        model = build(name, DEVICE, torch.bfloat16)
        self.prompts = {f"decode {rows}": prompt(model, rows, CONTEXT) for rows in BATCHES}
        self.prompts[f"prefill {PREFILL}"] = prompt(model, 1, PREFILL)
        self.model = accel.optimize(model, **options)

    def seconds(self, point: str, tokens: int) -> float:
        from accel.bench.timing import seconds

        given = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        return seconds(lambda: self.model.generate(**self.prompts[point], **given), DEVICE)

    def output(self) -> list:
        return [self.model.generate(**self.prompts["decode 8"], max_new_tokens=32, do_sample=False).cpu().numpy()]

    def milliseconds(self, point: str) -> float:
        if point.startswith("prefill"):
            return statistics.median(self.seconds(point, 1) for _ in range(4)) * 1e3
        return (self.seconds(point, MANY) - self.seconds(point, FEW)) / (MANY - FEW) * 1e3


def work(address: str) -> None:
    """Answer the other process: "make" a case, then "ms" of its points; None ends it."""
    from accel.bench.llm.configs import CONFIGS

    model = None
    with Client(address) as line, torch.no_grad():
        while (asked := line.recv()) is not None:
            verb, value = asked
            if verb == "ms":
                line.send(model.milliseconds(value))
                continue
            model = None  # the one before makes room first
            gc.collect()
            torch.cuda.empty_cache()
            name, *given = value.split(":")
            kind = Text if name in CONFIGS and name != "tiny" else Images
            options = dict(pair.split("=") for pair in given)
            start = time.perf_counter()
            model = kind(name, options)
            found = model.output()
            ready = time.perf_counter() - start
            for point in model.points * 3:  # graphs are there then, and what is measured once has been
                model.milliseconds(point)
            line.send((ready, found, model.points))


def ask(line: Connection, point: str) -> float:
    line.send(("ms", point))
    return line.recv()


def difference(before: list, after: list) -> float:
    """The largest, relative to the largest value; of tokens the share that differs."""
    pairs = list(zip(before, after, strict=True))
    if before[0].dtype.kind == "i":
        return max(float((a != b).mean()) for a, b in pairs)
    return max(float(abs(a - b).max() / abs(a).max()) for a, b in pairs)


def compare(case: str, lines: dict[str, Connection], rounds: int, record) -> None:
    from accel.bench.timing import take_turns

    for line in lines.values():  # both at once: the processor compiles, the device has room
        line.send(("make", case))
    made = {name: line.recv() for name, line in lines.items()}
    off = difference(made["before"][1], made["after"][1])
    for point in made["after"][2]:
        times = take_turns({name: partial(ask, line, point) for name, line in lines.items()}, least=rounds, most=rounds)
        ratios = [a / b for a, b in zip(times["after"], times["before"], strict=True)]
        row = {f"{name}_ms": round(statistics.median(found), 4) for name, found in times.items()}
        row |= {"ratio": round(statistics.median(ratios), 4), "difference": off}
        row["ratios"] = [round(min(ratios), 4), round(max(ratios), 4)]
        row["ready_s"] = {name: round(found[0], 2) for name, found in made.items()}
        record.add("rows", {"case": case, "point": point} | row)


def main(
    out: Path, before: Path, commit: str = "", cases: str = ",".join(DEFAULT), rounds: int = 7, seconds: float = 500
) -> None:
    """before: a folder with the accel and kernels of the earlier commit. seconds: after so many no case is begun."""
    from benchmarks.study import ROOT, Study

    record = Study("before-after", out, "two commits in turns on one device, a process each", seconds, rows=[])
    record.body["before"] = commit
    kept = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", ".", "kernels")]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        lines = {}
        for name, tree in (("before", before), ("after", ROOT)):
            path = os.pathsep.join([str(tree), str(tree / "kernels"), *(one for one in kept if str(ROOT) not in one)])
            with Listener(f"{folder}/{name}") as listener:
                command = [sys.executable, __file__, listener.address]
                worker = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, cwd=folder)
                lines[name] = listener.accept()
            undo.callback(worker.wait)
            undo.callback(lines[name].send, None)
        for case in cases.split(","):
            if record.in_time(case=case):
                compare(case, lines, rounds, record)
                record.save()


if __name__ == "__main__":
    work(sys.argv[1])
