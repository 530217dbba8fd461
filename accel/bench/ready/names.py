"""What `accel bench ready` takes by name: a model or a script of the other benchmarks, and how it is used."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from accel.bench.diffusion.cases import CASES
from accel.bench.llm.configs import CONFIGS
from accel.bench.scripts.registry import SCRIPTS
from accel.bench.scripts.script import Size

SCRIPT, CASE, BATCH = "script", "case", "batch"
WAYS = ("", BATCH, "int8", "int4", "fp8")  # of a language model, behind a plus
NEW, TOKENS = 16, 128
REQUESTS, ANSWER = 128, 64


@dataclass(frozen=True)
class NamedModel:
    """A name, and what stands behind its plus: nothing, quantized weights, BATCH, SCRIPT, or CASE of `accel bench`."""

    name: str
    way: str

    @classmethod
    def parse(cls, text: str) -> "NamedModel":
        """Raises ValueError for what is no model of these benchmarks, or is asked for in a way that there is not."""
        name, _, way = text.partition("+")
        if way == SCRIPT:
            if name not in SCRIPTS:
                raise ValueError(f"{name!r} is none of {', '.join(SCRIPTS)}")
        elif name not in CONFIGS and name not in CASES:
            raise ValueError(f"{name!r} is none of {', '.join([*CONFIGS, *CASES])}")
        elif way not in (*(WAYS if name in CONFIGS else WAYS[:1]), *([CASE] if name in CASES else ())):
            valid = f"one of {', '.join(WAYS[1:])}, of a language model, or {SCRIPT}"
            raise ValueError(f"{text!r}: behind a plus stands {valid}")
        return cls(name, way)

    @property
    def is_case(self) -> bool:
        return self.way == CASE or (self.way == "" and self.name in CASES and self.name not in CONFIGS)

    @property
    def options(self) -> dict[str, Any]:
        """Of `accel.optimize`."""
        return {"weights": self.way} if self.way in WAYS[2:] else {}

    def dtype(self, device: torch.device) -> torch.dtype:
        """A case's own or bfloat16 on a GPU, float32 elsewhere. Scripts have dtypes of their own."""
        if device.type != "cuda":
            return torch.float32
        return CASES[self.name].dtype if self.is_case else torch.bfloat16

    def build(self, device: torch.device, dtype: torch.dtype) -> tuple[Any, Callable[[], Any]]:
        """The object and a call of it."""
        if self.way == SCRIPT:
            return SCRIPTS[self.name].build(Size(device, tiny=device.type != "cuda"))
        if self.is_case:
            case = CASES[self.name]
            module, inputs = case.build(device, dtype), case.inputs(device, dtype)
            return module, partial(case.call, module, inputs[0])
        from accel.bench.llm.models import answers, build, prompt, requests

        model = build(self.name, device, dtype)
        if self.way != BATCH:
            return model, partial(model.generate, **prompt(model, 1, TOKENS), max_new_tokens=NEW, do_sample=False)
        return model, partial(answers, model, requests(model, REQUESTS, 32, 160), ANSWER)


def rules_of(obj: Any) -> str:
    """The module whose import brings the rules for this object."""
    language = isinstance(obj, nn.Module) and hasattr(obj, "generate")
    return "accel.llm.stages" if language else "accel.diffusion.stages"
