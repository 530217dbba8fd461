"""The forward of a whole causal language model: its own code around fused layers, and a CUDA graph for decoding."""

import inspect
import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accel_kernels.attention.math_attention import math_attention
from torch import nn
from torch.nn.modules import module as torch_module

from accel.cuda_graphs.adapter_buffers import AdapterBuffers
from accel.cuda_graphs.fingerprint import Fingerprint
from accel.cuda_graphs.runner import GraphRunner
from accel.libraries.adapters import adds_biases
from accel.libraries.attention import MASK
from accel.libraries.cache import NAMES, DynamicCache, cache_argument, cache_field, new_cache, with_present_names
from accel.libraries.hooks import why_elsewhere
from accel.libraries.models import word_table
from accel.llm.generation.calling_convention import (
    CallingConvention,
    Unfit,
    own_arguments,
    padding_of,
    shows_all,
    tokens_of,
    wanted_of,
)
from accel.llm.generation.layer_forward import LayerForward
from accel.llm.generation.layer_inputs import OF_ONE_CALL, CheckedStep, under_way
from accel.llm.generation.model_guard import ModelGuard
from accel.llm.generation.prefill import Prompts, by_graph
from accel.llm.kv_cache.cache import adopt, tokens_in
from accel.llm.kv_cache.pending_step import LatestForward
from accel.llm.kv_cache.shape import LayerShape, StateShape
from accel.llm.kv_cache.store import Store
from accel.llm.moe.router import RouterForward
from accel.llm.parts.step import ForwardContext, Step
from accel.llm.recording.implementation import unpaged
from accel.offload.call_hooks import streamed_model
from accel.parallel.ranks import Ranks
from accel.parallel.sharded_layers import ranks_of
from accel.patching.fast_forward import AS_WRITTEN, FastForward
from accel.patching.guard import changed_since
from accel.quantization.adapters import expect_all


