"""Causal convolution of each channel with its own few taps, behind a window of the inputs that came before.

Before linear attention (Mamba: Gu and Dao 2023), or between two gates as a layer of its own (LFM2).
"""

import torch

from accel_kernels.attention.paged.kv import HALF, LENGTH, metadata_of
from accel_kernels.norm.norm import ACTIVATIONS
from accel_kernels.op import dtype_reason, make_op, random_cases
from accel_kernels.recurrent.recurrence import RowStates, Sequences, wide


def reference(x, weight, window, sequences, *, bias=None, activation=None, before=None, after=None):
    """x: (B, T, C); weight: (C, taps), its last tap for the newest input; bias: (C,). Gives (B, T, C).

    window: (slots, taps, C), the last inputs: that of position p lies at p % taps. It is written. sequences: a
    `Sequences`, or what `RowStates.sequences` gives.
    before, after: (B, T, C), by which the input and the result are multiplied. Rounded to the weight's dtype after the
    convolution and after the activation, a name of ACTIVATIONS or None.
    """
    tokens, channels = x.shape[1:]
    kind, taps = wide(x.dtype), weight.shape[1]
    x = x if before is None else x * before
    flat = x.reshape(-1, channels)
    out = torch.zeros_like(flat)
    read, written = sequences.pools(window, sequences.other_window)
    for begin, end, slot, position, first, into in sequences.each(tokens):
        places = torch.arange(position - taps + 1, position, device=x.device)
        past = torch.where(places[:, None] < first, 0, read[slot, places % taps])
        row = torch.cat((past, flat[begin:end])).to(kind)
        y = sum(row[tap : tap + end - begin] * weight[:, tap].to(kind) for tap in range(taps))
        y = (y if bias is None else y + bias.to(kind)).to(weight.dtype)
        y = y if activation is None else ACTIVATIONS[activation](y.to(kind)).to(weight.dtype)
        out[begin:end] = y if after is None else y.to(out.dtype) * after.flatten(0, 1)[begin:end]
        newest = torch.arange(max(end - begin - taps, 0), end - begin, device=x.device)
        written[into] = read[slot]
        written[into, (position + newest) % taps] = flat[begin:end][newest]
    return out.view(x.shape)


def supports(x, weight, window, sequences, *, bias=None, activation=None, before=None, after=None) -> str | None:
    if x.numel() == 0:
        return "empty"
    if activation is not None and activation not in ACTIVATIONS:
        return f"activation {activation!r}"
    if weight.shape[1] > 8:
        return f"{weight.shape[1]} taps, more than 8"
    if not window.is_contiguous() or window.dtype != x.dtype:
        return "a window that is not contiguous or of another dtype"
    for name, tensor in (("x", x), ("before", before), ("after", after)):
        if tensor is not None and (tensor.stride(-1) != 1 or tensor.shape != x.shape):
            return f"{name}: channels not next to each other, or of another shape"
    return dtype_reason(x, weight, window, bias, before, after)


def some_sequences(rand, rows, positions, spans=None, longest=None, idle=(), apart=None):
    """Sequences in slots of a pool of rows + 2, the last one first.

    apart: state and window, pools of 2 * rows + 2, found by metadata: each sequence is written into another slot.
    """

    def numbers(values):
        return torch.tensor(values, device=rand.device)

    slots = [-1 if n in idle else rows - n for n in range(rows)]
    spans, metadata = None if spans is None else numbers(spans), None
    if apart is not None:
        slots = [(slot, slot + rows) for slot in slots]
        metadata = metadata_of(0, [(None, None, None), (None, *apart, *apart)], rand.device)
    return Sequences(numbers(slots), numbers(positions), spans, longest, metadata, 1)


