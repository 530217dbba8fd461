"""The logits of a whole language model, of a prompt and of decode steps, recorded from stock and judged.

Where two experts are nearly equal to a router, rounding decides between them, in stock as in ours. What becomes of such
a token, and of those that attend to it, has little in common in two runs, and after dozens of layers most tokens are
such. So a model with routers is compared with the routing fixed: full precision and ours repeat what stock's routers
chose, and every token counts, as in any model. Each run as it chooses for itself is judged too, as that is what calls
get, graphs included: by its median token, which may be as far off as noise of the size of rounding puts stock.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import torch
from torch import nn
from transformers import PreTrainedModel

from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.routing import Choices, noting, repeating, routing_modules
from accel.llm.routed import decoder_forward, far, routed, row_rms
from accel.planning.plan import Plan
from accel.tolerances import DRIFT, MEDIAN, MOVED
from accel.verification.metrics import Quality
from accel.verification.model_record import ModelRecord
from accel.verification.noise import with_noise

DEEP = 4  # times the units of rounding that one module may be off where full precision cannot be computed
GREEDY = {"do_sample": False, "num_beams": 1, "return_dict_in_generate": True, "output_logits": True}


class Forced:
    """A logits processor: the next token is the one given. What generate() returns as logits is from before it."""

    def __init__(self, tokens: torch.Tensor):
        self.tokens, self.step = tokens, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = self.tokens[:, self.step, None].to(scores.device)
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


def forced_logits(model: PreTrainedModel, inputs: dict, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (rows, steps, vocabulary) of the steps in which generate() writes these tokens."""
    steps = tokens.shape[1]
    options = {"min_new_tokens": steps, "max_new_tokens": steps, "logits_processor": [Forced(tokens)]}
    return torch.stack(model.generate(**inputs, **options, **GREEDY).logits, dim=1)


class Logits(ModelRecord):
    """Logits have gone through the rounding of all layers, so more is allowed: an 8B model in bf16 is 16 units off.

    choices: of stock's routers, which every run repeats. free: routers choose in each run, and may choose otherwise, so
    that the median token is judged. perturbed: stock's outputs where noise of the size of rounding is added.
    """

    choices: Choices | None = None
    fused: DecoderForward | None = None  # which repeats them
    free = False
    perturbed: list[torch.Tensor] | None = None

    def logits(self, module: nn.Module, kwargs: dict) -> torch.Tensor:
        """(tokens, vocabulary)."""
        raise NotImplementedError

    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        if self.choices is None or self.fused is None:
            return [self.logits(module, kwargs)]
        with repeating(self.choices.carried(self.module, module)), _eager(self.fused):
            return [self.logits(module, kwargs)]

    def observe(self, plan: Plan, given: dict) -> None:
        """Stock's run, and what its routers choose in it."""
        forward = decoder_forward(plan)
        rows = len(next(given[name] for name in ("input_ids", "inputs_embeds") if name in given))
        with noting(rows, [] if forward is None else routing_modules(forward)) as choices:
            self.keep(((), given), self.run(self.module, (), given))
        wholes = routed(plan).values()
        if wholes and choices.cover(wholes):
            self.choices, self.fused = choices, forward
        self.free = bool(wholes) and self.choices is None

    def perturb(self, plan: Plan) -> None:
        """Stock's run once more, what each layer gives moved by noise; for models with routers."""
        wholes, forward = routed(plan), decoder_forward(plan)
        if wholes:
            stack = wholes.values() if forward is None else forward.module.get_submodule(forward.stack).children()
            with with_noise((layer, self.unit) for layer in stack):
                self.perturbed = self.with_free_routing().run(self.module, *self.inputs[-1])

    def with_free_routing(self) -> "Logits":
        """The same call, in which each run chooses for itself."""
        other = type(self)(self.module, self.inputs, self.outputs)
        other.free, other.perturbed = True, self.perturbed
        return other

    @property
    def drift(self) -> float:
        """How far noise of the size of rounding puts stock."""
        return 0.0 if self.perturbed is None else row_rms(self.outputs[-1], self.perturbed, MOVED)

    @property
    def allowance(self) -> float:
        return max(DEEP * super().allowance, DRIFT * self.drift if self.free else 0.0)

    def apart(self, wanted: list[torch.Tensor], got: list[torch.Tensor]) -> float:
        return row_rms(wanted, got, MEDIAN) if self.free else super().apart(wanted, got)

    def judge(self, seed: int) -> Quality:
        quality = super().judge(seed)
        if self.choices is not None:
            return _noted(quality, "accel and full precision repeat the experts that stock chose")
        if not self.free:
            return quality
        stock, ours = list(chain.from_iterable(self.outputs)), list(chain.from_iterable(self.ours))
        if self.exact is None:
            quality = replace(quality, error=self.apart(stock, ours))
        else:
            quality = replace(quality, allowed=max(quality.allowed or 0.0, DRIFT * self.drift))
        note = (
            "judged by the median token, as rounding may send tokens to other experts: "
            f"{far(stock, ours)} of {len(stock[0])} are much further from stock; noise of the size of rounding moves "
            f"stock by {self.drift:.1e}"
        )
        measure = quality.measure.replace("relative RMS", "relative RMS of the median token")
        return _noted(replace(quality, measure=measure), note)


class Prompt(Logits):
    """Logits of a prompt, (tokens, vocabulary): those of padding mean nothing and are left out."""

    def logits(self, module: nn.Module, kwargs: dict) -> torch.Tensor:
        logits = module(**kwargs).logits
        mask = kwargs.get("attention_mask")
        return logits.flatten(0, 1) if mask is None else logits[mask.bool()]


class Decode(Logits):
    """Logits of the steps in which generate() writes the `tokens` it is told to, (rows * steps, vocabulary)."""

    def logits(self, module: nn.Module, kwargs: dict) -> torch.Tensor:
        prompt = {name: value for name, value in kwargs.items() if name != "tokens"}
        return forced_logits(module, prompt, kwargs["tokens"]).flatten(0, 1)


@contextmanager
def _eager(forward: DecoderForward) -> Iterator[None]:
    """Inside, it replays no graphs, which ask no hooks, and captures none."""
    runner, prompts = forward.runner, forward.prompts
    forward.runner = forward.prompts = None
    try:
        yield
    finally:
        forward.runner, forward.prompts = runner, prompts


def _noted(quality: Quality, note: str) -> Quality:
    return replace(quality, note="; ".join(filter(None, (quality.note, note))))
