"""One step on the device: the model over the new tokens of all sequences, and a draw for each that goes on.

Nothing waits for the device. The ids that are drawn stay there as the inputs of the next step; a copy is on its way to
the host meanwhile.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from accel_kernels.attention.paged.ragged import Pointers, Ragged, RaggedStates
from accel_kernels.warmup import warmup

from accel.cuda_graphs.adapter_buffers import AdapterBuffers
from accel.cuda_graphs.adapter_group import each_token
from accel.cuda_graphs.runner import GraphRunner
from accel.llm.batching.request import Request
from accel.llm.batching.sampler import Sampler, errors_deferred
from accel.llm.batching.scheduler import LATEST, StepPlan
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.layer_inputs import read_whole
from accel.llm.kv_cache.paged_kv_cache import PagedKVCache
from accel.llm.parts.step import Step
from accel.offload.call_hooks import one_call, streamed_model

# Sequences of one token that a graph is made for: as many as asked for are filled up to the next. Up to 64 rows a
# product takes about as long as its weight is read; beyond that no more than a quarter of the rows is computed in vain.
DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
COARSE = 128  # from one size to the next beyond those
# Tokens of steps with prompts that a graph is made for, and how many prompts at most. A step of more tokens keeps a GPU
# busy for longer than Python takes to launch it.
MIXED_SIZES, MOST_PREFILLS = (128, 256, 512, 768, 1024), 32
NONE = -1  # in place of a row or a sequence
ALIGNED = 4  # numbers; kernels are compiled anew for addresses that are not multiples of 16 bytes


@dataclass
class LaunchedStep:
    """A step under way. ids, logprobs: of plan.draw_rows, being copied to the host; done: when they are there."""

    plan: StepPlan
    ids: torch.Tensor
    logprobs: torch.Tensor | None
    done: torch.cuda.Event | None

    def read(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Waits for the step."""
        if self.done is not None:
            self.done.synchronize()
        return self.ids.numpy(), None if self.logprobs is None else self.logprobs.numpy()


class StepSize(NamedTuple):
    """What a step is launched for: tokens, sequences of both kinds, draws. What is more than in the plan is idle."""

    tokens: int
    decodes: int
    prefills: int
    draws: int

    @property
    def variant(self) -> tuple:
        """By which graphs of equal input shapes differ."""
        return "batch", self.decodes, self.prefills

    @classmethod
    def exact(cls, plan: StepPlan) -> "StepSize":
        """As in the plan; a step without a draw computes the logits of one token, since none may be too few."""
        return cls(len(plan.tokens), plan.decodes, len(plan.rows) - plan.decodes, max(1, len(plan.draw_rows)))

    @classmethod
    def filled(cls, plan: StepPlan, rows: int, mixed: Sequence[int] = MIXED_SIZES) -> "StepSize | None":
        """Of the graph that the step fits, or None. rows: of the engine. mixed: sizes of graphs with prompts."""
        tokens, decodes = len(plan.tokens), plan.decodes
        if decodes == len(plan.rows):
            fit = bucket_of(decodes)
            return cls(fit, fit, 0, fit)
        fit = next((size for size in mixed if size >= tokens), 0)
        if not fit or len(plan.rows) - decodes > MOST_PREFILLS:
            return None
        most = min(fit, rows)
        draws = most + MOST_PREFILLS
        return cls(fit, most, MOST_PREFILLS, draws) if len(plan.draw_rows) <= draws else None

    def ragged(self, tensors: Sequence[torch.Tensor]) -> Ragged:
        """The sequences of a step of this size. tensors: as `StepInputs.int32_on` gives them."""
        given, states = tensors[: len(Pointers._fields)], tensors[len(Pointers._fields) :]
        kept = None
        if states:
            slots, positions, spans, prompts = states
            kept = RaggedStates(slots.view(-1, 2), positions, spans.view(-1, 2), prompts)
        return Ragged(*Pointers(*given), self.decodes, self.prefills, kept)