def some_rows(rand, stored, state, window, firsts=None, last=None):
    """The rows of these pools as sequences after `stored` tokens, the second layer in metadata.

    firsts: a list, tokens of padding before each row's first one. What is older than that one becomes NaN. What is
    stored lies in the second half after an odd number of tokens; the other half is NaN.
    """
    rows = (window if state is None else state).shape[0]
    for row, first in enumerate(firsts or [0] * rows):
        if state is not None and stored <= first:
            state[row] = float("nan")
        taps = 0 if window is None else window.shape[1]
        for at in range(stored - taps, min(first, stored)):
            window[row, at % taps] = float("nan")
    others = [None if one is None else one.clone() for one in (state, window)]
    for unread in (state, window) if stored % 2 else others:
        if unread is not None:
            unread.fill_(float("nan"))
    padded = firsts is not None
    firsts = torch.tensor(firsts, device=rand.device) if padded else None
    metadata = metadata_of(0, [(None, None, None), (None, state, window, *others)], rand.device, firsts)
    metadata[LENGTH], metadata[HALF] = stored, stored % 2
    last = None if last is None else torch.tensor([last], device=rand.device)
    return RowStates(state, window, metadata, 1, False, last, padded, firsts, *others).sequences()


@random_cases
def _case(rand, batch, tokens, channels, taps, positions, *, spans=None, longest=None, bias=False, gates=False,
          activation=None, idle=(), stored=None, apart=False, **rows):  # fmt: skip
    """stored: tokens in a store whose rows are the sequences, see `some_rows`."""
    count = len(positions) if stored is None else batch - 2
    x, *factors = rand(batch, tokens, 3 * channels).chunk(3, dim=-1)
    weight, window = (
        rand(taps, channels, spread=0.5).t() if taps == 4 else rand(channels, taps, spread=0.5),
        rand(count * (1 + apart) + 2, taps, channels),
    )
    more = {"bias": rand(channels) if bias else None, "activation": activation}
    if gates:
        more |= {"before": factors[0], "after": factors[1]}
    if stored is None:
        sequences = some_sequences(rand, count, positions, spans, longest, idle, (None, window) if apart else None)
    else:
        sequences = some_rows(rand, stored, None, window, **rows)
    return (x, weight, window, sequences), more


CASES = (
    _case("odd", 2, 21, 37, 4, [0, 9], activation="silu", bias=True, small=True),
    _case("short", 3, 2, 20, 4, [0, 1, 3], small=True),
    _case("step", 3, 1, 40, 3, [7, 0, 5], gates=True, idle=(2,), small=True),
    _case("gates", 2, 33, 24, 3, [5, 0], gates=True, bias=True, small=True),
    _case("packed", 1, 60, 16, 2, [0, 8, 3], spans=[(2, 19), (19, 19), (30, 57)], activation="silu", small=True),
    _case("apart", 1, 60, 16, 4, [0, 8, 3], spans=[(2, 19), (19, 20), (30, 57)], apart=True, small=True),
    _case("padded", 2, 40, 16, 4, [0, 0], spans=[(7, 40), (40, 70)], activation="silu", idle=(), small=True),
    _case("row-step", 3, 1, 40, 4, [], gates=True, bias=True, stored=2, firsts=[1, 2, 3], small=True),
    _case("rows", 2, 35, 20, 4, [], activation="silu", stored=0, small=True),
    _case("rows-go-on", 3, 35, 20, 4, [], gates=True, stored=3, firsts=[0, 2, 38], last=30, small=True),
    _case("rows-padded", 3, 40, 20, 3, [], activation="silu", stored=0, firsts=[39, 0, 12], last=36, small=True),
    _case("qwen3-next-2048", 1, 2048, 8192, 4, [0], activation="silu"),
    _case("mamba2-2048", 2, 2048, 5376, 4, [0, 9], activation="silu", bias=True),
    _case("lfm2-2048", 1, 2048, 2048, 3, [0], gates=True),
    _case("lfm2-step", 1, 1, 2048, 3, [700], gates=True),
    _case("lfm2-steps", 32, 1, 2048, 3, list(range(32)), gates=True),
)

causal_convolution = make_op("causal_convolution", reference, supports, CASES, changes=True)
