"""For which sizes of a call there are CUDA graphs. Short prompts are padded on the right to one of a few lengths.

Causal attention hides what stands behind a token, so padding changes nothing for the prompt itself. It repeats the last
token at the last position, which are valid wherever the prompt is. What it writes into the store lies beyond the stored
length, where a later token overwrites it before it is read. States are moved by the real tokens alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from accel_kernels.gemm.fused_linear import MOST_ROWS
from accel_kernels.gemm.quantized_weight import MOST_QUANTIZED_ROWS
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from accel.cuda_graphs.fingerprint import Fingerprint
from accel.cuda_graphs.runner import GraphRunner
from accel.errors import Unfit
from accel.llm.generation.layer_forward import LayerForward
from accel.llm.kv_cache.store import Store
from accel.llm.parts.step import Step

# Rows of one new token each, up to which a step is a CUDA graph. Launching a step takes Python 15 to 45 ms, longer than
# a GPU takes for so many rows of a model of 8 billion weights. A graph keeps its logits: 131 MB, of 512 rows of 128,256
# words in 16 bits.
MOST_STEP_ROWS = 512
# Tokens of all rows of a prompt. While Python launches a forward, a GPU reads 500 tokens of a model of 8 billion
# weights, 2000 where both factors have 8 bits, or several thousand of one of half a billion. A graph that gains nothing
# over that is not kept, and longer ones are not tried.
MOST_PROMPT = 4096
# Tokens of all rows from one length to the next: padding stays below 64 rows of each product, which costs little more
# than reading its weights; of more than FINE tokens, below 128. All lengths are 50 graphs for each number of rows.
STEP, FINE = 64, 2048


def by_graph(rows: int, new: int) -> bool:
    """Whether so many new tokens, behind stored ones, are worth a graph of their own.

    One token a row is a step of many alike. Several a row come in any number, and each number would be captured anew:
    of those only few, as of a draft to verify.
    """
    return rows * new <= MOST_ROWS or (new == 1 and rows <= MOST_STEP_ROWS)


def kernel_key_of(leaves: list) -> int:
    """Of a call of a graph, tokens first: all calls for which this is the same launch the same kernels, about.

    Products are compiled for rows by powers of two, and for all from 65 to MOST_QUANTIZED_ROWS.
    """
    rows, new = leaves[0].shape[:2]
    if rows * new <= MOST_ROWS:
        return 1 << (rows * new - 1).bit_length()
    return MOST_QUANTIZED_ROWS if rows * new <= MOST_QUANTIZED_ROWS else 2 * MOST_QUANTIZED_ROWS


def bucket_for(rows: int, new: int) -> int | None:
    """The length that prompts of `new` tokens a row are filled up to; None where they are too many for a graph."""
    if rows * new > MOST_PROMPT:
        return None
    most = MOST_ROWS // rows if rows * new <= MOST_ROWS else MOST_PROMPT  # of few rows products are others than of many
    step = max(1, (STEP if rows * new <= FINE else 2 * STEP) >> (rows - 1).bit_length())
    for short in (step // 4, step // 2):
        if new <= short:
            return min(short, most)
    return min(-(-new // step) * step, most)


def pad_to_bucket(
    tokens: torch.Tensor, positions: torch.Tensor | None, bucket: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """tokens: (rows, new) numbers or (rows, new, C) embeddings; positions: (1 or rows, new), or parts of that shape, or
    None of a model that takes none.

    Gives both with `bucket` tokens, and the place of the last real one, (1,) int64, without waiting for the GPU.
    """
    new = tokens.shape[1]
    last = torch.full((1,), new - 1, dtype=torch.int64, device=tokens.device)
    places = None if positions is None else _longer(positions, positions.dim() - 1, bucket)
    return _longer(tokens, 1, bucket), places, last


def _longer(t: torch.Tensor, dim: int, bucket: int) -> torch.Tensor:
    """t with its last slice along dim repeated until there are `bucket`."""
    if t.shape[dim] == bucket:
        return t.contiguous()
    end = t.narrow(dim, t.shape[dim] - 1, 1)
    return torch.cat((t, end.expand(*t.shape[:dim], bucket - t.shape[dim], *t.shape[dim + 1 :])), dim=dim)


class Prompts:
    """Reads short prompts of one model. runner: has graphs of its own, which never evict those of decode steps.

    most: tokens that a prompt may be padded to, of a model that counts positions itself and has so many.
    """

    def __init__(self, runner: GraphRunner, most: int | None = None):
        self.runner, self.most = runner, most
        # The model as it was, and how many tokens were too many for a graph to gain.
        self.missed: tuple[Fingerprint, int] | None = None
        self.stops: dict[frozenset[str], frozenset[int] | None] = {}  # of `PromptLayers`, None for none; by arguments

    def __getstate__(self) -> dict[str, Any]:
        return {"runner": self.runner, "most": self.most, "missed": None, "stops": {}}

    def forget(self) -> None:
        self.missed = None

    def bucket(self, module: PreTrainedModel, tokens: torch.Tensor, keep: int) -> int | None:
        """The length to pad to, or None for a prompt that is read as it is.

        Only where the last token's logits alone are wanted: every graph would keep all logits, and copy them.
        """
        if keep != 1 or not self.captures(tokens):
            return None
        rows, new = tokens.shape[:2]
        bucket = bucket_for(rows, new)
        if bucket is not None and self.missed is not None:
            fingerprint, least = self.missed
            if fingerprint is self.runner.fingerprint and rows * bucket >= least and fingerprint.holds():
                return None
        known = getattr(module.config.get_text_config(), "max_position_embeddings", None), self.most
        most = min((one for one in known if isinstance(one, int)), default=MOST_PROMPT)
        if bucket is None or bucket <= most:
            return bucket
        return most if new <= most else None  # no more tokens than the model may have tables for

    def layers(self, forward: Any, store: Store, tokens: torch.Tensor, names: frozenset[str]) -> "PromptLayers | None":
        """Of the layers of a `DecoderForward` for a call with these arguments; None where each runs by itself."""
        alone = not names or self.stops.get(names, ()) is None
        bucket = None if alone else self.bucket(forward.module, tokens, keep=1)
        return None if bucket is None else PromptLayers(self, forward, store, bucket, names)

    @staticmethod
    def captures(tokens: torch.Tensor) -> bool:
        return tokens.is_cuda and not torch.cuda.is_current_stream_capturing()

    def __call__(
        self,
        eager: Callable,
        plain: Callable,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        metadata: torch.Tensor,
        bucket: int,
        masked: bool,
    ) -> torch.Tensor:
        """Logits of the last real token, (rows, 1, vocabulary).

        eager(tokens, positions, metadata, last): the padded prompt; plain(): as it is, where there will be no graph.
        """
        without = []

        def without_graph() -> torch.Tensor:
            without.append(plain())
            return without[-1]

        tokens, positions, last = pad_to_bucket(tokens, positions, bucket)
        variant = ("prompt", "mask") if masked else ("prompt",)
        logits = self.runner(eager, (tokens, positions, metadata, last), {}, variant, without_graph=without_graph)
        # It ran in place of a graph that gains nothing; not to be timed, nor because of a hook that may be removed.
        if without and logits is without[-1] and self.runner.reason is None:
            if (model := self.runner.fingerprint) is not None:
                self.missed = model, tokens.shape[0] * bucket
        return logits


class PromptLayers:
    """Runs the layers of a prompt that the model's own code reads, as one with pictures, in graphs of those between
    which nothing stands.

    They note what they are called with, and hand on what the first one was given; the last one runs them all. layers:
    of the model, places: in the store; bucket: the tokens that a row is filled up to. stops: how many layers have run
    where other code looks at what they gave; None in the first call of a kind, which `learns` them. alone: whether
    layers give nothing besides.
    """

    def __init__(self, prompts: Prompts, forward: Any, store: Store, bucket: int, names: frozenset[str]):
        self.prompts, self.names, self.store, self.bucket = prompts, names, store, bucket
        self.layers, self.places, self.stops = forward.layers, forward.places, prompts.stops.get(names)
        self.found: set[int] = set()
        self.calls: list[tuple[LayerForward, dict]] = []
        self.ran, self.alone = 0, True
        self.handed: tuple[torch.Tensor, ...] = ()

    @property
    def learns(self) -> bool:
        return self.stops is None

    @property
    def goes_on(self) -> bool:
        """Whether nothing is known to stand between the layers to come."""
        return self.stops is None or self.ran >= max(self.stops, default=0)

    def end(self, ran: bool) -> None:
        """ran: whether all layers did, by this. After others than have been seen, each layer runs by itself."""
        if self.learns and ran:
            self.prompts.stops[self.names] = frozenset(self.found) if self.alone else None
        elif not (self.learns or ran):
            self.prompts.stops[self.names] = None

    def leave(self) -> None:
        """The layers to come run by themselves. Raises Unfit where those before them have not run yet."""
        if self.calls:
            raise Unfit("something stands between its layers")
        self.found.add(self.ran)

    def run(self, step: Step, layer: LayerForward, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """What a layer gives to the code around it. Raises Unfit where that is not the code that was seen."""
        self.ran += 1
        if self.stops is None:
            if self.handed and not (x is self.handed[0] and torch.equal(*self.handed)):
                self.found.add(self.ran - 1)
            y = layer.computed(step, x, kwargs)
            self.handed, self.alone = (y, y.clone()), self.alone and step.behind is None
            return y
        if self.calls and x is not self.handed[0]:
            raise Unfit("something stands between its layers")
        self.handed = (x,)
        self.calls.append((layer, kwargs))
        if self.ran < len(self.layers) and self.ran not in self.stops:
            return x
        calls, self.calls = self.calls, []
        return self._computed(step, x, calls)

    def _computed(self, step: Step, x: torch.Tensor, calls: list) -> torch.Tensor:
        new, held = x.shape[1], [{name: one for name, one in kwargs.items() if _told(name, one)} for _, kwargs in calls]
        leaves = [one for one in tree_leaves(held) if isinstance(one, torch.Tensor)]
        given = list({id(one): one for one in leaves}.values())
        dims = [one.dim() - (1 if _whole(one) else 2) for one in given]

        def plain() -> torch.Tensor:
            return _run(calls, step, x)

        if any(dim < 0 or one.shape[dim] not in (1, new) for one, dim in zip(given, dims, strict=True)):
            return plain()
        places = {id(one): place for place, one in enumerate(given)}
        flags = tuple((name, one) for name, one in calls[0][1].items() if isinstance(one, bool | int | float | str))
        alike = tuple(places[id(one)] for one in leaves)
        variant = "layers", self.ran, self.store.padding_mask is not None, flags, alike
        filled, _, last = pad_to_bucket(x, None, self.bucket)
        padded = [
            one if one.shape[dim] == 1 < new else _longer(one, dim, self.bucket)
            for one, dim in zip(given, dims, strict=True)
        ]

        def eager(x: torch.Tensor, metadata: torch.Tensor, last: torch.Tensor, *padded: torch.Tensor) -> torch.Tensor:
            named = {"is_prefill": True, "metadata": metadata, "by_address": True, "last": last}
            step = Step(self.store.kvs(self.places, x.shape[0] * x.shape[1], **named))
            step.written = dict.fromkeys(self.places, x.shape[1])  # before any of these layers
            mine = tree_map_only(torch.Tensor, lambda one: padded[places[id(one)]], held)
            return _run([(layer, kwargs | own) for (layer, kwargs), own in zip(calls, mine, strict=True)], step, x)

        arguments = filled, self.store.metadata, last, *padded
        return self.prompts.runner(eager, arguments, {}, variant, without_graph=plain)[:, :new]


def _run(calls: list, step: Step, x: torch.Tensor) -> torch.Tensor:
    for layer, kwargs in calls:
        x = layer.computed(step, x, kwargs)
    return x


def _told(name: str, value: object) -> bool:
    """Whether a layer may read this keyword: masks are those of the step."""
    return isinstance(value, torch.Tensor | tuple | list) and "mask" not in name


def _whole(one: torch.Tensor) -> bool:
    """Whether these are numbers of tokens, (.., new), and not (.., new, C)."""
    return not one.is_floating_point() and not one.is_complex()
