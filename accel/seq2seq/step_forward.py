"""One step of the decoder of an encoder-decoder model: its own code, or fused layers inside of it, in a CUDA graph."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from accel_kernels import argmax, ended_tokens

from accel.cuda_graphs.fingerprint import Fingerprint
from accel.cuda_graphs.runner import GraphRunner
from accel.libraries.cache import ENCODED, ENCODER_MASK, MASK, POSITIONS, TOKENS, encoded
from accel.llm.parts.step import ForwardContext
from accel.llm.recording.record import NotUnderstood
from accel.offload.call_hooks import streamed_model
from accel.patching.fast_forward import FastForward
from accel.patching.structure import CallersHook, foreign_hooks
from accel.seq2seq.course import Course
from accel.seq2seq.fixed_memory import CROSS, OWN, Holding
from accel.seq2seq.held_layers import Length
from accel.seq2seq.layers import DecoderLayerForward
from accel.seq2seq.memory_attention import MemoryStep, hiding, up_to
from accel.seq2seq.step_inputs import Given, MaskByLengths, Masks, TextStep

MADE = ("logits", "decoder_hidden_states")  # of an output; T5Gemma tells the last hidden states unasked
CHOSEN = "chosen"  # what a step gives that chooses a token


class Choice(NamedTuple):
    """What follows the logits of a step, in its graph. how: a function of logits, (rows, vocabulary), and of `given`;
    equal for steps of one graph.
    """

    how: Any
    given: tuple[torch.Tensor | None, ...]


def likeliest(logits: torch.Tensor, unfinished: torch.Tensor, *ends: torch.Tensor | None) -> torch.Tensor:
    """(2, rows) int64, the tokens and which rows go on, as `ended_tokens` gives them."""
    return ended_tokens(argmax(logits), unfinished, *ends)


class DecoderStepForward(FastForward):
    """Computes steps over a cache at fixed addresses, whose lengths are numbers on the device.

    masks: that the decoder reads. width: of what the encoder gives. layers: fused in steps; none where they are not
    understood. apart: weights stay where they are, as layers are tried. counts: steps are told the positions that the
    model would count.
    """

    renewed: tuple[str, ...] = ("seen", "reason", "biases", "trusted", "declined")
    runner: GraphRunner | None
    masks = Masks()
    apart = False
    counts = False
    width: int
    layers: Sequence[DecoderLayerForward] = ()
    steps: ForwardContext
    cache_name: str
    seen: Fingerprint | None
    reason: str | None  # why the layers run their own code, as they are now
    biases: dict[str, tuple[torch.Tensor, torch.Tensor]]
    trusted: bool  # the model in this step
    course: Course
    declined: set[tuple]  # steps whose graph gains nothing, or is none

    def renew(self) -> None:
        super().renew()
        self.seen = None
        self.reason = None
        self.biases = {}
        self.trusted = False
        self.declined = set()

    def run_step(self, holding: Holding, step: TextStep, choice: Choice | None = None) -> dict[str, Any]:
        holding.settle(OWN)
        holding.settle(CROSS)
        eager: Callable = partial(self.step if choice is None else partial(self.chosen, choice.how), holding)
        given = (*step.given, *(choice.given if choice is not None else ()))
        if self.runner is None or not step.given.tokens.is_cuda:
            return eager(*given)
        variant = holding.room(OWN), holding.room(CROSS), holding.beams, step.attention, choice and choice.how
        if self.trusted:
            kind, key = self.course.replayed
            replayed: Any = self.runner.begin(
                given, {}, variant, at_once=True, key=key if kind == (step.key, variant) else None
            )
            if replayed is not None:
                self.course.replayed = (step.key, variant), replayed.key
                return replayed.outputs
        made: Any = self.runner(eager, given, {}, variant)
        known = (entry for key, entry in self.runner.entries.items() if key[-1] == variant)
        if self.runner.reason is not None or any(entry.reason is not None for entry in known):
            self.declined.add(step.key)
        return made

    def step(
        self,
        holding: Holding,
        tokens: torch.Tensor,
        start: torch.Tensor,
        mask: torch.Tensor | None,
        padding: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> dict[str, Any]:
        """`MADE`, of (rows, 1, ...), by the model's own code. Nothing it does depends on lengths in Python."""
        rows, room, cross = holding.rows, holding.room(OWN), holding.room(CROSS)
        holding.place.length = Length(start.reshape(1), 1, room - 1)
        dtype, fused = holding.kept[OWN].dtype, self.ready(room)
        # Of what the encoder gave, and of masks if layers are fused, the model reads the shape, or the trial failed.
        nothing = torch.full((1, 1, 1, 1), torch.nan, dtype=dtype, device=tokens.device).expand(rows, -1, -1, -1)
        own, hidden = (nothing.expand(-1, -1, -1, size) for size in (room, cross))
        if not fused:
            own = hiding(up_to(start, room, padding), dtype).expand(rows, -1, -1, -1)
            hidden = hidden if mask is None else hiding(mask.bool(), dtype)
        inside = fused and type(self.masks.frames) is MaskByLengths  # the model makes its own, of frames
        given: dict[str, Any] = {} if mask is None or self.masks.beside or inside else {ENCODER_MASK: hidden}
        beside = hidden if mask is not None and self.masks.beside else None
        given |= {
            TOKENS: tokens,
            ENCODED: encoded(nothing[:, 0].expand(-1, cross, self.width), beside),
            MASK: own,
            self.cache_name: holding.shown,
            "use_cache": True,
            "return_dict": True,
        }
        positions = start.expand(rows, 1) if positions is None and self.counts else positions
        given |= {} if positions is None else {POSITIONS: positions}
        step = MemoryStep(self.kernels, holding, start, (padding, mask), self.biases) if fused else None
        with nullcontext() if step is None else self.steps.taken(step):
            output = type(self.module).forward(self.module, **given)
        return {name: output[name] for name in MADE if name in output}

    def chosen(self, how: Callable[..., Any], holding: Holding, *given: Any) -> dict[str, Any]:
        """By `CHOSEN`, what a `Choice` gives. given: of the step, and of that."""
        step, rest = given[: len(Given._fields)], given[len(Given._fields) :]
        return {CHOSEN: how(self.step(holding, *step)["logits"][:, -1], *rest)}

    def ready(self, room: int) -> bool:
        """Whether the layers may be computed fused. Binds them to the weights where the model has changed."""
        if not self.layers:
            return False
        if self.seen is None or not (self.trusted or (self.seen.reachable() and self.seen.holds())):
            self.reason = self._bind()
            self.seen = Fingerprint(self.module)
        longest = min((one.most or room for layer in self.layers for one in layer.biases), default=room)
        reason = self.reason if longest >= room else f"more than {longest} tokens, and a position bias"
        if reason is not None:
            self.log.fell_back(self.path, f"its layers run their own code: {reason}")
        return reason is None

    def _bind(self) -> str | None:
        try:
            path, _, _ = self.layers[0].path.rpartition(".")
            if [*self.module.get_submodule(path)] != [one.module for one in self.layers]:
                return "they are other ones now"
            self.biases = {one.path: one.bind(self.module) for layer in self.layers for one in layer.biases}
        except (NotUnderstood, AttributeError) as error:  # or it is gone
            return str(error)
        stack = not self.apart and streamed_model(self.module) is None
        hooked = (f"{one.path} has forward hooks" for one in self.layers if foreign_hooks(one.module, CallersHook))
        return next(hooked, None) or next(filter(None, (one.bind(stack) for one in self.layers)), None)
