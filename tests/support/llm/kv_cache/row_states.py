"""Layers that keep states, and a forward over a store of them."""

import torch

from accel.llm.kv_cache.shape import Shape, StateShape
from accel.llm.kv_cache.store import Store
from support.llm.kv_cache import cache_pairs
from support.llm.kv_cache.cache_pairs import LATENT
from support.llm.kv_cache.row_lists import CPU, OTHER

BOTH = StateShape((2, 3, 5), (4, 10), torch.bfloat16, CPU)
WINDOW = StateShape(None, (3, 6), torch.float32, CPU)
MATRIX = StateShape((7, 3), None, torch.float32, CPU)
KEYS = Shape(2, 4, torch.float32, CPU)
KINDS = {
    "mixed": (BOTH, KEYS, WINDOW, BOTH),
    "latents": (BOTH, LATENT, WINDOW),
    "int8": (WINDOW, KEYS._replace(kv_dtype=torch.int8), BOTH),
    "windows": (WINDOW, WINDOW),
    "states": (BOTH, WINDOW, BOTH),
    "matrix": (MATRIX,),
    "pairs": (KEYS, KEYS, BOTH._replace(beside=2), BOTH._replace(beside=2)),
    "one pair": (WINDOW, KEYS, KEYS.nothing, BOTH._replace(beside=2)),
    "devices": (MATRIX, KEYS, WINDOW._replace(device=OTHER)),
}


def fresh(shapes, rows: int, tokens: int) -> list:
    """One a layer: keys and values, or inputs (rows, channels, tokens) and the state after them."""
    return [
        cache_pairs.fresh(rows, tokens, [one])[0]
        if not isinstance(one, StateShape)
        else (
            one.window and torch.randn(rows, one.window[1], tokens).to(one.dtype),
            one.state and torch.randn(rows, *one.state),
        )
        for one in shapes
    ]


def forward(store: Store, tokens: int, new: list | None = None) -> list:
    """As the fused layers do, and not yet counted: what is read is left as it was."""
    rows, start = store.rows, store.length
    new = fresh(store.shapes, rows, tokens) if new is None else new
    kvs = store.kvs(range(len(new)), rows * tokens, is_prefill=start == 0, last=None, by_address=False)
    for kv, (first, second) in zip(kvs.values(), new, strict=True):
        if not isinstance(store.shapes[kv.layer], StateShape):
            kv.write(start, *store.shapes[kv.layer].stored(first.transpose(1, 2), second.transpose(1, 2)))
            continue
        assert kv.is_prefill == (start == 0) and kv.padded == (store.padding_mask is not None)
        sequences = kv.sequences()
        (state, state_after), (window, window_after) = (
            sequences.pools(one, other) for one, other in ((kv.state, kv.other_state), (kv.window, kv.other_window))
        )
        for begin, end, r, position, begun, _ in sequences.each(tokens):
            if first is not None:
                window_after[r] = window[r]
                for t in range(begin - r * tokens, end - r * tokens):
                    window_after[r, (start + t) % window.shape[1]] = first[r, :, t]
            if second is not None:
                state_after[r] = state[r] / 2 + second[r] if position > begun else second[r]
    return new


def write(store: Store, tokens: int, new: list | None = None) -> list:
    """A forward over what `reserve` has made room for."""
    new = forward(store, tokens, new)
    store.advance(tokens)
    return new


def states_in(store: Store) -> dict:
    """What each layer of states keeps."""
    return {layer: store.read_state(layer) for layer, one in enumerate(store.shapes) if isinstance(one, StateShape)}


def same_states(store: Store, kept: dict, index: list | slice = slice(None)) -> None:
    """Those of rows index of what was kept."""
    for layer, several in states_in(store).items():
        for a, b in zip(several, kept[layer], strict=True):
            assert a is b is None or torch.equal(a, b[index])


def poisoned(store: Store) -> None:
    """What nobody has written is not read."""
    for several in store.blocks.by_states.values():
        for tensor in several:
            if tensor is not None:
                tensor.fill_(torch.nan)