def bucket_of(sequences: int) -> int:
    """How many sequences of one token so many are filled up to."""
    return next((size for size in DECODE_SIZES if size >= sequences), -(-sequences // COARSE) * COARSE)


class StepRunner:
    """Runs planned steps of one model over one pool of blocks.

    runner: of CUDA graphs, None for none. device: where tokens go in; keep_device: where the model's code picks the
    tokens that it computes logits of. last: (rows + 1,) int64, the id drawn last for each row, where it is drawn; the
    place behind the rows is for sequences that only fill a graph up.
    """

    def __init__(
        self, forward: DecoderForward, kv_cache: PagedKVCache, sampler: Sampler, rows: int, runner: GraphRunner | None
    ):
        self.forward, self.kv_cache, self.sampler, self.rows = forward, kv_cache, sampler, rows
        self.device = self.keep_device = forward.embeddings().device
        self.runner = runner if self.device.type == "cuda" else None
        self.adapters = self.runner.adapters if isinstance(self.runner, GraphRunner) else AdapterBuffers()
        self.last = torch.zeros(rows + 1, dtype=torch.int64, device=sampler.device)

    def upload(self, places: np.ndarray, values: np.ndarray) -> None:
        """Before a step is launched: what has changed in the tables of blocks, as `PagedKVCache.upload` takes it."""
        self.kv_cache.upload(places, values)

    def launch(
        self, plan: StepPlan, tokens_of: Callable[[int], list[int]], logprobs: bool, check: bool = True
    ) -> LaunchedStep:
        """Runs a step. tokens_of: all tokens of a row, for processors. check: replays only for the captured model."""
        with one_call(self.forward.module, len(plan.tokens)):
            placed = streamed_model(self.forward.module)
            moves = plan.whole is not None or bool(
                getattr(placed, "streamed", ())
            )  # of which a graph would know nothing
            filled = None if self.runner is None or moves else self._filled(plan)
            size = StepSize.exact(plan) if filled is None else filled
            inputs = self._inputs(plan, size)
            if plan.whole is not None:
                logits = self._read_whole(plan.whole, inputs, size)[0]
            else:
                logits = self._logits(inputs, size, by_graph=filled is not None, check=check or placed is not None)[0]
            return self._draw(plan, logits, inputs, tokens_of, logprobs)

    def _filled(self, plan: StepPlan) -> StepSize | None:
        """What there is a graph for, if there is one."""
        return StepSize.filled(plan, self.rows)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Of the last token of each sequence of plan.sources, (n, vocabulary), computed without a graph."""
        size = StepSize.exact(plan)
        with one_call(self.forward.module, size.tokens):
            return self._logits(self._inputs(plan, size), size, by_graph=False, check=True)[0]

    def _inputs(self, plan: StepPlan, size: StepSize) -> "StepInputs":
        return StepInputs(plan, size, self.rows, bool(self.kv_cache.by_states))

    def warm_up(self, plans: Iterable[StepPlan], beside: Callable[[], object]) -> None:
        """Compiles side by side what these steps, and beside(), launch on a GPU; nothing of them comes out."""
        if self.device.type == "cuda":
            with errors_deferred(), warmup():
                beside()
                for plan in plans:
                    self.sampler.warm_up(self.logits(plan))

    def _arguments(
        self, inputs: "StepInputs", size: StepSize
    ) -> tuple[torch.Tensor, torch.Tensor | None, int | torch.Tensor]:
        """Tokens and positions, (1, tokens) each, and the places of tokens to compute logits of, 0 for all."""
        wide = inputs.int64_on(self.device)
        latest = self.last.index_select(0, inputs.int64_on(self.last.device)["taken_from"])
        latest = latest.to(self.device, non_blocking=True)
        tokens = torch.where(wide["tokens"] == LATEST, latest, wide["tokens"]).unsqueeze(0)
        positions = wide["positions"].unsqueeze(0) if "position_ids" in self.forward.names else None
        return tokens, positions, inputs.int64_on(self.keep_device)["keep"] if size.prefills else 0

    def _logits(self, inputs: "StepInputs", size: StepSize, by_graph: bool, check: bool) -> torch.Tensor:
        metadata, adapters = self.kv_cache.tables[self.device].metadata, inputs.int64_on(self.device).get("adapters")
        arguments = (*self._arguments(inputs, size), metadata, adapters, *inputs.int32_on(self.device))
        eager: Callable[..., torch.Tensor] = partial(self._forward, size)
        if (not by_graph or self.runner is None) and adapters is None:
            return eager(*arguments)
        if not by_graph or self.runner is None:
            with self.adapters.used():
                self.adapters.follow()
                return eager(*arguments)
        begun = None if check else self.runner.begin(arguments, {}, size.variant, at_once=True)
        outputs: Any = self.runner(eager, arguments, {}, size.variant) if begun is None else begun.outputs
        return outputs

    def _forward(
        self,
        size: StepSize,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        keep: int | torch.Tensor,
        metadata: torch.Tensor,
        adapters: torch.Tensor | None,
        *sequences: torch.Tensor,
    ) -> torch.Tensor:
        """Logits of the tokens at `keep`, (1, n, vocabulary), or of all where it is 0. sequences: `StepSize.ragged`."""
        forward = self.forward
        forward.ready()
        given = {"metadata": metadata, "by_address": True, "ragged": size.ragged(sequences)}
        kvs = self.kv_cache.of_step(forward.places, tokens.shape[1], **given)
        with nullcontext() if adapters is None else each_token(forward.module, adapters):
            return forward.logits_of(Step(kvs), tokens, positions, keep)

    def _read_whole(self, request: Request, inputs: "StepInputs", size: StepSize) -> torch.Tensor:
        """Logits of the last token of a prompt, (1, 1, vocabulary), with all that is given beside it. Raises Unfit."""
        tokens, metadata = inputs.int64_on(self.device)["tokens"][None], self.kv_cache.tables[self.device].metadata
        given = {"metadata": metadata, "by_address": True, "ragged": size.ragged(tuple(inputs.int32_on(self.device)))}
        kvs = self.kv_cache.of_step(self.forward.places, tokens.shape[1], **given)
        adapters = inputs.int64_on(self.device).get("adapters")
        with nullcontext() if adapters is None else self.adapters.used():
            if adapters is not None:
                self.adapters.follow()
            with nullcontext() if adapters is None else each_token(self.forward.module, adapters):
                return read_whole(self.forward, kvs, tokens, request.positions, request.given)

    def _draw(
        self, plan: StepPlan, logits: torch.Tensor, inputs: "StepInputs", tokens_of: Callable, logprobs: bool
    ) -> LaunchedStep:
        count = len(plan.draw_rows)
        ids, chances = (
            torch.empty(0, dtype=torch.int64, device="cpu"),
            torch.empty(0, device="cpu") if logprobs else None,
        )
        if count:
            wide = inputs.int64_on(self.sampler.device)
            ids, chances = self.sampler.draw(logits, wide["draw_rows"], inputs.draw_rows, tokens_of, logprobs)
            # Logits may differ by rounding from rank to rank, and so what is drawn; the answer may not.
            if self.forward.ranks is not None:
                ids = self.forward.ranks.first(ids)
            self.last.index_copy_(0, wide["put_to"], ids.clamp_min(0))
            ids, chances = ids[:count], None if chances is None else chances[:count]
        self._copy(plan.copies)
        if self.device.type != "cuda":
            return LaunchedStep(plan, ids, chances, None)
        here, there = _on_host(ids), None if chances is None else _on_host(chances)
        return LaunchedStep(plan, here, there, torch.cuda.current_stream(self.sampler.device).record_event())

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        """Blocks, once the step has run."""
        self.kv_cache.copy(pairs)


def head_size(forward: DecoderForward) -> int:
    """How many tokens the model's head gives logits of."""
    head = forward.module.get_output_embeddings()
    return head.out_features if hasattr(head, "out_features") else head.weight.shape[0]


class StepInputs:
    """All numbers of a step, on the host in two arrays, on a device views of two tensors.

    draw_rows: as in StepPlan, filled up. nobody: the place in `StepRunner.last` that is no row's. states: whether a
    layer keeps any.
    """

    def __init__(self, plan: StepPlan, size: StepSize, nobody: int, states: bool = False):
        starts, count = np.concatenate([np.zeros(1, np.int64), np.cumsum(plan.query_lengths)]), len(plan.tokens)
        before = plan.lengths if plan.shifts is None else plan.lengths + plan.shifts
        of_token = np.repeat(np.arange(len(plan.rows)), plan.query_lengths)
        sequences = size.decodes + size.prefills
        self.draw_rows = _fill(plan.draw_rows, size.draws, NONE)
        self._int64 = {
            "tokens": _fill(plan.tokens, size.tokens, 0),
            "positions": _fill((before - starts[:-1])[of_token] + np.arange(count), size.tokens, 0),
            "taken_from": _fill(np.where(plan.tokens == LATEST, plan.rows[of_token], nobody), size.tokens, nobody),
            "keep": _fill(starts[plan.sources + 1] - 1, size.draws, count - 1),
            "draw_rows": self.draw_rows,
            "put_to": np.where(self.draw_rows == NONE, nobody, self.draw_rows),
        }
        if plan.adapters is not None:
            self._int64["adapters"] = _fill(plan.adapters[of_token], size.tokens, 0)
        self._int32 = {
            "starts": _fill(starts, sequences + 1, count),
            "lengths": _fill(plan.lengths, sequences, 0),
            "rows": _fill(plan.rows, sequences, 0),
            "token_sequences": _fill(of_token, size.tokens, NONE),
            "counts": np.array([plan.decodes, len(plan.rows)]),
        }
        if states:  # those of prefills begin at a multiple of 16 bytes too
            first = -(-size.decodes // ALIGNED) * ALIGNED
            at = np.arange(len(plan.rows))
            at[plan.decodes :] += first - plan.decodes
            slots, spans = np.full((first + size.prefills, 2), NONE), np.full((first + size.prefills, 2), count)
            positions, prompts = np.zeros((2, first + size.prefills), np.int64)
            slots[at] = NONE if plan.slots is None else plan.slots
            positions[at], spans[at] = plan.lengths, np.stack([starts[:-1], starts[1:]], axis=1)
            prompts[at] = 0 if plan.prompts is None else plan.prompts
            kept = slots.ravel(), positions, spans.ravel(), prompts
            self._int32 |= dict(zip(RaggedStates._fields, kept, strict=True))
        self._there: dict[tuple, dict[str, torch.Tensor]] = {}

    def int64_on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """By name: tokens, positions, what `last` is taken from for each and put to, places to keep, rows, adapters."""
        return self._on(device, self._int64, np.int64)

    def int32_on(self, device: torch.device) -> Iterable[torch.Tensor]:
        """The tensors of a `Ragged`, in its order, and flat ones of its states."""
        return self._on(device, self._int32, np.int32).values()

    def _on(self, device: torch.device, parts: dict[str, np.ndarray], dtype: type) -> dict[str, torch.Tensor]:
        if (device, dtype) not in self._there:
            self._there[device, dtype] = _moved(parts, dtype, device)
        return self._there[device, dtype]


def _fill(numbers: np.ndarray, length: int, filler: int) -> np.ndarray:
    """So many numbers, fillers behind those that are there."""
    more = length - len(numbers)
    return np.concatenate([numbers, np.full(more, filler)]) if more else numbers


def _moved(parts: dict[str, np.ndarray], dtype: type, device: torch.device) -> dict[str, torch.Tensor]:
    """The parts on the device, each beginning at a multiple of 16 bytes; in one copy that nobody waits for."""
    sizes = [-(-len(part) // ALIGNED) * ALIGNED for part in parts.values()]
    host = torch.empty(
        sum(sizes), dtype=torch.from_numpy(np.empty(0, dtype)).dtype, pin_memory=device.type == "cuda", device="cpu"
    )
    array, place = host.numpy(), 0
    for part, size in zip(parts.values(), sizes, strict=True):
        array[place : place + len(part)] = part
        place += size
    pieces = host.to(device, non_blocking=True).split(sizes)
    return {name: piece[: len(parts[name])] for name, piece in zip(parts, pieces, strict=True)}


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is there once the stream has come to it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
    return host.copy_(tensor, non_blocking=True)
