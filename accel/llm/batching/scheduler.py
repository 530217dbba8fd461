"""Which requests take part in the next step: first come, first served, prompts in chunks beside those that go on.

A step has a budget of new tokens. Requests that already have their first token come first, one token each; what is left
goes to prompts, the longest waiting first (chunked prefill: Agrawal et al., 2023, "SARATHI"). Where blocks run out, the
request that came last gives its own back and waits; what it had computed is computed again, or found by its hash.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from accel.libraries.batching import RequestStatus
from accel.llm.batching.answers import Answers
from accel.llm.batching.limits import Limits
from accel.llm.batching.request import Request
from accel.llm.kv_cache.block_allocator import BlockAllocator
from accel.llm.kv_cache.shape import BLOCK

UNBOUNDED = 2**62
NOWHERE = -1  # in place of a micro-batch
LATEST = -1  # in place of a token: the last one that was drawn for its row, which the host may not know yet


class Chunk(NamedTuple):
    """Tokens of a row's prompt from `start` on. last: there are no more."""

    row: int
    start: int
    tokens: list[int]
    last: bool


class IdsWanted(Exception):
    """The tokens of all launched steps have to be read before the next step can be planned."""


@dataclass
class StepPlan:
    """One step: decodes, which get one new token each, then chunks of prompts.

    rows, lengths, news: (sequences,) int64, the row of each, tokens stored before, new tokens. tokens: (tokens,) int64
    of all sequences in turn, LATEST for those of decodes. sources, drawn, serials: (n,) int64, the sequences whose last
    token is followed by a draw, the row it is drawn for, and which occupant of the row that is. copies: blocks to copy
    once the step is launched. opened: rows whose requests are new. micro_batch: the group of requests that it is of.
    """

    rows: np.ndarray
    lengths: np.ndarray
    news: np.ndarray
    decodes: int
    tokens: np.ndarray
    sources: np.ndarray
    drawn: np.ndarray
    serials: np.ndarray
    copies: list[tuple[int, int]]
    opened: list[int]
    micro_batch: int = 0


