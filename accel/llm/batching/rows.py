"""The requests that run, by row, in arrays: a step of a thousand requests is a few operations."""

import time

import numpy as np

from accel.errors import reason_of
from accel.llm.batching.request import Request

NO_ID = -1  # drawn where there was nothing to draw from; also: not an id that ends anything


class RunningRows:
    """One place of the batch for each running request. For one thread.

    requests: by row, in the order of their arrival. idle: rows without a request. All others are (rows,) int64. drawn,
    most: tokens of the answer that are known, and how many it may come to. stored: tokens whose keys and values are
    there once all planned steps have run. micro_batch, adapter, shift: the request's. serial: counts those of the row.
    """

    def __init__(self, rows: int):
        self.requests: dict[int, Request] = {}
        self.idle = list(range(rows - 1, -1, -1))
        self.drawn, self.most, self.stored, self.serial, self.micro_batch = np.zeros((5, rows), np.int64)
        self.adapter, self.shift = np.zeros((2, rows), np.int64)
        self._last = np.zeros(rows, np.int64)  # how many tokens are stored when the last one is drawn
        self._ids = np.zeros((rows, 16), np.int64)
        self._eos = np.full((rows, 1), NO_ID, np.int64)
        self._watched = np.zeros(rows, bool)  # somebody wants to know of every token

    def open(self, request: Request, most: int, stored: int, micro_batch: int) -> int:
        """The request takes a row; the tokens that it has already count."""
        row, begun = self.idle.pop(), len(request.tokens)
        self.requests[row] = request
        self._ids = _wider(self._ids, begun, 0)
        self._eos = _wider(self._eos, len(request.eos), NO_ID)
        self.drawn[row], self.most[row], self.stored[row], self.micro_batch[row] = begun, most, stored, micro_batch
        self.adapter[row], self.shift[row] = request.number, request.shift
        self._last[row] = len(request.prompt) + most - 1
        self._ids[row, :begun] = request.tokens
        self._eos[row] = NO_ID
        self._eos[row, : len(request.eos)] = list(request.eos)
        self._watched[row] = request.streaming or request.record_timestamps or request.stopping_criterion is not None
        return row

    def close(self, row: int) -> Request:
        """The request leaves its row, with all tokens that are known."""
        request = self.requests.pop(row)
        request.tokens = self._ids[row, : self.drawn[row]].tolist()
        self.serial[row] += 1
        self.idle.append(row)
        return request

    def tokens(self, row: int) -> list[int]:
        """Prompt and answer, as far as they are known."""
        return self.requests[row].prompt + self._ids[row, : self.drawn[row]].tolist()

    def unfinished(self, rows: np.ndarray, micro_batch: int) -> np.ndarray:
        """Of these rows, (n,), those in this micro-batch that have a token left to draw without a planned step."""
        return rows[(self.stored[rows] < self._last[rows]) & (self.micro_batch[rows] == micro_batch)]

    def size_of(self, micro_batch: int) -> int:
        """How many requests the micro-batch has."""
        return int((self.micro_batch[list(self.requests)] == micro_batch).sum())

    def add(
        self, rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray | None
    ) -> tuple[list[Request], dict[int, bool], dict[int, str | None]]:
        """One more id for each of these rows, (n,) each; NO_ID where none could be drawn.

        Returns requests of which somebody wants every token; by row that has ended, whether that was at its limit of
        tokens alone; by row that has failed the reason, where it is known here.
        """
        good = ids != NO_ID
        failed: dict[int, str | None] = dict.fromkeys(rows[~good].tolist())
        if failed:
            rows, ids, logprobs = rows[good], ids[good], None if logprobs is None else logprobs[good]
        self._ids = _wider(self._ids, int(self.drawn[rows].max(initial=0)) + 1, 0)
        self._ids[rows, self.drawn[rows]] = ids
        self.drawn[rows] += 1
        over = (self._eos[rows] == ids[:, None]).any(1)
        if logprobs is not None:
            for row, logprob in zip(rows.tolist(), logprobs.tolist(), strict=True):
                self.requests[row].logprobs.append(logprob)
        streamed = []
        for place in np.flatnonzero(self._watched[rows]).tolist():
            row = int(rows[place])
            try:
                over[place] |= self._append(self.requests[row], int(ids[place]))
                if self.requests[row].streaming:
                    streamed.append(self.requests[row])
            except Exception as error:  # of a stopping criterion of the user's
                failed[row] = f"a stopping criterion raised {reason_of(error)}"
        full = ~over & (self.drawn[rows] >= self.most[rows])
        ended = dict(zip(rows[over | full].tolist(), full[over | full].tolist(), strict=True))
        return streamed, {row: at_limit for row, at_limit in ended.items() if row not in failed}, failed

    def _append(self, request: Request, token: int) -> bool:
        """Appends a token to a watched request; whether its own criteria end it."""
        request.tokens.append(token)
        if request.record_timestamps:
            request.timestamps.append(time.perf_counter())
        ends = request.stopping_criterion
        return ends is not None and bool(ends(request.prompt + request.tokens))


def _wider(array: np.ndarray, columns: int, filler: int) -> np.ndarray:
    """The array with room for so many columns, twice as many as before where it grows."""
    if columns <= array.shape[1]:
        return array
    more = np.full((array.shape[0], max(columns, 2 * array.shape[1]) - array.shape[1]), filler, array.dtype)
    return np.concatenate([array, more], axis=1)
