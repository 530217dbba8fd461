"""One step on the device: the model over the new tokens of all sequences, and a draw for each that goes on.

Nothing waits for the device. The ids that are drawn stay there as the inputs of the next step; a copy is on its way to
the host meanwhile.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from accel_kernels.attention.paged.ragged import Ragged
from accel_kernels.warmup import warmup

from accel.cuda_graphs.runner import GraphRunner
from accel.errors import reason_of
from accel.llm.batching.sampler import Sampler
from accel.llm.batching.scheduler import LATEST, StepPlan
from accel.llm.generation.decoder import DecoderForward
from accel.llm.kv_cache.paged_kv_cache import PagedKVCache
from accel.llm.runtime.step import Step

# Sequences of one token that a graph is made for: as many as asked for are filled up to the next. Up to 64 rows a
# product takes about as long as its weight is read; beyond that no more than a quarter of the rows is computed in vain.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
COARSE = 128  # from one bucket to the next beyond those
# Tokens of steps with prompts that a graph is made for, and how many prompts at most. A step of more tokens keeps a GPU
# busy for longer than Python takes to launch it.
MIXED, MOST_PREFILLS = (128, 256, 512, 768, 1024), 32
NOBODY = -1  # in place of a row or a sequence
ALIGNED = 4  # numbers; kernels are compiled anew for addresses that are not multiples of 16 bytes


@dataclass
class Flight:
    """A step that was launched. ids, logprobs: of plan.drawn, on their way to the host; done: when they are there."""

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
    def sequences(self) -> int:
        return self.decodes + self.prefills

    @classmethod
    def exact(cls, plan: StepPlan) -> "StepSize":
        """As in the plan; a step without a draw computes the logits of one token, since none may be too few."""
        return cls(len(plan.tokens), plan.decodes, len(plan.rows) - plan.decodes, max(1, len(plan.drawn)))

    @classmethod
    def filled(cls, plan: StepPlan, rows: int, mixed: Sequence[int] = MIXED) -> "StepSize | None":
        """Of the graph that the step fits, None where there is none for so large ones. rows: that the engine has.
        mixed: tokens of steps with prompts that there are graphs for.
        """
        tokens, decodes = len(plan.tokens), plan.decodes
        if decodes == len(plan.rows):
            fit = bucket_of(decodes)
            return cls(fit, fit, 0, fit)
        fit = next((size for size in mixed if size >= tokens), 0)
        if not fit or len(plan.rows) - decodes > MOST_PREFILLS:
            return None
        most = min(fit, rows)
        draws = most + MOST_PREFILLS
        return cls(fit, most, MOST_PREFILLS, draws) if len(plan.drawn) <= draws else None


def bucket_of(sequences: int) -> int:
    """How many sequences of one token so many are filled up to."""
    return next((size for size in BUCKETS if size >= sequences), -(-sequences // COARSE) * COARSE)


class StepRunner:
    """Runs planned steps of one model over one pool of blocks.

    runner: of CUDA graphs, None for none. device: where tokens go in. last: (rows + 1,) int64, the id drawn last for
    each row, where it is drawn; the last place is nobody's.
    """

    def __init__(
        self, forward: DecoderForward, kv_cache: PagedKVCache, sampler: Sampler, rows: int, runner: GraphRunner | None
    ):
        self.forward, self.kv_cache, self.sampler = forward, kv_cache, sampler
        self.device = forward.embeddings().device
        self.runner = runner if self.device.type == "cuda" else None
        self.last = torch.zeros(rows + 1, dtype=torch.int64, device=sampler.device)
        self.nobody = rows

    def upload(self, places: np.ndarray, values: np.ndarray) -> None:
        """Before a step is launched: what has changed in the tables of blocks, as `PagedKVCache.upload` takes it."""
        self.kv_cache.upload(places, values)

    def launch(
        self, plan: StepPlan, tokens_of: Callable[[int], list[int]], logprobs: bool, look: bool = True
    ) -> Flight:
        """Runs a step. tokens_of: all tokens of a row, for processors that want them. look: whether a graph is replayed
        only if the model is still the one it was captured from. Raises what the forward does.
        """
        size = None if self.runner is None else self._filled(plan)
        by_graph = size is not None
        size = StepSize.exact(plan) if size is None else size
        numbers = Numbers(plan, size, self.nobody)
        return self._draw(plan, self._logits(numbers, size, by_graph, look)[0], numbers, tokens_of, logprobs)

    def _filled(self, plan: StepPlan) -> StepSize | None:
        """What there is a graph for, if there is one."""
        return StepSize.filled(plan, self.nobody)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Of the last token of each sequence of plan.sources, (n, vocabulary), computed without a graph."""
        size = StepSize.exact(plan)
        return self._logits(Numbers(plan, size, self.nobody), size, by_graph=False, look=True)[0]

    def warm_up(self, plans: Iterable[StepPlan], beside: Callable[[], object]) -> None:
        """Compiles side by side what these steps, and beside(), launch on a GPU; nothing of them comes out."""
        if self.device.type == "cuda":
            try:
                with warmup():
                    beside()
                    for plan in plans:
                        self.sampler.warm_up(self.logits(plan))
            except Exception as error:  # shows again when such a step runs
                reason_of(error)

    def _logits(self, numbers: "Numbers", size: StepSize, by_graph: bool, look: bool) -> torch.Tensor:
        wide = numbers.wide_on(self.device)
        latest = self.last.index_select(0, wide["taken_from"])
        tokens = torch.where(wide["tokens"] == LATEST, latest, wide["tokens"]).unsqueeze(0)
        positions = wide["positions"].unsqueeze(0) if "position_ids" in self.forward.names else None
        keep = wide["keep"] if size.prefills else 0
        metadata = self.kv_cache.tables[self.device].metadata
        arguments = (tokens, positions, metadata, *numbers.narrow_on(self.device), keep)
        eager: Callable[..., torch.Tensor] = partial(self._forward, size.decodes, size.prefills)
        if not by_graph or self.runner is None:
            return eager(*arguments)
        variant = ("batch", size.decodes, size.prefills)
        begun = None if look else self.runner.begin(arguments, {}, variant)
        outputs: Any = self.runner(eager, arguments, {}, variant) if begun is None else begun.outputs
        return outputs

    def _forward(
        self,
        most_decodes: int,
        most_prefills: int,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        metadata: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        token_sequences: torch.Tensor,
        counts: torch.Tensor,
        keep: int | torch.Tensor,
    ) -> torch.Tensor:
        """Logits of the tokens at `keep`, (1, n, vocabulary), or of all where it is 0."""
        forward = self.forward
        forward.ready()
        ragged = Ragged(starts, lengths, rows, token_sequences, counts, most_decodes, most_prefills)
        kvs = self.kv_cache.of_step(range(len(forward.layers)), tokens.shape[1], metadata, ragged)
        return forward.logits_of(Step(list(kvs.values())), tokens, positions, keep)

    def _draw(
        self, plan: StepPlan, logits: torch.Tensor, numbers: "Numbers", tokens_of: Callable, logprobs: bool
    ) -> Flight:
        count = len(plan.drawn)
        ids, chances = torch.empty(0, dtype=torch.int64), torch.empty(0) if logprobs else None
        if count:
            wide = numbers.wide_on(self.sampler.device)
            drawn = self.sampler.draw(logits, wide["drawn"], numbers.drawn, tokens_of, logprobs)
            ids, chances = drawn if isinstance(drawn, tuple) else (drawn, None)
            # Logits may differ by rounding from rank to rank, and so what is drawn; the answer may not.
            if self.forward.ranks is not None:
                ids = self.forward.ranks.first(ids)
            self.last.index_copy_(0, wide["put_to"], ids.clamp_min(0))
            ids, chances = ids[:count], None if chances is None else chances[:count]
        self._copy(plan.copies)
        if self.device.type != "cuda":
            return Flight(plan, ids, chances, None)
        here, there = _on_host(ids), None if chances is None else _on_host(chances)
        return Flight(plan, here, there, torch.cuda.current_stream(self.sampler.device).record_event())

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        """Blocks, once the step has run."""
        self.kv_cache.copy(pairs)


