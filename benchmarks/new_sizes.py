"""What the first calls of new sizes cost: image sizes, batches and prompt lengths one after another, caches cold.

    python benchmarks/new_sizes.py [sd15] [qwen-0.5b] [--out FOLDER]

Stock and accel in a process of their own each, so that neither finds libraries loaded by the other, and with empty
caches of kernels and choices. The first shape is left out of what is told: its call is the cold start. Every output is
compared with stock's. Seconds of phases lie within one another: racing within measuring, compiling within a warmup.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from accel.bench.cases import CASES
from accel.bench.llm.models import build, prompt
from accel.bench.machine import commit, machine, now, slug
from accel.bench.ready.states import spawn
from accel.bench.timing import seconds
from accel.diffusion.inputs import unet_inputs

SEED = 17
UNSETTLED, SETTLED = 7, 3  # the first calls are told one by one, the others by their median
OF_STOCK = 1  # of stock's calls, whose first is the slow one
# By a model's dtype, relative, of the root mean square: rounded twice, in another order.
ERRORS = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
NEW = 6  # tokens written after a prompt

# (batch, height, width of the latents, tokens of the prompt); the first is the cold start
IMAGES = (
    (2, 64, 64, 77), (2, 96, 96, 77), (2, 48, 48, 77), (2, 64, 96, 77), (2, 96, 64, 77), (2, 72, 72, 77),
    (2, 80, 56, 77), (1, 64, 64, 77), (4, 64, 64, 77), (8, 64, 64, 77), (2, 40, 72, 77), (2, 32, 32, 77),
    (2, 104, 64, 77), (2, 64, 112, 77), (2, 56, 56, 77), (6, 48, 64, 77), (2, 88, 88, 77), (2, 128, 128, 77),
    (1, 96, 136, 77), (2, 60, 84, 77), (2, 64, 64, 154), (2, 76, 44, 231), (3, 120, 72, 77), (16, 32, 40, 77),
    (2, 52, 68, 77),
)  # fmt: skip
# (rows, tokens of the prompt)
PROMPTS = (
    (1, 37), (1, 301), (2, 65), (1, 1003), (3, 129), (1, 640), (8, 77), (5, 450), (1, 3001), (17, 33), (1, 40), (4, 9),
    (2, 2222), (1, 5000), (6, 700), (12, 128), (1, 1536), (32, 20), (2, 513), (1, 8), (3, 1500), (7, 250), (1, 2047),
    (40, 64), (1, 130),
)  # fmt: skip


class Phases:
    """Seconds spent inside functions, by the name they are told under."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    def watch(self, owner, name: str, phase: str) -> None:
        function = getattr(owner, name, None)
        if function is None:
            return

        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

        setattr(owner, name, timed)

    def taken(self) -> dict[str, float]:
        found, self.seconds = self.seconds, {}
        return {name: round(value, 4) for name, value in found.items() if value > 0.001}


def watched() -> Phases:
    """What can take long in a first call; measuring is told as a whole and by what was measured."""
    import triton
    from accel_kernels import autotune
    from accel_kernels.attention import backends as attention_backends
    from accel_kernels.gemm import linear
    from accel_kernels.trials import Trials

    from accel.cuda_graphs.runner import GraphRunner

    phases = Phases()
    phases.watch(Trials, "work", "measuring")
    phases.watch(attention_backends, "_agrees", "attention, first runs")
    phases.watch(linear.LinearChooser, "_agrees", "products, first runs")
    phases.watch(autotune, "race", "races")
    phases.watch(GraphRunner, "_capture", "capture")
    phases.watch(GraphRunner, "_warm_up", "warmup")
    phases.watch(triton.runtime.jit.JITFunction, "_do_compile", "compile")
    return phases


