"""Where the seconds of `accel.optimize` and of a first call go, by the functions that take them."""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pkgutil import resolve_name
from typing import Any

# Functions by what they do.
PARTS = {
    "analysis": ["accel.llm.runtime.analyze.analyze"],
    "self_test": ["accel.llm.generation.self_test.find_convention"],
    "guard": ["accel.llm.generation.self_test.guard_of"],
    "quantize": ["accel.quantization.patch.QuantizedModulePatch.apply"],
    "probes": ["accel.patching.probe.Probe.disagreement"],
    "dry_runs": [
        "accel.llm.generation.trial_warmup._run_through",
        "accel.llm.batching.step.StepRunner.logits",
        "accel.cuda_graphs.runner.GraphRunner._warm_up",
    ],
    "compile": ["accel_kernels.compiling.compilers_triton.CompileBeside.wait"],
    "load": ["accel_kernels.warmup._load_all"],
    "autotune": ["accel_kernels.trials.Trials.work", "accel_kernels.autotune.race"],
    "capture": ["accel.cuda_graphs.runner.GraphRunner._capture"],
    "stacking": ["accel.fusion.stacked_linears.Stacked.apply"],
    "fingerprint": ["accel.cuda_graphs.runner.GraphRunner._taken"],
}


class PartTimes:
    """Seconds of the parts that this thread is in, each without those inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.thread = threading.get_ident()
        self.inside: list[float] = []

    def timed(self, part: str, function: Callable) -> Callable:
        @wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                return function(*args, **kwargs)
            start = time.perf_counter()
            self.inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.seconds[part] = self.seconds.get(part, 0.0) + took - self.inside.pop()
                if self.inside:
                    self.inside[-1] += took

        return inner

    def watch(self) -> None:
        """From here on; what a version does not have is left out."""
        for part, places in PARTS.items():
            for place in places:
                path, _, last = place.rpartition(".")
                with suppress(ImportError, AttributeError):
                    owner = resolve_name(path)
                    stock = getattr(owner, last)
                    timed = self.timed(part, stock)
                    setattr(owner, last, timed)
                    for other in [] if isinstance(owner, type) else [*sys.modules.values()]:  # that imported it by name
                        if getattr(other, "__name__", "").startswith("accel") and vars(other).get(last) is stock:
                            setattr(other, last, timed)

    def told(self, whole: float) -> dict[str, float]:
        found = {f"{part}_s": round(took, 3) for part, took in self.seconds.items()}
        return found | {"other_s": round(whole - sum(self.seconds.values()), 3)}
