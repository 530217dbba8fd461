"""How generate() chooses a token: stock's processors, then the largest score or a draw, without waiting for the GPU."""

from functools import cache
from typing import Any

import torch
import transformers
from transformers import LogitsProcessorList

# Processors that are functions of tokens and scores alone, and never wait for the GPU: they may be called before the
# host knows the tokens, and again if a step is dropped. Anything else may be the user's own code.
PURE = (
    transformers.EpsilonLogitsWarper, transformers.ExponentialDecayLengthPenalty,
    transformers.ForcedBOSTokenLogitsProcessor, transformers.ForcedEOSTokenLogitsProcessor,
    transformers.InfNanRemoveLogitsProcessor, transformers.LogitNormalization, transformers.MinLengthLogitsProcessor,
    transformers.MinNewTokensLengthLogitsProcessor, transformers.MinPLogitsWarper,
    transformers.RepetitionPenaltyLogitsProcessor, transformers.SuppressTokensAtBeginLogitsProcessor,
    transformers.SuppressTokensLogitsProcessor, transformers.TemperatureLogitsWarper, transformers.TopKLogitsWarper,
    transformers.TopPLogitsWarper, transformers.TypicalLogitsWarper,
)  # fmt: skip


def pure(processors: LogitsProcessorList) -> bool:
    """Whether the loop may call these processors; see PURE."""
    return type(processors) is LogitsProcessorList and all(type(one) in PURE for one in processors)


def draw(probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One index a row, (rows,) int64, as torch.multinomial(probabilities, 1) draws it with the default generator.

    probabilities: (rows, vocabulary), of a softmax. On a GPU torch.multinomial waits, to look for NaN. So its formula
    is computed there without waiting: the largest p / q, where q is exponential. The second result is then (rows,)
    bool, whether the row is NaN.
    """
    if not probabilities.is_cuda:
        return torch.multinomial(probabilities, num_samples=1).squeeze(1), None
    return _race(probabilities, None), probabilities[:, 0].isnan()


def _race(probabilities: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    noise = torch.empty_like(probabilities).exponential_(1, generator=generator)
    return torch.argmax(torch.div(probabilities, noise), dim=-1)


def refuse_nan() -> None:
    """Raises what torch.multinomial raises for NaN."""
    torch.multinomial(torch.full((1, 1), float("nan"), device="cpu"), num_samples=1)


@cache
def draws_as_torch(device: torch.device) -> bool:
    """Whether `draw` gives the indices of this torch on this device, and leaves its generator alike; found by trial."""
    if device.type != "cuda":
        return True
    found = []
    for own in (False, True):
        generator = torch.Generator(device).manual_seed(7)
        probabilities = torch.randn(3, 5003, device=device, generator=generator).softmax(-1)
        for _ in range(3):
            if own:
                found.append(_race(probabilities, generator))
            else:
                found.append(torch.multinomial(probabilities, num_samples=1, generator=generator).squeeze(1))
        found.append(torch.tensor([generator.get_offset()], device=device))
    return all(torch.equal(*both) for both in zip(found[:4], found[4:], strict=True))


class RandomState:
    """The state of a device's default generator. On a GPU neither reading nor setting it waits."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.generator: Any = torch.default_generator
        if self.on_gpu:
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            self.generator = torch.cuda.default_generators[index]

    def mark(self) -> tuple:
        if self.on_gpu:
            return self.generator.initial_seed(), self.generator.get_offset()
        return (bytes(self.generator.get_state().numpy()),)

    def set(self, mark: tuple) -> None:
        """Returns to a mark of the same seed."""
        if self.on_gpu:
            self.generator.set_offset(mark[1])
        else:
            self.generator.set_state(torch.frombuffer(bytearray(mark[0]), dtype=torch.uint8))
