"""What all requests in a batch draw next: their settings on the device, by the row of each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from accel_kernels import SamplingTable, sample
from accel_kernels.sampling.table import WORD, seen_words
from accel_kernels.warmup import Warmup
from transformers import LogitsProcessorList

from accel.errors import fatal, reason_of
from accel.llm.batching.sampling import Sampling

FILTERED, NUCLEUS, PENALIZED, HOSTED = 1, 2, 4, 8  # flags of a row
WIDE, NARROW = 2, 5  # numbers of 64 and of 32 bits that a row has in the table
ALIGNED = 4  # rows that are made at once, so that every part of the table begins at a multiple of 16 bytes
NONE = -1


class Sampler:
    """Draws tokens for up to `rows` requests at once, without waiting for the GPU unless processors on the host ask it.

    A request keeps its row from `set` to `clear`. What it draws depends on its own logits, seed and count alone. The
    table keeps its addresses, so that CUDA graphs can hold `draw`; settings that changed are copied before it, at once.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str) -> None:
        rows = -(-rows // ALIGNED) * ALIGNED  # kernels are compiled anew for other alignments
        self.rows, self.vocabulary, self.device = rows, vocabulary, torch.device(device)
        # One piece of memory, so that one copy writes whatever has changed.
        self._store = torch.zeros((2 * WIDE + NARROW) * rows, dtype=torch.int32, device=self.device)
        seeds, drawn = self._store[: 2 * WIDE * rows].view(torch.int64).view(WIDE, rows)
        narrow = self._store[2 * WIDE * rows :].view(NARROW, rows)
        floats = narrow.view(torch.float32)
        counters = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self._table = SamplingTable(floats[0], narrow[1], floats[2], floats[3], floats[4], seeds, drawn, counters)
        self._hosts: dict[int, LogitsProcessorList] = {}
        self._flags = np.zeros(rows + 1, np.uint8)  # the last for row -1, which is nobody's
        self._changed: dict[int, np.ndarray] = {}  # what a row is to have in the store
        self._seen: dict[int, np.ndarray] = {}
        self._errors: dict[int, Exception] = {}
        self._filters: Warmup | None = None  # that compiles what requests with filters launch

    def set(self, row: int, sampling: Sampling, tokens: Sequence[int], drawn: int = 0) -> None:
        """A request takes a row. tokens: its prompt, and its answer so far, of which `drawn` were drawn; so a request
        that goes on after it was preempted draws what it would have drawn.

        Raises torch.OutOfMemoryError at the first request with a repetition penalty, if there is no room for its
        rows * vocabulary / 8 bytes.
        """
        self.clear(row)
        if sampling.penalty != 1.0:
            if self._table.seen is None:
                seen = torch.zeros(self.rows, seen_words(self.vocabulary), dtype=torch.int32, device=self.device)
                self._table = self._table._replace(seen=seen)
            self._seen[row] = bits_of(tokens, self.vocabulary)
        wide = np.array([sampling.seed, drawn], np.int64).view(np.int32)
        narrow = np.array([sampling.temperature, 0, sampling.top_p, sampling.min_p, sampling.penalty], np.float32)
        narrow = narrow.view(np.int32)
        narrow[1] = sampling.top_k
        self._changed[row] = np.concatenate([wide, narrow])
        flags = FILTERED * sampling.filtered | NUCLEUS * sampling.nucleus | PENALIZED * (sampling.penalty != 1.0)
        if sampling.host is not None:
            self._hosts[row] = sampling.host
            flags |= HOSTED
        self._flags[row] = flags

    def clear(self, row: int) -> None:
        """The request of this row has left."""
        self._flags[row] = 0
        for by_row in (self._hosts, self._seen, self._errors):
            by_row.pop(row, None)

    def variant(self, rows: np.ndarray) -> tuple[bool, bool, bool]:
        """Whether any of these requests has filters, any has top-p or min-p without top-k, and any has a penalty: by
        which `draw` runs different kernels. rows: (N,), -1 for nobody.
        """
        flags = int(np.bitwise_or.reduce(self._flags[rows], initial=0))
        return bool(flags & FILTERED), bool(flags & NUCLEUS), bool(flags & PENALIZED)

    def waits(self, rows: np.ndarray) -> bool:
        """Whether any of these requests has processors on the host, which must know all its tokens before `draw`."""
        return bool((self._flags[rows] & HOSTED).any())

    def flush(self) -> None:
        """Copies the settings of new requests, in order with the GPU's work; a graph that holds `draw` cannot."""
        if self._changed:
            rows = np.fromiter(self._changed, np.int64, len(self._changed))[:, None]
            wide = np.arange(WIDE).repeat(2) * 2 * self.rows + np.tile([0, 1], WIDE)
            places = np.concatenate([wide + 2 * rows, (2 * WIDE + np.arange(NARROW)) * self.rows + rows], 1)
            values = np.stack(list(self._changed.values()))
            given = self._copied(np.stack([places.ravel(), values.ravel()]))
            self._store.index_copy_(0, given[0], given[1].to(torch.int32))
            self._changed.clear()
        if self._seen and self._table.seen is not None:
            rows = np.fromiter(self._seen, np.int64, len(self._seen))
            self._table.seen.index_copy_(0, self._copied(rows), self._copied(np.stack(list(self._seen.values()))))
            self._seen.clear()

    def _copied(self, values: np.ndarray) -> torch.Tensor:
        """On the device, without waiting for it."""
        tensor = torch.from_numpy(values)
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        host_rows: np.ndarray,
        tokens: Callable[[int], Sequence[int]] | None = None,
        logprobs: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The next token of each request: ids (N,) int64 on the device, and log probabilities (N,) fp32 if wanted.

        logits: (N, vocabulary). rows: (N,) int32 or int64 on the device, and host_rows the same in numpy; -1 for
        nobody, no row twice. tokens: gives the prompt and answer so far of a row; asked of those with processors on
        the host. An id is -1 where none can be drawn, which is not counted; `error` says why. Log probabilities are
        those of the processed scores.

        Raises ValueError for logits of another vocabulary, and without tokens where they are needed.
        """
        if logits.shape[1] != self.vocabulary:
            raise ValueError(f"logits of {logits.shape[1]} tokens, the sampler is for {self.vocabulary}")
        self.flush()
        hosted = np.flatnonzero(self._flags[host_rows] & HOSTED)
        if not len(hosted):
            return self._sample(logits, rows, host_rows, logprobs)
        if tokens is None:
            raise ValueError(f"rows {host_rows[hosted].tolist()} have processors on the host, which need their tokens")
        at = self._copied(hosted)
        theirs = logits[at].float()
        for i, row in enumerate(host_rows[hosted].tolist()):
            self._process(row, theirs[i : i + 1], tokens(row))
        others = host_rows.copy()
        others[hosted] = NONE
        ids, chances = self._sample(logits, rows.index_fill(0, at, NONE), others, logprobs)
        their_ids, their_chances = self._sample(theirs, rows[at], host_rows[hosted], logprobs)
        if chances is not None and their_chances is not None:
            chances = chances.index_copy(0, at, their_chances)
        return ids.index_copy(0, at, their_ids), chances

    def _sample(
        self, logits: torch.Tensor, rows: torch.Tensor, host_rows: np.ndarray, logprobs: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        filters, nucleus, penalties = self.variant(host_rows)
        if filters and self._filters is not None:
            kernels, self._filters = self._filters, None
            with errors_deferred():
                kernels.wait()
        table = self._table if penalties else self._table._replace(seen=None)
        found = sample(logits, table, rows, filters=filters, nucleus=nucleus, logprobs=logprobs)
        return found if logprobs else (found, None)

    def _process(self, row: int, scores: torch.Tensor, tokens: Sequence[int]) -> None:
        """Runs a row's processors on the host; scores (1, V) are written over, with NaN where a processor raises."""
        host, ids = self._hosts[row], torch.tensor([list(tokens)], dtype=torch.int64, device=scores.device)
        try:
            found = host(ids, scores.clone())
            if found.shape != scores.shape:
                names = ", ".join(type(one).__name__ for one in host)
                raise ValueError(f"{names} gave scores of shape {tuple(found.shape)}, not {tuple(scores.shape)}")
            scores.copy_(found)
        except Exception as error:
            if fatal(error):
                raise
            self._errors[row] = error
            scores.fill_(float("nan"))

    def prepare(self, dtype: torch.dtype) -> None:
        """Begins to compile what requests with filters launch for logits of this dtype: the first of them waits for it.

        Without filters a draw needs little, which `warm_up` launches.
        """
        if self.device.type == "cuda":
            self._filters = Warmup()
            with errors_deferred(), self._filters.launches():
                logits = torch.empty(1, self.vocabulary, dtype=dtype, device=self.device)
                self.warm_up(logits, ((True, False), (True, True)))

    def warm_up(self, logits: torch.Tensor, variants: Sequence[tuple[bool, bool]] = ((False, False),)) -> None:
        """Launches for nobody what `draw` may need, inside `warmup`. variants: whether filters, and a nucleus."""
        nobody = torch.full((1,), NONE, dtype=torch.int64, device=self.device)
        seen = torch.zeros(1, seen_words(self.vocabulary), dtype=torch.int32, device=self.device)
        for filters, nucleus in variants:
            for one in (None, seen):
                sample(logits[:1], self._table._replace(seen=one), nobody, filters=filters, nucleus=nucleus)

    def error(self, row: int) -> Exception:
        """Why this row's request got -1 for an id."""
        no_token = ValueError("no token can be drawn: the logits have NaN, or all tokens are ruled out")
        return self._errors.get(row, no_token)


@contextmanager
def errors_deferred() -> Iterator[None]:
    """Inside, work only compiles: an error of it shows again in the call that needs the kernel."""
    try:
        yield
    except Exception as error:
        reason_of(error)


def bits_of(tokens: Sequence[int], vocabulary: int) -> np.ndarray:
    """A row of `SamplingTable.seen`; tokens beyond the vocabulary of the logits are left out, as they cannot come."""
    ids = np.asarray(tokens, np.int64)
    ids = ids[ids < vocabulary]
    words = np.zeros(seen_words(vocabulary), np.uint32)
    np.bitwise_or.at(words, ids // WORD, np.uint32(1) << (ids % WORD).astype(np.uint32))
    return words.view(np.int32)