class Scheduler:
    """The requests of one engine, those that wait and those that have a row. For one thread.

    micro_batches: into how many groups those with a row are divided. A step is of one group, and groups take turns. A
    request goes to a group that has less than its share, and stays there.

    stored: (rows,) int64, tokens of each row that are stored once all steps planned have run. left: (rows,), tokens
    that are still to be drawn for it. serial: (rows,), counted up whenever a row changes hands.
    """

    def __init__(self, allocator: BlockAllocator, answers: Answers, limits: Limits, micro_batches: int = 1):
        self.allocator, self.answers, self.limits, self.micro_batches = allocator, answers, limits, micro_batches
        self.waiting: deque[Request] = deque()
        self.stored, self.left, self.serial, self.arrived = (np.zeros(limits.rows, np.int64) for _ in range(4))
        self.micro_batch = np.full(limits.rows, NOWHERE)  # the group of each row
        self.decoding = np.empty(0, np.int64)  # rows in the order of their arrival
        self.prefilling: dict[int, list[int]] = {}  # row to all tokens that it begins with; in the order of arrival
        self.idle = list(range(limits.rows - 1, -1, -1))
        self.failed: list[tuple[Request, str]] = []
        self.preempted = 0
        self._opened: list[int] = []  # rows that were taken since the last plan
        self._arrivals = self._turn = 0
        self._blocked: tuple[Request, int] | None = None  # who waits for blocks, and how many were free then

    @property
    def running(self) -> list[int]:
        """Rows of requests, in the order of their arrival."""
        rows = [row for row, request in enumerate(self.answers.requests) if request is not None]
        return sorted(rows, key=lambda row: self.arrived[row])

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or len(self.idle) < self.limits.rows

    def plan(self, unread: bool) -> StepPlan | None:
        """The next step, None where nobody can take part. unread: whether ids of steps before are not known yet.

        Requests that can never run are put into `failed`. Raises IdsWanted where somebody has to make room first.
        """
        self._slide()
        while True:
            for _ in range(self.micro_batches):
                micro_batch, self._turn = self._turn, (self._turn + 1) % self.micro_batches
                decodes = self._decodes(micro_batch, unread)
                chunks = list(self._chunks(micro_batch, self.limits.tokens - len(decodes)))
                if len(decodes) or chunks:
                    return self._step(micro_batch, decodes, chunks)
            if not self.prefilling or not self._make_room(unread):
                return None

    def room(self, request: Request) -> int:
        """Tokens that its answer may come to."""
        return self.limits.context - len(request.prompt) + 1

    def close(self, row: int, keep: bool) -> Request:
        """The request leaves its row. keep: others may find what it has stored."""
        request = self.answers.requests[row]
        assert request is not None
        if keep:
            tokens = request.prompt + self.answers.known(row).tolist()
            self.allocator.commit(row, tokens[: min(len(tokens) - 1, int(self.stored[row]))])
        self.answers.close(row)
        self.allocator.close(row)
        self.prefilling.pop(row, None)
        self.decoding = self.decoding[self.decoding != row]
        self.serial[row] += 1
        self.left[row], self.micro_batch[row] = 0, NOWHERE
        self.idle.append(row)
        return request

    def put_back(self, row: int, keep: bool) -> None:
        """Preempts a row: its request waits again, before all others, and its tokens are read anew."""
        request = self.close(row, keep)
        request.status = RequestStatus.PENDING
        self.waiting.appendleft(request)
        self.preempted += 1

    def undo(self, plan: StepPlan) -> None:
        """The step just planned was not launched: its keys and values do not exist, and no request may find them.

        After its prompts are closed.
        """
        self.allocator.forget()
        self.stored[plan.rows] = plan.lengths
        self.left[plan.rows[: plan.decodes]] += 1

    def _slide(self) -> None:
        """Gives back blocks that windows have passed. Only before a plan: a step reads the tables after its plan."""
        if self.allocator.sliding.size:
            rows = _behind(self.decoding, list(self.prefilling))
            self.allocator.slide_all(rows, self.stored[rows])

    def _decodes(self, micro_batch: int, unread: bool) -> np.ndarray:
        """Rows that get one more token, and have the block for it."""
        rows = self._open_ended(micro_batch)
        while (fit := self.allocator.extend_all(rows, self.stored[rows] + 1)) < len(rows):
            if not self._make_room(unread):
                return rows[:fit]
            rows = self._open_ended(micro_batch)
        return rows

    def _open_ended(self, micro_batch: int) -> np.ndarray:
        return self.decoding[(self.left[self.decoding] > 0) & (self.micro_batch[self.decoding] == micro_batch)]

    def _make_room(self, unread: bool) -> bool:
        """Preempts the request that came last; the only one fails. Whether any request is left."""
        if unread:
            raise IdsWanted
        *others, last = self.running
        if others:
            self.put_back(last, keep=True)
            return True
        stored = int(self.stored[last])
        request = self.close(last, keep=False)
        self.failed.append((request, f"{stored} tokens fill all {self.allocator.blocks - 1} blocks that there are"))
        return False

    def _chunks(self, micro_batch: int, budget: int) -> Iterator[Chunk]:
        """Of prompts, until the budget or the blocks are used up."""
        for row, tokens in [
            (row, tokens) for row, tokens in self.prefilling.items() if self.micro_batch[row] == micro_batch
        ]:
            end = self._end(row, len(tokens), budget)
            if end <= self.stored[row]:
                return
            budget -= end - int(self.stored[row])
            yield self._advance(row, tokens, end)
        while budget > 0 and self.waiting and self.idle and self._has_room(micro_batch):
            new = self._open(micro_batch)
            if new is None:
                return
            tokens = self.prefilling[new]
            end = self._end(new, len(tokens), budget)
            if end <= self.stored[new]:
                return
            budget -= end - int(self.stored[new])
            yield self._advance(new, tokens, end)

    def _end(self, row: int, tokens: int, budget: int) -> int:
        """How far the row's prompt can be read now; its blocks are there."""
        stored, sets = int(self.stored[row]), len(self.allocator.sets)
        reach = int(self.allocator.held[row] + self.allocator.free // sets) * BLOCK
        end = min(tokens, stored + budget, reach)
        return end if end > stored and self.allocator.extend(row, end) else stored

    def _advance(self, row: int, tokens: list[int], end: int) -> Chunk:
        """The row's prompt is read up to here."""
        start, self.stored[row] = int(self.stored[row]), end
        if end // BLOCK > self.allocator.committed[row]:
            self.allocator.commit(row, tokens[:end])
        if end == len(tokens):
            del self.prefilling[row]
            self.decoding = np.append(self.decoding, row)
            self.left[row] -= 1
        return Chunk(row, start, tokens[start:end], end == len(tokens))

    def _has_room(self, micro_batch: int) -> bool:
        """Whether the group has less than its share of those that run and wait."""
        running = self.limits.rows - len(self.idle)
        share = -(-min(running + len(self.waiting), self.limits.rows) // self.micro_batches)
        return self.micro_batches == 1 or int((self.micro_batch == micro_batch).sum()) < share

    def _open(self, micro_batch: int) -> int | None:
        """The request that has waited longest takes a row in this group, if there are blocks for its tokens."""
        request, running = self.waiting[0], self.limits.rows - len(self.idle)
        if running and self._blocked is not None:
            who, free = self._blocked
            if who is request and self.allocator.free <= free:
                return None
        tokens = request.prompt + request.tokens
        row = self.idle[-1]
        found = self.allocator.open(row, tokens)
        # One more block for each that runs: else they would preempt each other at once.
        wanted = (len(tokens) // BLOCK + 1 - found // BLOCK) * len(self.allocator.sets) + running
        if running and self.allocator.free < wanted:
            self.allocator.close(row)
            self._blocked = request, self.allocator.free
            return None
        self.waiting.popleft()
        self.idle.pop()
        self._take(row, request, micro_batch)
        self.stored[row] = found
        self.prefilling[row] = tokens
        self._opened.append(row)
        return row

    def _take(self, row: int, request: Request, micro_batch: int) -> None:
        """The request has this row, in this group, from now on."""
        self.micro_batch[row] = micro_batch
        most = min(UNBOUNDED if request.max_new_tokens is None else request.max_new_tokens, self.room(request))
        self.answers.open(row, request, most)
        self.left[row] = most - len(request.tokens)
        self._arrivals += 1
        self.arrived[row] = self._arrivals
        request.status = RequestStatus.PREFILLING
        if request.started < 0:
            request.started = time.perf_counter()

    def _step(self, micro_batch: int, decodes: np.ndarray, chunks: list[Chunk]) -> StepPlan:
        rows = _behind(decodes, [chunk.row for chunk in chunks])
        lengths = _behind(self.stored[decodes], [chunk.start for chunk in chunks])
        news = _behind(np.ones_like(decodes), [len(chunk.tokens) for chunk in chunks])
        tokens = _behind(np.full_like(decodes, LATEST), [token for chunk in chunks for token in chunk.tokens])
        sources, drawn = list(range(len(decodes))), decodes.tolist()
        copies: list[tuple[int, int]] = []
        for place, chunk in enumerate(chunks, len(decodes)):
            request = self.answers.requests[chunk.row]
            assert request is not None
            if chunk.last:
                request.status = RequestStatus.DECODING
                children = list(self._children(chunk.row, request, int(self.stored[chunk.row]), copies))
                self._opened += children
                drawn += [chunk.row, *children]
                sources += [place] * (1 + len(children))
        self.stored[decodes] += 1
        self.left[decodes] -= 1
        takers = np.array(drawn, np.int64)
        opened = [row for row in dict.fromkeys(self._opened) if self.answers.requests[row] is not None]
        self._opened.clear()
        return StepPlan(
            rows, lengths, news, len(decodes), tokens, np.array(sources, np.int64), takers, self.serial[takers],
            copies, opened, micro_batch,
        )  # fmt: skip

    def _children(self, row: int, request: Request, length: int, copies: list[tuple[int, int]]) -> Iterator[int]:
        """Rows of further answers to the same prompt, which share its keys and values; without room they wait first."""
        children, request.children = request.further(), 0
        for place, child in enumerate(children):
            pairs = self.allocator.fork(row, self.idle[-1], length) if self.idle else None
            if pairs is None:
                self.waiting.extendleft(reversed(children[place:]))
                return
            copies += pairs
            new = self.idle.pop()
            self._take(new, child, int(self.micro_batch[row]))
            child.status = RequestStatus.DECODING
            self.stored[new] = length
            self.left[new] -= 1
            self.decoding = np.append(self.decoding, new)
            yield new


def _behind(numbers: np.ndarray, more: list[int]) -> np.ndarray:
    return np.concatenate([numbers, np.array(more, np.int64)]) if more else numbers


def sequence_starts(news: Sequence[int] | np.ndarray) -> np.ndarray:
    """The place at which the new tokens of each sequence begin, and behind the last: (sequences + 1,) int64."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(news, dtype=np.int64)])
