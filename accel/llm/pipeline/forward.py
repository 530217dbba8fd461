"""The forward of a language model whose layers are spread over several devices, in one process.

The model's own code runs as ever: embeddings, norm and head are stock, and accelerate's hooks bring them their inputs.
Its layers are stretches, each with its store on its own device. Nothing of a step waits for a device. Logits of calls
are given back on the device of the inputs, as accelerate does; those of the batching engine stay where the head is.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accel_kernels import KV

from accel.errors import Unfit
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.layer_forward import LayerForward
from accel.llm.kv_cache.store import Store
from accel.llm.pipeline.device_hooks import device_of, other_hook, wrapper_of
from accel.llm.pipeline.placement import Placement
from accel.llm.pipeline.stretch import (
    ChainedStep,
    Stale,
    Stores,
    Stretch,
    StretchGraphs,
    StretchLayer,
    StretchStep,
    Unchained,
)
from accel.patching.guard import changed_since


class SpreadForward(DecoderForward):
    """Runs calls with a cache over stretches of layers. Stands, as its layers do, in place of accelerate's hook."""

    layers: list[StretchLayer]  # type: ignore[assignment]
    runner: StretchGraphs | None  # type: ignore[assignment]

    def __init__(self, *place: Any, placement: Placement, **held: Any) -> None:
        super().__init__(*place, **held)
        self.stretches = [
            Stretch(self.layers[one.start : one.stop], placement.devices[one.start]) for one in placement.stretches()
        ]
        for forward in (self, *self.layers):
            forward.around = wrapper_of(forward.module)
        self.chained = True  # its code hands each layer what the one before gave

    def why_stock(self, kwargs: dict, unknown: str) -> str | None:
        return unknown

    def device(self, layer: LayerForward, embeddings: torch.Tensor) -> torch.device:
        assert isinstance(layer, StretchLayer)
        return layer.stretch.device

    def eager(
        self,
        store: Store,
        is_prefill: bool,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        metadata: torch.Tensor,
        keep: int | torch.Tensor,
        graphs: Any = None,
        variant: tuple = (),
        trusted: bool = False,
    ) -> torch.Tensor:
        """The model's own forward with fused layers. `metadata` is that of the store's first device, and not needed.

        graphs: by which stretches are replayed in a step of decoding, with what else decides which kernels run.
        trusted: the model is the one of the step before, and not looked at; then Stale is raised where it has no graph.
        """
        if not trusted:
            self.ready()
        last = keep if isinstance(keep, torch.Tensor) else None
        stores = StoresOfOneForward(store, is_prefill, last)
        if not is_prefill and self._by_stretches:
            try:
                # What its layers have written before Unchained lies behind what is stored, and is written again.
                step = ChainedStep(stores, graphs, variant, None if trusted else self.seen)
                return self._in_chain(step, tokens, positions, keep).to(tokens.device, non_blocking=True)
            except Unchained:
                pass
        if trusted:
            raise Stale
        kvs: dict[int, KV] = {}
        for one in self.stretches:
            kvs |= stores.kvs(one, tokens, stores.metadata(one))
        return self.logits_of(StretchStep(kvs), tokens, positions, keep).to(tokens.device, non_blocking=True)

    def over_stores(
        self,
        stores: Stores,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        keep: int | torch.Tensor,
        graphs: Any = None,
        variant: tuple = (),
        trusted: bool = False,
    ) -> torch.Tensor:
        """The logits of one step, on the device of the head, every stretch at once. graphs, trusted: as in `eager`.

        Raises Unfit where the model's code does not hand each layer what the one before gave.
        """
        if not trusted:
            self.ready()
        try:
            if not self._by_stretches:
                raise Unchained
            step = ChainedStep(stores, graphs, variant, None if trusted else self.seen)
            return self._in_chain(step, tokens, positions, keep)
        except Unchained as error:
            raise Unfit("its code does not hand each layer what the one before gave") from error

    @property
    def _by_stretches(self) -> bool:
        """Whether stretches can compute at once."""
        return self.chained and all(one.read is not None for one in self.stretches)

    def _in_chain(
        self, step: ChainedStep, tokens: torch.Tensor, positions: torch.Tensor | None, keep: int | torch.Tensor
    ) -> torch.Tensor:
        """Raises Unchained, and is not tried again then."""
        try:
            logits = self.logits_of(step, tokens, positions, keep)
            if step.calls:
                raise Unchained
        except Unchained:
            self.chained = False
            raise
        return logits

    def _placed(self) -> str | None:
        for path, module in self.module.named_modules():
            if (reason := other_hook(module)) is not None:
                return f"{reason}, on {path or 'the model'}"
        for layer in self.layers:
            if device_of(layer.module) != layer.stretch.device:
                return changed_since(f"{layer.path}: the device of its accelerate hook")
        return None


class StoresOfOneForward:
    """What a forward reads and writes. last: place of the last real token, (1,), of a prompt filled up behind it."""

    def __init__(self, store: Store, is_prefill: bool, last: torch.Tensor | None):
        self.store, self.is_prefill, self.last = store, is_prefill, last

    def metadata(self, stretch: Stretch) -> tuple[torch.Tensor, ...]:
        return (self.store.metadata_on(stretch.device),)

    def turn(self, stretch: Stretch) -> AbstractContextManager:
        return nullcontext()

    def kvs(self, stretch: Stretch, x: torch.Tensor, metadata: tuple[torch.Tensor, ...]) -> dict[int, KV]:
        indices = [place for layer in stretch.layers for place in layer.spec.places]
        last = None if self.last is None else self.last.to(stretch.device)
        given = {"is_prefill": self.is_prefill, "metadata": metadata[0], "by_address": last is not None, "last": last}
        return self.store.kvs(indices, x.shape[0] * x.shape[1], **given)
