"""The tokens of running requests, in arrays: a step of a thousand requests is a few operations."""

import time
from typing import NamedTuple

import numpy as np

from accel.errors import reason_of
from accel.llm.batching.request import Request

NO_ID = -1  # drawn where there was nothing to draw from; also: not an id that ends anything


class StepOutcome(NamedTuple):
    """What a step has brought. ended: rows; full: those of them that ended at their limit of tokens alone. streamed:
    requests of which somebody wants every token. failed: by row the reason, where it is known here.
    """

    ended: list[int]
    full: set[int]
    streamed: list[Request]
    failed: dict[int, str | None]


class Answers:
    """The ids that were drawn, by row, and which of the rows have ended. For one thread.

    count: (rows,) int64, ids of each row that are known. most: (rows,) int64, how many it may come to.
    """

    def __init__(self, rows: int):
        self.requests: list[Request | None] = [None] * rows
        self.count, self.most = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._ids = np.zeros((rows, 16), np.int64)
        self._eos = np.full((rows, 1), NO_ID, np.int64)
        self._watched = np.zeros(rows, bool)  # somebody wants to know of every token

    def open(self, row: int, request: Request, most: int) -> None:
        """The request takes this row; the tokens that it has already count."""
        self.requests[row] = request
        self._widen(len(request.tokens), len(request.eos))
        self.count[row], self.most[row] = len(request.tokens), most
        self._ids[row, : len(request.tokens)] = request.tokens
        self._eos[row] = NO_ID
        self._eos[row, : len(request.eos)] = list(request.eos)
        self._watched[row] = request.streaming or request.record_timestamps or request.ends is not None

    def close(self, row: int) -> Request:
        """The request leaves its row, with all tokens that are known."""
        request = self.requests[row]
        assert request is not None
        request.tokens = self.known(row).tolist()
        self.requests[row] = None
        self._watched[row] = False
        return request

    def known(self, row: int) -> np.ndarray:
        """The ids of a row, a view."""
        return self._ids[row, : self.count[row]]

    def add(self, rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray | None) -> StepOutcome:
        """One more id for each of these rows, (n,) each; NO_ID where none could be drawn."""
        good = ids != NO_ID
        failed: dict[int, str | None] = dict.fromkeys(rows[~good].tolist())
        if failed:
            rows, ids, logprobs = rows[good], ids[good], None if logprobs is None else logprobs[good]
        if not len(rows):
            return StepOutcome([], set(), [], failed)
        self._widen(int(self.count[rows].max()) + 1, 0)
        self._ids[rows, self.count[rows]] = ids
        self.count[rows] += 1
        over = (self._eos[rows] == ids[:, None]).any(1)
        if logprobs is not None:
            for row, logprob in zip(rows.tolist(), logprobs.tolist(), strict=True):
                self._request(row).logprobs.append(logprob)
        streamed = []
        for place in np.flatnonzero(self._watched[rows]).tolist():
            row = int(rows[place])
            try:
                over[place] |= self._append(row)
                if self._request(row).streaming:
                    streamed.append(self._request(row))
            except Exception as error:  # of a stopping criterion of the user's
                failed[row] = f"a stopping criterion raised {reason_of(error)}"
        full = ~over & (self.count[rows] >= self.most[rows])
        ended = [row for row in rows[over | full].tolist() if row not in failed]
        return StepOutcome(ended, set(rows[full].tolist()), streamed, failed)

    def _append(self, row: int) -> bool:
        """Appends the last token to a watched request; whether its own criteria end it."""
        request = self._request(row)
        request.tokens.append(int(self._ids[row, self.count[row] - 1]))
        if request.record_timestamps:
            request.timestamps.append(time.perf_counter())
        return request.ends is not None and bool(request.ends(request.prompt + request.tokens))

    def _request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None
        return request

    def _widen(self, tokens: int, eos: int) -> None:
        self._ids = _wider(self._ids, tokens, 0)
        self._eos = _wider(self._eos, eos, NO_ID)


def _wider(array: np.ndarray, columns: int, filler: int) -> np.ndarray:
    """The array with room for so many columns, twice as many as before where it grows."""
    if columns <= array.shape[1]:
        return array
    more = np.full((array.shape[0], max(columns, 2 * array.shape[1]) - array.shape[1]), filler, array.dtype)
    return np.concatenate([array, more], axis=1)