def head_size(forward: DecoderForward) -> int:
    """How many tokens the model's head gives logits of."""
    head = forward.module.get_output_embeddings()
    return head.out_features if hasattr(head, "out_features") else head.weight.shape[0]


class Numbers:
    """All numbers of a step, on the host in two arrays, on a device views of two tensors.

    drawn: as in StepPlan, filled. nobody: the place in `StepRunner.last` that is no row's.
    """

    def __init__(self, plan: StepPlan, size: StepSize, nobody: int):
        starts, count = np.cumsum(np.insert(plan.news, 0, 0)), len(plan.tokens)
        of_token = np.repeat(np.arange(len(plan.rows)), plan.news)
        self.drawn = _fill(plan.drawn, size.draws, NOBODY)
        self._wide = {
            "tokens": _fill(plan.tokens, size.tokens, 0),
            "positions": _fill((plan.lengths - starts[:-1])[of_token] + np.arange(count), size.tokens, 0),
            "taken_from": _fill(np.where(plan.tokens == LATEST, plan.rows[of_token], nobody), size.tokens, nobody),
            "keep": _fill(starts[plan.sources + 1] - 1, size.draws, count - 1),
            "drawn": self.drawn,
            "put_to": np.where(self.drawn == NOBODY, nobody, self.drawn),
        }
        self._narrow = {
            "starts": _fill(starts, size.sequences + 1, count),
            "lengths": _fill(plan.lengths, size.sequences, 0),
            "rows": _fill(plan.rows, size.sequences, 0),
            "token_sequences": _fill(of_token, size.tokens, NOBODY),
            "counts": np.array([plan.decodes, len(plan.rows)]),
        }
        self._there: dict[tuple, list[torch.Tensor]] = {}

    def wide_on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """By name, int64: tokens, positions, what `last` is taken from for each and put to, places to keep, draws."""
        return dict(zip(self._wide, self._on(device, self._wide, np.int64), strict=True))

    def narrow_on(self, device: torch.device) -> list[torch.Tensor]:
        """The tensors of a `Ragged`, in its order."""
        return self._on(device, self._narrow, np.int32)

    def _on(self, device: torch.device, parts: dict[str, np.ndarray], dtype: type) -> list[torch.Tensor]:
        found = self._there.get((device, dtype))
        if found is None:
            found = self._there[device, dtype] = _moved(parts, dtype, device)
        return found


def _fill(numbers: np.ndarray, length: int, filler: int) -> np.ndarray:
    """So many numbers, fillers behind those that are there."""
    more = length - len(numbers)
    return np.concatenate([numbers, np.full(more, filler)]) if more else numbers


def _moved(parts: dict[str, np.ndarray], dtype: type, device: torch.device) -> list[torch.Tensor]:
    """The parts on the device, each beginning at a multiple of 16 bytes; in one copy that nobody waits for."""
    sizes = [-(-len(part) // ALIGNED) * ALIGNED for part in parts.values()]
    host = torch.empty(sum(sizes), dtype=torch.from_numpy(np.empty(0, dtype)).dtype, pin_memory=device.type == "cuda")
    array, place = host.numpy(), 0
    for part, size in zip(parts.values(), sizes, strict=True):
        array[place : place + len(part)] = part
        place += size
    pieces = host.to(device, non_blocking=True).split(sizes)
    return [piece[: len(part)] for piece, part in zip(pieces, parts.values(), strict=True)]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is there once the stream has come to it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
