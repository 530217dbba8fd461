"""The speed of two source trees, side by side on one device: what a change costs or gains, whatever the host's mood.

    git archive COMMIT accel kernels | tar x -C FOLDER
    python benchmarks/before_after.py OUT.json --before FOLDER [--cases sd15 llama-8b llama-8b:weights=int8 ...]

Each tree has a process of its own that holds its optimized model. The two are timed in turns, so that clocks,
temperature and neighbors hit both alike. A case is one of `accel bench`, or a language model of `accel bench llm`
with options of `accel.optimize` behind colons. ms: medians over the rounds, of one call or of one decode step;
ratio: after / before, the median over the rounds, with the smallest and largest. difference: the largest
difference of the two outputs, relative to the largest value; of a language model the share of tokens that differ.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parents[1]
IMAGES = ("sd15", "sdxl", "vae1024")
TEXT = ("", ":weights=int8", ":weights=int4", ":kv_cache=int8", ":weights=int8:activations=int8")
CASES = (*IMAGES, *(f"llama-8b{way}" for way in TEXT))
BATCHES, CONTEXT, PREFILL = (1, 8, 32), 512, 2048
FEW, MANY = 8, 56  # tokens of two calls of generate(), whose difference is that of so many decode steps
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a CPU tries the script out
CALLS = 20  # of an image model in one round


class Images:
    """A UNet or VAE of `accel bench`, optimized."""

    points = ("call",)

    def __init__(self, name: str, options: dict) -> None:
        import accel
        from accel.bench import cases

        self.case, device, dtype = cases.CASES[name], DEVICE, torch.float16
        self.inputs = self.case.inputs(device, dtype)
        self.module = accel.optimize(self.case.build(device, dtype), **options)

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
    with Client(address) as line, torch.no_grad():
        while (asked := line.recv()) is not None:
            verb, value = asked
            if verb == "make":
                model = None  # the one before makes room first
                gc.collect()
                torch.cuda.empty_cache()
                start = time.perf_counter()
                name, *given = value.split(":")
                model = (Images if name in (*IMAGES, "tiny") else Text)(name, dict(pair.split("=") for pair in given))
                found = model.output()
                ready = time.perf_counter() - start
                for point in model.points * 3:  # graphs are there then, and what is measured once has been
                    model.milliseconds(point)
                line.send((ready, found, model.points))
            else:
                line.send(model.milliseconds(value))


def ask(line: Connection, verb: str, value: str) -> object:
    line.send((verb, value))
    return line.recv()


def difference(before: list, after: list) -> float:
    """The largest, relative to the largest value; of tokens the share that differs."""
    pairs = list(zip(before, after, strict=True))
    if before[0].dtype.kind == "i":
        return max(float((a != b).mean()) for a, b in pairs)
    return max(float(abs(a - b).max() / abs(a).max()) for a, b in pairs)


def compare(case: str, lines: dict[str, Connection], rounds: int) -> list[dict]:
    for line in lines.values():  # both at once: the processor compiles, the device has room
        line.send(("make", case))
    made = {name: line.recv() for name, line in lines.items()}
    off = difference(made["before"][1], made["after"][1])
    rows = []
    for point in made["after"][2]:
        times: dict[str, list[float]] = {name: [] for name in lines}
        for number in range(rounds):
            for name in list(lines)[:: 1 if number % 2 else -1]:
                times[name].append(ask(lines[name], "ms", point))
        ratios = [a / b for a, b in zip(times["after"], times["before"], strict=True)]
        rows.append(
            {
                "case": case,
                "point": point,
                "before_ms": round(statistics.median(times["before"]), 4),
                "after_ms": round(statistics.median(times["after"]), 4),
                "ratio": round(statistics.median(ratios), 4),
                "ratios": [round(min(ratios), 4), round(max(ratios), 4)],
                "difference": off,
                "ready_s": {name: round(found[0], 2) for name, found in made.items()},
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--before", type=Path, help="a folder with the accel and kernels of the earlier commit")
    parser.add_argument("--before-commit", help="what that commit is, for the file")
    parser.add_argument("--after", type=Path, default=HERE)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=500, help="after so many, no new case is begun")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return work(given.worker)
    if given.out is None or given.before is None:
        parser.error("OUT.json and --before are needed")
    from accel.bench.machine import commit, machine, now

    start, rows, left = time.monotonic(), [], []
    with tempfile.TemporaryDirectory() as folder:
        lines, workers = {}, []
        for name, tree in (("before", given.before), ("after", given.after)):
            rest = [
                path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", ".", "kernels")
            ]
            path = os.pathsep.join([str(tree), str(tree / "kernels"), *rest])
            with Listener(f"{folder}/{name}") as listener:
                command = [sys.executable, __file__, "--worker", listener.address]
                workers.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, cwd=folder))
                lines[name] = listener.accept()
        for case in given.cases:
            if time.monotonic() - start > given.seconds:
                left.append(case)
                continue
            rows += compare(case, lines, given.rounds)
            text = {
                "case": "before-after",
                "about": "two commits in turns on one device, a process each",
                "date": now(),
                "commit": commit(),
                "before": given.before_commit,
                "machine": machine(DEVICE),
                "rows": rows,
                "left_out": left,
            }
            given.out.write_text(json.dumps(text, indent=2) + "\n")
        for line, worker in zip(lines.values(), workers, strict=True):
            line.send(None)
            worker.wait()


if __name__ == "__main__":
    main()
