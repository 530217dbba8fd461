"""One step more of a generate() call whose arguments nobody makes: they follow from the forward before."""

from functools import partial
from typing import Any

import torch

from accel.cuda_graphs.fingerprint import Fingerprint
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.graph_sizes import by_graph
from accel.llm.kv_cache.pending_step import LatestForward
from accel.llm.kv_cache.store import Store
from accel.llm.pipeline.stretch import StretchGraphs


def next_logits(
    forward: DecoderForward,
    store: Store,
    tokens: torch.Tensor,
    positions: torch.Tensor | None,
    keep: int,
    trusted: bool,
) -> torch.Tensor:
    """The logits of one token a row more, (rows, 1, vocabulary), stored like any other.

    tokens: (rows, 1). positions: one further than before. The mask goes on with a 1: what it says of the tokens before
    is in the store. keep: the same as before. trusted: the model is the one of the step before, whose graph is replayed
    without another look. Raises Unfit.
    """
    rows = tokens.shape[0]
    store.reserve(rows, store.length + 1)
    eager, arguments = partial(forward.eager, store, False), (tokens, positions, store.metadata, keep)
    variant = ("mask",) if store.padding_mask is not None else ()
    if isinstance(forward.runner, StretchGraphs) and tokens.is_cuda and by_graph(rows, 1):
        logits: Any = forward.runner(eager, arguments, {}, variant, trusted=trusted)
    elif forward.runner is not None and tokens.is_cuda and by_graph(rows, 1):
        replayed = forward.runner.begin(arguments, {}, variant) if trusted else None
        logits = forward.runner(eager, arguments, {}, variant) if replayed is None else replayed.outputs
    else:
        logits = eager(*arguments)
    store.advance(1)
    store.latest = LatestForward(positions, keep)
    return logits


def fingerprint_of(forward: DecoderForward) -> Fingerprint | None:
    """The model as its graphs were made from it, or as its layers were bound to its weights where it has none."""
    graphs = None if forward.runner is None else forward.runner.fingerprint
    return forward.seen if graphs is None else graphs
