"""Which requests take part in the next step: first come, first served, prompts in chunks beside those that go on.

A step has a budget of new tokens. Requests that already have their first token come first, one token each; what is left
goes to prompts, the longest waiting first (chunked prefill: Agrawal et al., 2023, "SARATHI"). Where blocks run out, the
request that came last gives its own back and waits; what it had computed is computed again, or found by its hash.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from accel.libraries.batching import RequestStatus
from accel.llm.batching.limits import Limits
from accel.llm.batching.request import Request, failed
from accel.llm.batching.rows import RunningRows
from accel.llm.kv_cache.block_allocator import BlockAllocator
from accel.llm.kv_cache.shape import BLOCK

ADAPTER = 2**41  # times the number of a request's adapter, added to its tokens where they are found by
ANSWER = 2**40  # added to tokens of answers, where layers compute something else of them than of those of prompts
LATEST = -1  # in place of a token: the last one that was drawn for its row, which the host may not know yet


class TokensUnknown(Exception):
    """The tokens of all launched steps have to be read before the next step can be planned."""


@dataclass
class StepPlan:
    """One step: decodes, which get one new token each, then chunks of prompts.

    rows, lengths, query_lengths: (sequences,) int64, the row of each, tokens stored before, new tokens. tokens:
    (tokens,) int64 of all sequences in turn, LATEST for those of decodes. sources, draw_rows, serials: (n,) int64, the
    sequences whose last token is followed by a draw, the row it is drawn for, and which occupant of the row that is.
    copies: blocks to copy once the step is launched. opened: rows whose requests are new. micro_batch: its number.
    slots: (sequences, 2), of states that each reads and writes; None where no layer keeps any, or for nobody's.
    prompts: (sequences,), tokens of the prompt of each that is no decode; None where that does not matter. adapters:
    of each, by number, or None. shifts: of each, how far its positions are from its places. whole: the request whose
    prompt is read with all that is given beside it, and by which this step is one of its own.
    """

    rows: np.ndarray
    lengths: np.ndarray
    query_lengths: np.ndarray
    decodes: int
    tokens: np.ndarray
    sources: np.ndarray
    draw_rows: np.ndarray
    serials: np.ndarray
    copies: list[tuple[int, int]]
    opened: list[int]
    micro_batch: int = 0
    slots: np.ndarray | None = None
    prompts: np.ndarray | None = None
    adapters: np.ndarray | None = None
    shifts: np.ndarray | None = None
    whole: Request | None = None


class Scheduler:
    """The requests of one engine, those that wait and those that have a row. For one thread.

    micro_batches: how many those with a row are divided into. A step is of one micro-batch, and they take turns. A
    request goes to one that has less than its share, and stays there. apart: whether what is stored of an answer is
    found for no prompt.

    decoding: rows that have their first token or a step planned for it, in the order in which they came to that.
    prefilling: by row all tokens that it begins with, in the order of arrival. failed: requests that can never run.
    ends: by row the lengths at which a part of its prompt ends, so that its states then can be kept.
    """

    def __init__(
        self, allocator: BlockAllocator, rows: RunningRows, limits: Limits, micro_batches: int = 1, apart: bool = False
    ):
        self.allocator, self.rows, self.limits, self.micro_batches = allocator, rows, limits, micro_batches
        self.apart = apart
        self.waiting: deque[Request] = deque()
        self.decoding = np.empty(0, np.int64)
        self.prefilling: dict[int, list[int]] = {}
        self.ends: dict[int, list[int]] = {}
        self.failed: list[Request] = []
        self.preempted = 0
        self._opened: list[int] = []  # rows that were taken since the last plan
        self._turn = 0
        self._was_whole = False  # the last step was of one prompt alone
        self._blocked: tuple[Request, int] | None = None  # who waits for blocks, and how many were free then

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows.requests)

    def most(self, request: Request) -> int:
        """Tokens that its answer may come to."""
        room = self.limits.context - len(request.prompt) + 1
        return room if request.max_new_tokens is None else min(request.max_new_tokens, room)

    def plan(self, unread: bool) -> StepPlan | None:
        """The next step, None if nobody can take part. unread: ids are not known yet. Raises TokensUnknown."""
        if self.allocator.sliding.size:  # windows are passed only before a plan: a step reads the tables after its plan
            rows = _behind(self.decoding, list(self.prefilling))
            self.allocator.slide_all(rows, self.rows.stored[rows])
        while True:
            for _ in range(self.micro_batches):
                micro_batch, self._turn = self._turn, (self._turn + 1) % self.micro_batches
                decodes = self._decodes(micro_batch, unread)
                begins = not (len(decodes) and self._was_whole)  # steps of the others come in between
                chunks = list(self._chunks(micro_batch, self.limits.tokens - len(decodes), begins))
                if len(decodes) or chunks:
                    request = self.rows.requests[chunks[0][0]] if chunks else None
                    self._was_whole = request is not None and bool(request.given) and not chunks[0][1]
                    if not self._was_whole:
                        return self._step(micro_batch, decodes, chunks)
                    plan = self._step(micro_batch, decodes[:0], chunks)
                    plan.whole = request
                    return plan
            if not self.prefilling or not self._make_room(unread):
                return None

    def close(self, row: int, keep: bool) -> Request:
        """The request leaves its row. keep: others may find what it has stored."""
        if keep and not self.rows.requests[row].given:
            tokens = self._keys(self.rows.requests[row], self.rows.tokens(row))
            self.allocator.commit(row, tokens[: min(len(tokens) - 1, int(self.rows.stored[row]))])
        self.allocator.close(row)
        self.prefilling.pop(row, None)
        self.ends.pop(row, None)
        self.decoding = self.decoding[self.decoding != row]
        return self.rows.close(row)

    def undo(self, plan: StepPlan) -> None:
        """The step just planned was not launched, nor stored anything to be found. After its prompts are closed."""
        self.allocator.forget()
        self.rows.stored[plan.rows] = plan.lengths
        if self.allocator.states is not None:
            self.allocator.states.undo(np.array([row for row in plan.rows.tolist() if row in self.rows.requests], int))

    def _decodes(self, micro_batch: int, unread: bool) -> np.ndarray:
        """Rows that get one more token, and have the block for it."""
        while True:
            rows = self.rows.unfinished(self.decoding, micro_batch)
            fit = self.allocator.extend_all(rows, self.rows.stored[rows] + 1)
            if fit == len(rows) or not self._make_room(unread):
                return rows[:fit]

    def _make_room(self, unread: bool) -> bool:
        """Preempts the last request, which then waits before all others; the only one fails. Whether any is left."""
        if unread:
            raise TokensUnknown
        last, others = next(reversed(self.rows.requests)), len(self.rows.requests) > 1
        stored = int(self.rows.stored[last])
        if others:
            self.preempt(last, keep=True)
        else:
            reason = f"{stored} tokens fill all {self.allocator.blocks - 1} blocks that there are"
            self.failed += failed(self.close(last, keep=False).family, reason)
        return others

    def preempt(self, row: int, keep: bool) -> None:
        """The row's request waits again, before all others. keep: as of `close`."""
        request = self.close(row, keep)
        request.status = RequestStatus.PENDING
        self.waiting.appendleft(request)
        self.preempted += 1

    def _chunks(self, micro_batch: int, budget: int, begins: bool) -> Iterator[tuple[int, int, list[int]]]:
        """Parts of prompts, until the budget or the blocks are used up: row, tokens before, tokens. begins: the first
        may be a prompt with pictures, which is whole, and the only one.
        """
        prompts = self._prompts(micro_batch)
        while budget > 0 and (row := next(prompts, None)) is not None:
            tokens, start, request = self.prefilling[row], int(self.rows.stored[row]), self.rows.requests[row]
            whole = bool(request.given) and not start
            if whole and not begins:
                return
            reach = int(self.allocator.held[row] + self.allocator.free // len(self.allocator.sets)) * BLOCK
            ends = [end for end in self.ends[row] if end > start]
            end = len(request.prompt) if whole else min(len(tokens), start + budget, reach, *ends[:1])
            if end <= start or not self.allocator.extend(row, end):
                return
            budget, begins = 0 if whole else budget - (end - start), False
            self.rows.stored[row] = end
            if end // BLOCK > self.allocator.committed[row] and not request.given:
                self.allocator.commit(row, self._keys(request, tokens[:end]))
            if end == len(tokens):
                del self.prefilling[row]
                self.decoding = np.append(self.decoding, row)
            yield row, start, tokens[start:end]

    def _prompts(self, micro_batch: int) -> Iterator[int]:
        """Rows of the micro-batch with prompts to read: those that have begun, then new ones, as long as they fit."""
        yield from [row for row in self.prefilling if self.rows.micro_batch[row] == micro_batch]
        while self.waiting and self.rows.idle and self._has_room(micro_batch):
            row = self._open(micro_batch)
            if row is None:
                return
            yield row

    def _has_room(self, micro_batch: int) -> bool:
        """Whether the micro-batch has less than its share of those that run and wait."""
        share = -(-min(len(self.rows.requests) + len(self.waiting), self.limits.rows) // self.micro_batches)
        return self.micro_batches == 1 or self.rows.size_of(micro_batch) < share

    def _open(self, micro_batch: int) -> int | None:
        """The request that has waited longest takes a row here, if there are blocks for its tokens."""
        request, running = self.waiting[0], len(self.rows.requests)
        if running and self._blocked is not None and self._blocked[0] is request:
            if self.allocator.free <= self._blocked[1]:
                return None
        tokens, row = request.prompt + request.tokens, self.rows.idle[-1]
        keys = [] if request.given else self._keys(request, tokens)  # pictures are not looked at, nothing is shared
        found = self.allocator.open(row, keys)
        # One more block for each that runs: else they would preempt each other at once.
        wanted = (len(tokens) // BLOCK + 1 - found // BLOCK) * len(self.allocator.sets) + running
        if running and self.allocator.free < wanted:
            self.allocator.close(row)
            self._blocked = request, self.allocator.free
            return None
        self.waiting.popleft()
        self.prefilling[row], self.ends[row] = tokens, self.allocator.ends(keys, found)
        return self._take(request, found, micro_batch)

    def _keys(self, request: Request, tokens: list[int]) -> list[int]:
        """By which the tokens of a request, from the first on, are found: with other adapters, keys are others."""
        if request.number:
            tokens = [token + ADAPTER * request.number for token in tokens]
        if not self.apart:
            return tokens
        prompt = len(request.prompt)
        return tokens[:prompt] + [token + ANSWER for token in tokens[prompt:]]

    def _take(self, request: Request, stored: int, micro_batch: int) -> int:
        """The request has a row, in this micro-batch, from now on."""
        row = self.rows.open(request, self.most(request), stored, micro_batch)
        self._opened.append(row)
        request.status = RequestStatus.PREFILLING
        if request.started < 0:
            request.started = time.perf_counter()
        return row

    def _step(self, micro_batch: int, decodes: np.ndarray, chunks: list[tuple[int, int, list[int]]]) -> StepPlan:
        rows = _behind(decodes, [row for row, _, _ in chunks])
        lengths = _behind(self.rows.stored[decodes], [start for _, start, _ in chunks])
        query_lengths = _behind(np.ones_like(decodes), [len(tokens) for _, _, tokens in chunks])
        tokens = _behind(np.full_like(decodes, LATEST), [token for _, _, tokens in chunks for token in tokens])
        self.rows.stored[decodes] += 1
        sources, drawn = list(range(len(decodes))), decodes.tolist()
        copies: list[tuple[int, int]] = []
        slots = None if self.allocator.states is None else self.allocator.states.step(rows)
        prompts = _behind(np.zeros_like(decodes), [len(self.rows.requests[row].prompt) for row, _, _ in chunks])
        for place, (row, _, _) in enumerate(chunks, len(decodes)):
            if row not in self.prefilling:
                self.rows.requests[row].status = RequestStatus.DECODING
                answers = [row, *self._children(row, copies)]
                drawn += answers
                sources += [place] * len(answers)
        takers = np.array(drawn, np.int64)
        self.allocator.note(decodes, self.rows.stored[decodes])
        for row, start, part in chunks:
            if start + len(part) in self.ends[row]:
                self.allocator.keep(row, start + len(part))
        opened = [row for row in dict.fromkeys(self._opened) if row in self.rows.requests]
        self._opened.clear()
        adapters, shifts = self.rows.adapter[rows], self.rows.shift[rows]
        return StepPlan(
            rows, lengths, query_lengths, len(decodes), tokens, np.array(sources, np.int64), takers,
            self.rows.serial[takers], copies, opened, micro_batch, slots, prompts, adapters if adapters.any() else None,
            shifts if shifts.any() else None,
        )  # fmt: skip

    def _children(self, row: int, copies: list[tuple[int, int]]) -> Iterator[int]:
        """Rows of further answers to the same prompt, which share its keys and values; without room they wait first."""
        request, idle, length = self.rows.requests[row], self.rows.idle, int(self.rows.stored[row])
        children, request.children = request.children, []
        for place, child in enumerate(children):
            pairs = self.allocator.fork(row, idle[-1], length) if idle else None
            if pairs is None:
                self.waiting.extendleft(reversed(children[place:]))
                return
            copies += pairs
            new = self._take(child, length, int(self.rows.micro_batch[row]))
            child.status = RequestStatus.DECODING
            self.decoding = np.append(self.decoding, new)
            yield new


def _behind(numbers: np.ndarray, more: list[int]) -> np.ndarray:
    return np.concatenate([numbers, np.array(more, np.int64)]) if more else numbers
