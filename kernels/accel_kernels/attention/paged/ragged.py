"""Sequences of different lengths in one call of the attention: their new tokens stand one behind another in one row."""

from typing import NamedTuple

import torch


class Pointers(NamedTuple):
    """The tensors of a `Ragged`, as kernels take them."""

    starts: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor
    token_sequences: torch.Tensor
    counts: torch.Tensor


class RaggedStates(NamedTuple):
    """Which states the sequences of a `Ragged` have, where layers keep some. All int32, contiguous.

    First come the places of decodes, then, as the last ones, those of prefills; in between there may be idle ones.
    slots: (places, 2), the rows of the pools that a sequence reads and writes, negative for none.
    positions: (places,), tokens stored before. spans: (places, 2), first token and the one behind the last.
    prompts: (places,), of prefills, how many tokens their prompts have. Those behind are of answers, computed again.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    spans: torch.Tensor
    prompts: torch.Tensor


class Ragged(NamedTuple):
    """The sequences of one call with queries (1, tokens, heads, D). All tensors are int32, on the device of the store.

    Decodes come first: sequences with one new token each, so that token i is that of sequence i. Prefills follow, with
    one new token or more. What changes from call to call is in tensors: a CUDA graph of one call serves all of as many
    tokens.

    starts: (sequences + 1,), the token that each sequence begins with. From the number of sequences in use on: the
        number of tokens in use. lengths: (sequences,), the tokens that each has stored before the call.
    rows: (sequences,), the row of the block table that each has. A row of no sequence may be named for sequences that
        are not in use.
    token_sequences: (tokens,), the sequence of each token; -1 for tokens behind those in use, which fill the call up:
        nothing is stored for them, and zeros come out.
    counts: (2,), how many sequences are decodes, and how many are in use.
    most_decodes, most_prefills: bounds of the two kinds, by which kernels are launched.
    states: None where no layer keeps any.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor
    token_sequences: torch.Tensor
    counts: torch.Tensor
    most_decodes: int
    most_prefills: int
    states: RaggedStates | None = None

    def pointers(self) -> Pointers:
        return Pointers(*self[:5])

    def sequences(self) -> list[tuple[int, int, int, int]]:
        """(first token, token behind the last, tokens stored, row) of each in use; waits for the GPU."""
        count = int(self.counts[1])
        starts, lengths, rows = (t.tolist() for t in (self.starts[: count + 1], self.lengths, self.rows))
        return list(zip(starts, starts[1:], lengths, rows, strict=False))
