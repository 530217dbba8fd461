"""What each mechanism gives, in milliseconds, on cases of `accel bench`: the model timed with all but one."""

from itertools import count
from pathlib import Path

import torch

from accel.bench.ablation import ablate
from accel.bench.diffusion.cases import CASES
from accel.bench.machine import slug
from accel.bench.memory import release
from benchmarks.study import DEVICE, RESULTS, TOY, Study, words


def main(cases: str, out: Path = RESULTS) -> None:
    """cases: names with commas between. out: a folder. Of your own model: accel report FOLDER --measure."""
    for name in words(cases):
        case, numbers = CASES[name], count()
        dtype = torch.float32 if TOY else case.dtype or torch.float16
        module, inputs = case.build(DEVICE, dtype), case.inputs(DEVICE, dtype)

        def call(case=case, module=module, inputs=inputs, numbers=numbers) -> torch.Tensor:
            return case.call(module, inputs[next(numbers) % len(inputs)])

        record = Study(name, out / f"{slug(DEVICE)}-{name}-ablation.json", case.about, dtype=dtype, rows=[])
        for row in ablate(module, call):
            record.add("rows", row)
        del module, inputs, call
        release(DEVICE)