@torch.no_grad()
def measure(case: str, variant: str, device: torch.device, outputs: Path) -> list[dict]:
    """Rows of this variant; stock leaves its outputs there, and accel's are compared with them."""
    model, calls = (images if case in CASES else prompts)(case, device)
    phases = Phases() if variant == "stock" else watched()
    cold, *calls = calls
    random.Random(SEED).shuffle(calls)
    calls.insert(0, cold)
    rows, found = [], []
    if variant == "accel":
        import accel

        accel.optimize(model)
    for shape, call in calls:
        first = [
            {"s": round(seconds(lambda call=call: call(model), device), 4)} | phases.taken()
            for _ in range(OF_STOCK if variant == "stock" else UNSETTLED)
        ]
        steady = statistics.median(seconds(lambda call=call: call(model), device) for _ in range(SETTLED))
        found.append(call(model))
        rows.append({"shape": shape, "steady_s": round(steady, 5), "calls": first})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if variant == "stock":
        torch.save(found, outputs)
        return rows
    for row, got, wanted in zip(rows, found, torch.load(outputs, map_location=device), strict=True):
        row["error"] = _error(got, wanted)
        if not row["error"] < ERRORS[model.dtype]:
            raise SystemExit(f"{case}, {row['shape']}: the output is {row['error']:.1e} from stock's")
    return rows


def images(case: str, device: torch.device):
    made = CASES[case]
    model = made.build(device, torch.float16)

    def call(shape):
        batch, height, width, tokens = shape
        given = unet_inputs(model.config, device, torch.float16, batch=batch, size=max(height, width), tokens=tokens)
        given["sample"] = given["sample"][:, :, :height, :width].contiguous()
        return shape, lambda model: made.call(model, given)

    return model, [call(shape) for shape in IMAGES]


def prompts(case: str, device: torch.device):
    model = build(case, device, torch.bfloat16)

    def call(shape):
        inputs = prompt(model, *shape)
        more = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False, "max_new_tokens": NEW}
        return shape, lambda model: model.generate(**inputs, **more).logits[0]

    return model, [call(shape) for shape in PROMPTS]


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.float(), wanted.float()
    return float((got - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt())


def beyond(stock: list[dict], accel: list[dict]) -> dict:
    """Seconds that a call of a new shape takes beyond stock's first call of it: the worst, the median, of all."""
    found = {}
    for name, index in {"first": 0, "second": 1, "third": 2, "fourth": 3}.items():
        times = [a["calls"][index]["s"] - s["calls"][0]["s"] for s, a in zip(stock[1:], accel[1:], strict=True)]
        found[f"{name}_worst_s"], found[f"{name}_median_s"] = round(max(times), 3), round(statistics.median(times), 3)
    return found


@contextmanager
def empty_folder():
    with tempfile.TemporaryDirectory(prefix="accel-sizes-") as folder:
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["sd15", "qwen-0.5b"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--alone", choices=("stock", "accel"), help="measure this in this process, print JSON")
    parser.add_argument("--outputs", type=Path, help="with --alone: where stock's outputs lie")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.alone:
        print(json.dumps(measure(options.cases[0], options.alone, device, options.outputs)))
        return
    sys.path.insert(0, str(Path(__file__).parent))
    for case in options.cases:
        result = {"case": case, "machine": machine(device), "commit": commit(), "date": now()}
        with empty_folder() as shared:
            for variant in ("stock", "accel"):
                with empty_folder() as caches:
                    given = [case, "--alone", variant, "--outputs", str(shared / "outputs.pt")]
                    result[variant] = spawn("new_sizes", given, caches)
                    print(f"{case}: {variant} is done", flush=True)
                _write(result, options.out, device)
        result["beyond stock's first call"] = beyond(result["stock"], result["accel"])
        result["error"] = max(row["error"] for row in result["accel"])
        _write(result, options.out, device)
        print(json.dumps(result["beyond stock's first call"], indent=1), flush=True)


def _write(result: dict, folder: Path, device: torch.device) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = {name: value for name, value in result.items() if name not in ("stock", "accel")}
    text = json.dumps(rows, indent=1).removesuffix("\n}")
    for variant in ("stock", "accel"):
        lines = ",\n  ".join(map(json.dumps, result.get(variant, ())))
        text += f',\n "{variant}": [\n  {lines}\n ]'
    (folder / f"{slug(device)}-new-sizes-{result['case']}.json").write_text(text + "\n}\n")


if __name__ == "__main__":
    main()