class DecoderForward(FastForward):
    """Runs calls with a cache over a store of keys and values; every layer by its `LayerForward`."""

    forgotten = ("seen",)
    convention: CallingConvention  # once the model is tried
    partial = False  # whether some layers of the stack are not among `layers`
    masks_steps = True  # whether stock takes a mask with tokens that stand behind others
    one_by_one = False  # whether stock goes on with a text right only by single tokens, where nothing is hidden
    most_positions: int | None = None  # of the model's table, beyond which a GPU would fail for good

    def __init__(self, *place: Any, stack: str, layers: list[LayerForward], steps: ForwardContext) -> None:
        super().__init__(*place)
        self.stack, self.layers, self.steps = stack, layers, steps
        self.places = sorted(place for layer in layers for place in layer.spec.places)  # in a store
        self.biased = any(layer.spec.has_position_bias for layer in layers)  # scores, by distance
        self.keeps_state = any(layer.spec.keeps_state for layer in layers)
        self.experts: list[FastForward] = []  # those in the layers that are fused
        self.routers: list[RouterForward] = []
        self.model_guard: ModelGuard | None = None  # once the model has been tried
        self.runner: GraphRunner | None = None
        self.prompts: Prompts | None = None
        self.kv_dtypes: dict[int, torch.dtype | None] = {}  # of 8 bits, by place in the cache
        self.ranks: Ranks | None = ranks_of(self.module)  # that share the model
        self.__setstate__(vars(self))

    def __getstate__(self) -> dict[str, Any]:
        own = ("names", "cache_name", "stored", "declined", "masked", "seen", "reason", "lock")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.names = tuple(inspect.signature(type(self.module).forward).parameters)[1:]
        self.cache_name = cache_argument(type(self.module).forward) or NAMES[0]
        self.stored: tuple = (None, None, ())  # dtype and device, and the shapes for them
        self.seen: Fingerprint | None = None  # the model as it was when the layers were bound to its weights
        self.declined: dict[frozenset[str], str] = {}  # why calls with these arguments stay stock
        self.masked: set[frozenset[str]] = set()  # arguments of calls whose tokens see what is behind them
        self.apart = False  # while it is tried: weights stay where they are
        self.reason: str | None = None
        self.lock = threading.Lock()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self.log.runs_stock_on_cpu(args, kwargs) or AS_WRITTEN.get():
            return self.stock(*args, **kwargs)
        reason = self.mode()
        if reason is None:
            try:
                return self.fast(*args, **kwargs)
            except Unfit as unfit:
                reason = str(unfit)
        self.log.fell_back(self.path, reason)
        return self.stock(*args, **kwargs)

    def reference(self, **kwargs: Any) -> Any:
        with unpaged(self.module), math_attention():
            return self.stock(**kwargs)

    def mode(self) -> str | None:
        watched = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
        return "global module hooks" if watched else super().mode()

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        kwargs, cache = self.split_cache(args, kwargs)
        given = kwargs.get
        use_cache, as_dict = wanted_of(kwargs, self.module.config)
        tokens = tokens_of(kwargs, self.embeddings(), cache is None)
        if not use_cache and (cache is None or self.partial):
            raise Unfit("no cache")
        cache = new_cache(self.module) if cache is None else cache
        rows, new = tokens.shape[:2]
        # Before the cache is taken over: a stock call may want it as it is.
        start = tokens_in(cache)
        if self.one_by_one and start and (new > 1 or not shows_all(given(MASK))):
            raise Unfit("more than a token behind others, or padding, which stock masks by a cache that has lost count")
        if new > 1 and self.keeps_state and adds_biases(self.module) and not shows_all(given(MASK)):
            raise Unfit("padding, which goes through the bias of an adapter before a state")
        unknown = self.convention.unknown(kwargs, rows, start, new)
        if unknown is not None and (reason := self.why_stock(kwargs, unknown)) is not None:
            raise Unfit(reason)
        if self.partial or unknown is not None:
            self.ready()
        start = (store := self.adopt(cache)).length
        if tokens.device != self.embeddings().device or (start and store.rows not in (0, rows)):
            raise Unfit("inputs on another device, or of another number of rows, than the cache")
        if self.partial or unknown is not None:
            return self.run_own_code(store, cache, tokens, kwargs, checked=unknown is not None)
        if type(keep := given("logits_to_keep", 0)) is not int:
            raise Unfit("logits_to_keep is no number")
        try:
            if (start or new == 1) and not self.masks_steps and given(MASK) is not None:
                raise Unfit("a mask of a step, which it multiplies tokens by")
            mask = self.convention.read_mask(given(MASK), store, rows, start, new, self.left_padded(new))
            positions, places = None, given("position_ids")
            if "position_ids" in self.names:
                positions = self.convention.read_positions(places, mask, rows, start, new, tokens.device)
            elif places is not None:
                raise Unfit("called with position_ids, which its forward only hands on")
        except Unfit as unfit:
            if self.why_stock(kwargs, str(unfit)) is not None:
                raise
            self.ready()
            return self.run_own_code(store, cache, tokens, kwargs)
        logits = self.run(store, tokens, positions, mask, keep)
        kind, kept = self.convention.output, self.convention.handed_on(self.module, kwargs)
        output = kind(logits=logits, **{cache_field(kind): cache}, **kept)
        return output if as_dict else output.to_tuple()

    def adopt(self, cache: Any, expected_tokens: int = 0) -> Store:
        """The store under this cache, put there if need be. Raises Unfit."""
        store = adopt(cache, self.shapes(), expected_tokens)
        if isinstance(store, str):
            raise Unfit(store)
        return store

    def split_cache(self, args: tuple, kwargs: dict) -> tuple[dict, Any]:
        """The arguments of a call by their present names, and the cache, which is then not among them."""
        named = dict(zip(self.names, args, strict=False)) | with_present_names(type(self.module).forward, kwargs)
        return named, named.pop(self.cache_name, None)

    def given_cache(self, cache: Any) -> dict[str, Any]:
        """What a call is given besides tokens, to store them in this cache and return it."""
        return {self.cache_name: cache, "use_cache": True, "return_dict": True}

    def left_padded(self, new: int) -> bool:
        """Whether padding between tokens changes what layers compute; a state's single token reads no mask in stock."""
        return self.biased or (new > 1 and self.keeps_state)

    def why_stock(self, kwargs: dict, unknown: str) -> str | None:
        """Why a call that is not understood runs stock as a whole; None where it may run `run_own_code`."""
        if self.model_guard is None or self.biased:
            return unknown
        return self.declined.get(own_arguments(kwargs))

    def run_own_code(self, store: Store, cache: Any, tokens: torch.Tensor, kwargs: dict, checked: bool = True) -> Any:
        """What the own forward of the model gives, given the cache, around fused layers; after `ready`. checked:
        layers run stock unless they are given what a text gives them. Raises Unfit.
        """
        (rows, new), start, names = tokens.shape[:2], store.length, own_arguments(kwargs)
        mask = padding_of(kwargs.get(MASK), store, rows, start + new, self.partial and self.left_padded(new))
        mask = None if checked and shows_all(mask) else mask
        store.take()
        stretch = None if start or self.prompts is None else self.prompts.layers(self, store, tokens, names)
        store.reserve(rows, start + (new if stretch is None else stretch.bucket))
        store.set_padding_mask(mask)
        mine = range(len(self.places)) if self.partial else self.places  # in the store
        kvs = dict(zip(self.places, store.kvs(mine, rows * new, is_prefill=start == 0).values(), strict=True))
        step = CheckedStep(self, kvs, cache, tokens, start, mask, checked, names, stretch)
        try:
            with under_way(self, step, kwargs if names and new > 1 else {}):
                output = self.stock(**kwargs, **{self.cache_name: cache})
            if checked and step.reason is None and step.ran != self.layers:
                raise Unfit("its layers do not run one after another")
        except Unfit as unfit:
            if str(unfit) not in OF_ONE_CALL and (stretch is None or stretch.learns):
                self.declined[names] = str(unfit)
            raise
        self.masked |= {names} if step.masks else set()
        if step.reason is None:
            store.advance(new)
            return output
        if step.reason not in OF_ONE_CALL:
            self.declined[names] = step.reason
        self.log.fell_back(self.path, step.reason)
        return output

    def embeddings(self) -> torch.Tensor:
        """As of `word_table`. Raises Unfit where somebody put something else in the place of the input embeddings."""
        try:
            return word_table(self.module)
        except (AttributeError, NotImplementedError) as error:
            raise Unfit(changed_since("the place of its input embeddings")) from error

    def shapes(self) -> tuple[LayerShape, ...]:
        """What each layer keeps, by its place in the cache."""
        weight = self.embeddings()
        dtype, device, shapes = self.stored
        if dtype is not weight.dtype or device != weight.device:
            kept: dict[int, LayerShape] = {
                one.index: one.cache_layout(weight.dtype, self.device(layer, weight), self.kv_dtypes.get(one.index))
                for layer in self.layers
                for one in layer.spec.stored
            }
            nothing, number = kept[self.places[0]].nothing, len(DynamicCache(config=self.module.config).layers)
            beside = ((place, shape) for place, shape in kept.items() if place >= number)
            kept |= {place: shape._replace(beside=number) for place, shape in beside if isinstance(shape, StateShape)}
            shapes = tuple(kept.get(place, nothing) for place in self._cached())
            self.stored = weight.dtype, weight.device, shapes
        return shapes

    def _cached(self) -> Sequence[int]:
        """Places of the cache, of which each may be that of a layer that keeps something."""
        return range(max(len(DynamicCache(config=self.module.config).layers), self.places[-1] + 1))

    def device(self, layer: LayerForward, embeddings: torch.Tensor) -> torch.device:
        """Where a layer keeps keys and values."""
        return embeddings.device

    def round(self, kv_dtypes: dict[int, torch.dtype | None]) -> None:
        """Keeps keys and values in these dtypes from now on, by a layer's place in the cache."""
        self.kv_dtypes, self.stored = kv_dtypes, (None, None, ())

    def run(
        self, store: Store, tokens: torch.Tensor, positions: torch.Tensor | None, mask: torch.Tensor | None, keep: int
    ) -> torch.Tensor:
        """The logits; tokens: (rows, new) numbers or (rows, new, C) embeddings, stored behind what is in the store."""
        rows, new = tokens.shape[:2]
        start, pending = store.length, store.take()
        step = None if pending is None else pending.take(start, tokens, positions, mask, keep)
        prompts = None if start else self.prompts
        bucket = None if prompts is None else prompts.bucket(self.module, tokens, keep)
        store.reserve(rows, start + (bucket or new))
        if mask is not None and start == 0 and bool(mask.all()):
            mask = None  # waits for the GPU, once a prompt: attention without a mask is faster
        store.set_padding_mask(mask)
        eager, metadata = partial(self.eager, store, start == 0), store.metadata
        arguments = (tokens, positions, metadata, keep)
        for layer in self.layers if start else ():
            layer.renew()
        if not start and self._adapters is not None:
            self._adapters.filled = None  # steps of this text trust that nothing is changed unseen meanwhile
        masked = store.padding_mask is not None
        if start and self.runner is not None and by_graph(rows, new) and Prompts.captures(tokens):
            logits = self.runner(eager, arguments, {}, ("mask",) * masked, pending=step)
        elif prompts is not None and bucket is not None:
            logits = prompts(eager, partial(eager, *arguments), *arguments[:3], bucket, masked)
        else:
            logits = eager(*arguments)
        store.advance(new)
        store.latest = LatestForward(None if positions is None else positions[..., -1:], keep)
        return logits

    def eager(
        self,
        store: Store,
        is_prefill: bool,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        metadata: torch.Tensor,
        keep: int | torch.Tensor,
    ) -> torch.Tensor:
        """The model's own forward with fused layers. `metadata` is read in place of the store's own.

        keep: as logits_to_keep; or the place of the last real token, (1,), of a prompt that is filled up behind it.
        The model is shown an empty cache: nothing its Python does may depend on how much is stored, so that a graph
        of it holds for any length.
        """
        self.ready()
        last = keep if isinstance(keep, torch.Tensor) else None
        given = {"is_prefill": is_prefill, "metadata": metadata, "by_address": last is not None, "last": last}
        kvs = store.kvs(self.places, tokens.shape[0] * tokens.shape[1], **given)
        return self.logits_of(Step(kvs), tokens, positions, keep)

    def logits_of(
        self, step: Step, tokens: torch.Tensor, positions: torch.Tensor | None, keep: int | torch.Tensor
    ) -> torch.Tensor:
        """The logits of one forward by the model's own code, after `ready`."""
        name = "input_ids" if tokens.dim() == 2 else "inputs_embeds"
        given = {name: tokens} | self.given_cache(self.convention.shown(step))
        given |= {} if positions is None else {"position_ids": positions}
        keeps = "logits_to_keep" in self.names  # else it gives those of all tokens
        given |= {"logits_to_keep": keep} if keeps or (type(keep) is int and keep) else {}
        if self.convention.mask:
            given[MASK] = torch.zeros((), device=tokens.device).expand(1, 1, 1, 1)
        with self.steps.taken(step), nullcontext() if self.ranks is None else self.ranks.forward():
            logits = type(self.module).forward(self.module, **given).logits
        return logits if keeps or type(keep) is int else logits[:, keep]

    def ready(self, stack: bool = True) -> None:
        """Binds the layers to the weights where the model has changed. Raises Unfit where they no longer fit it."""
        with self.lock:
            if self.seen is None or not (self.seen.reachable() and self.seen.holds()):
                expect_all(self.module)
                self.reason = self._bind(stack and not self.apart and streamed_model(self.module) is None)
                self.seen = self._fingerprint()
            for layer in self.layers:
                layer.renew()
        if self.reason is not None:
            raise Unfit(self.reason)

    def _fingerprint(self) -> Fingerprint:
        return Fingerprint(self.module, self.convention.ignored_attributes, self.model_guard, self._adapters)

    @property
    def _adapters(self) -> AdapterBuffers | None:
        return self.runner.adapters if isinstance(self.runner, GraphRunner) else None

    def _bind(self, stack: bool) -> str | None:
        if self.model_guard is not None and (reason := self.model_guard.changed()) is not None:
            return reason
        if [id(module) for module in self._stack()] != [id(layer.module) for layer in self.layers]:
            return "its layers are not those that were optimized"
        return self._placed() or next(filter(None, (layer.bind(stack) for layer in self.layers)), None)

    def _placed(self) -> str | None:
        """Why its weights are not where they were understood."""
        return why_elsewhere(self.module)

    def _stack(self) -> Iterable[nn.Module]:
        """The model's layers now, in place of those that were understood."""
        return self.module.get_submodule(self.stack)
