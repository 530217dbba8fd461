"""Which rows of a padded batch are computed, and where they stand one behind another."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accel_kernels.attention.math_attention import math_attention
from accel_kernels.attention.packed.packed_rows import ALL, NONE, PackedRows, packed_rows
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import warming_up
from torch import nn

from accel.encoders.inputs import Inputs, random_mask, tensors_of
from accel.errors import Unfit, reason_of
from accel.in_flight import listening
from accel.llm.recording.position_table import within_tables
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.resting import resting
from accel.patching.fast_forward import as_written

EMPTY = "a sequence that is all padding"
SIXTEEN = 16  # steps between two powers of two, and the least step


class Packing(NamedTuple):
    """The tokens of B sequences of L tokens, without those of padding that nobody sees, one sequence behind another.

    In each come first the tokens that others attend to, then those of padding. starts: (sequences + 1,) int32; keys:
    (sequences,) int32, how many come first, None for all; longest: of these lengths, or more. size: T, with tokens that
    fill the call up. rows: (T,), which of the B * L rows each token is; None for all in order, and zeros behind them.
    places: (B * L,), which of the T each row is. padding: (sequences,) int32, how many rows of padding the one behind
    the keys stands for, where they see all alike. unseen: (B * L, 1), the rows that are not computed, in whose place
    there are zeros; None for none. mirrored: each sequence stands from its last token to its first.
    """

    starts: torch.Tensor
    keys: torch.Tensor | None
    longest: int
    size: int
    rows: torch.Tensor | None = None
    places: torch.Tensor | None = None
    unseen: torch.Tensor | None = None
    mirrored: bool = False
    padding: torch.Tensor | None = None

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) -> (T, ...)."""
        flat = x.flatten(0, 1)
        if self.rows is not None:
            return flat[self.rows]
        more = self.size - len(flat)
        return F.pad(flat, (0, 0) * (flat.dim() - 1) + (0, more)) if more else flat

    def unpack(self, y: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """(T, ...) -> (batch, length, ...)."""
        y = y[: batch * length] if self.places is None else y[self.places]
        if self.unseen is not None:
            y = y.masked_fill_(self.unseen, 0.0)
        return y.unflatten(0, (batch, length))


def unpadded(x: torch.Tensor, graph: bool = False) -> Packing:
    """Of x, (B, L, C), without padding. graph: in one of the sizes that graphs have, see `padded`."""
    batch, length = x.shape[:2]
    tokens = batch * length
    starts = torch.arange(batch + 1 + _idle(batch, graph), dtype=torch.int32, device=x.device).mul_(length)
    return Packing(starts.clamp_(max=tokens), None, _longest(length, graph), bucket(tokens) if graph else tokens)


def packed(parts: Any, x: torch.Tensor, graph: bool = False) -> Packing:
    """Of x, (1, T, C), one row of sequences. parts: where they begin, (sequences + 1,) int, T at the end; or a mask
    that shows each itself alone, see `blocks_of`. Raises Unfit for anything else.
    """
    if isinstance(parts, torch.Tensor) and parts.dim() == 4:
        parts = blocks_of(parts)
    if not isinstance(parts, torch.Tensor) or parts.dim() != 1 or x.shape[0] != 1:
        raise Unfit("nothing says where the sequences begin that lie in one row")
    tokens = x.shape[1]
    starts = F.pad(parts.to(x.device, torch.int32), (0, _idle(len(parts) - 1, graph)), value=tokens)
    return Packing(starts, None, _longest(tokens, graph), bucket(tokens) if graph else tokens)


def blocks_of(mask: torch.Tensor) -> torch.Tensor | None:
    """Where the blocks begin on the diagonal of a mask that is added to scores, (1, 1, T, T), and T: int64; None where
    it is another mask. Waits for the GPU.
    """
    if mask.shape[:2] != (1, 1) or mask.shape[2] != mask.shape[3] or not mask.is_floating_point():
        return None
    seen, tokens = mask[0, 0] == 0, mask.shape[2]
    first, places = seen.byte().argmax(1), torch.arange(tokens, device=mask.device)
    inside = first == first[:, None]
    known = ((seen == inside) & (seen | (mask[0, 0] <= torch.finfo(mask.dtype).min))).all()
    begins = first == places
    count, fits = torch.stack([begins.sum(), known]).tolist()
    return F.pad(torch.where(begins, places, tokens).sort()[0][:count], (0, 1), value=tokens) if fits else None


class Sight(NamedTuple):
    """What layers tell tokens by. distances: how far apart they are. places: where they stand; without, rows of padding
    that are given the same are the same. causal: none sees what is behind it, so that padding on the left sees nothing.
    mirrored: padding on the left is as it is in stock where a sequence is turned round. alike: a mask hides all from
    rows of padding, to which then all, rows of padding too, are alike.
    """

    distances: bool
    places: bool
    causal: bool
    mirrored: bool
    alike: bool = False


class PaddedRows(NamedTuple):
    """Of a padded batch, which the GPU looks at while the host goes on. facts: of `found`, on their way to the host;
    there: when they have come, None for at once. asked: whether rows of padding are told apart by what they hold.
    """

    found: PackedRows
    facts: torch.Tensor
    there: torch.cuda.Event | None
    sight: Sight
    graph: bool
    asked: bool

    @property
    def largest(self) -> Packing:
        """With room for all rows, of which the packing has the first ones."""
        found = self.found
        return Packing(found.starts, found.keys, 0, len(found.rows), found.rows, found.places)

    def packing(self, x: torch.Tensor) -> Packing:
        """Of x, (B, L, C). Waits for the GPU. Raises Unfit for a sequence without tokens, which each attention of
        torch's treats in a way of its own. It does so too where layers attend by distances and padding is neither on
        the right of all nor on the left. And where rows of padding differ to which all are alike.
        """
        if self.there is not None:
            self.there.synchronize()
        total, most, least, shorter, ordered, mirrored, computed = self.facts.tolist()
        found, sight = self.found, self.sight
        if not shorter:
            return unpadded(x, self.graph)
        if not least:
            raise Unfit(EMPTY)
        turned = bool(sight.distances and not ordered)
        if turned and not (mirrored and sight.mirrored):
            raise Unfit("padding on no one side, and attention by distances")
        if sight.alike and computed == ALL:
            raise Unfit("rows of padding that differ, and see each other")
        longest, size = _longest(most, self.graph), bucket(total)
        padding = found.padding if sight.alike and computed != NONE else None
        unseen = found.unseen if computed == NONE else None
        return Packing(
            found.starts, found.keys, longest, size, found.rows[:size], found.places, unseen, turned, padding
        )

    @property
    def differ(self) -> bool:
        """Whether rows of padding were told apart, and differ. Of one whose packing is known."""
        *_, shorter, _, _, computed = self.facts.tolist()
        return self.asked and bool(shorter) and computed == ALL


def padded(
    x: torch.Tensor | None,
    mask: torch.Tensor,
    hidden: bool,
    sight: Sight,
    graph: bool = False,
    plain: torch.Tensor | None = None,
) -> PaddedRows:
    """Of x, (B, L, C), of which the mask, (B, L) bool, shows the tokens that others attend to. Does not wait.

    hidden: nobody sees rows of padding, where it is on the right, and `plain`, () bool, says so too. graph: with as
    many sequences, and as long ones, as the graph that serves all up to there. x: None where rows of padding differ.
    """
    unknown = reads_positions(hidden, sight)
    find: Any = packed_rows.reference if warming_up() else packed_rows  # kernels compute nothing then: no places
    found = find(
        mask.contiguous(),
        None if unknown else x,
        plain,
        size=bucket(mask.numel()),
        idle=_idle(len(mask), graph),
        hidden=hidden,
        placed=sight.places,
        turns=sight.distances,
    )
    facts, there = found.facts.to("cpu", non_blocking=found.facts.is_cuda), None
    if found.facts.is_cuda:
        there = torch.cuda.Event()
        there.record(torch.cuda.current_stream(found.facts.device))  # which need not be the current device's
    return PaddedRows(found, facts, there, sight, graph, not unknown and x is not None)


def reads_positions(hidden: bool, sight: Sight) -> bool:
    """Whether it does not matter if rows of padding are given the same."""
    return (sight.places or (hidden and not sight.alike)) and not sight.causal


def _idle(batch: int, graph: bool) -> int:
    return power_of_two(batch) - batch if graph else 0


def _longest(length: int, graph: bool) -> int:
    return max(SIXTEEN, power_of_two(length)) if graph else length


def bucket(tokens: int) -> int:
    """As many tokens or a few more: one of sixteen numbers between two powers of two."""
    step = max(SIXTEEN, (1 << tokens.bit_length()) // (2 * SIXTEEN))
    return -(-tokens // step) * step


def ignores_padding(root: nn.Module, part: nn.Module, inputs: Inputs, example: dict[str, Any]) -> bool:
    """Whether what the root gives of padded inputs is the same to the bit, whatever a part of it gives in rows of
    padding behind them.

    part: an encoder, or the last of its layers.
    """
    given = example | {inputs.mask: random_mask(inputs, example)}
    shown = inputs.shown(given[inputs.mask])
    assert shown is not None
    hidden = shown.bool().logical_not().flatten(1)
    generator = torch.Generator().manual_seed(0)

    def changed_in(one: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(one.shape, generator=generator, device="cpu").to(one)
        return torch.where(hidden[..., None], noise, one)

    def other(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return changed_in(output)
        tensors = ((name, one) for name, one in output.items() if isinstance(one, torch.Tensor))
        if not (found := {name: one for name, one in tensors if one.shape[:2] == hidden.shape}):
            raise NotUnderstood("rows within rows")
        for name, one in found.items():
            output[name] = changed_in(one)
        return output

    for call in (given, {name: one[:, None] for name, one in given.items()}):  # the latter for one of several choices
        try:
            with resting(root), math_attention(), as_written(), within_tables():
                plain = tensors_of(type(root).forward(root, **call))
                with listening([(part, other)]):
                    changed = [tensors_of(type(root).forward(root, **call)) for _ in range(2)]
        except Exception as error:  # a head that takes other inputs
            reason_of(error)
        else:
            return bool(plain) and all(torch.equal(one, now[name]) for now in changed for name, one in plain.items())
    return False
