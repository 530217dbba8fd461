"""Whole forwards as CUDA graphs: which modules, and what forbids it."""

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from accel.casting import Cast, casts_of, in_place, uncast
from accel.cuda_graphs.entry import LoopConstant
from accel.cuda_graphs.fingerprint import Fingerprint
from accel.cuda_graphs.pays import LiveTurns
from accel.cuda_graphs.pool import GraphPool
from accel.cuda_graphs.runner import GraphRunner
from accel.cuda_graphs.small_calls import SmallCalls
from accel.fusion.channels_last import ChannelsLast, over_video
from accel.fusion.loop import DenoisingLoop, ForwardCounter
from accel.fusion.stacked_linears import PromptProjections
from accel.libraries.adapters import row_adapters
from accel.libraries.diffusion import context_parallel
from accel.libraries.hooks import BENEATH, beneath, hook_of, hooks_of, in_groups, only_divides
from accel.libraries.tensor_parallel import by_transformers
from accel.offload.hooks import comes_to_one_place, moved_by_torch
from accel.parallel.sequences import sequence_ranks, uncapturable
from accel.patching.fast_forward import FastForward, as_written
from accel.patching.rule import Context, Match, Site, Skip
from accel.patching.structure import CallersHook, foreign, foreign_hooks, foreign_processor, stock_method
from accel.quantization.formats.stored_forward import StoredForward

PROMPT = "encoder_hidden_states"
MOST_TURNS = 64  # shapes without a graph that are remembered; the oldest is forgotten

IN_PARTS = "its weights come to the GPU in parts, as they are called: they run stock (offload)"

# Inside of a forward that is captured or will be: what launching takes the host there does not count.
CAPTURED_SOON: ContextVar[bool] = ContextVar("accel_captured_soon", default=False)


class GraphForward(FastForward):
    """The module's own forward, with fast forwards inside, replayed from a CUDA graph per shape.

    Halves of video autoencoders are not captured: their kernels are long, and a graph would hold the memory of all
    frames. Where sequences are divided among ranks, each rank's graph contains the exchanges. Where no graph is
    possible, calls run fused and stock in turns until it is known which is faster for their shape.
    inner: a fused forward of the whole module, which runs in the place of its own code.
    """

    inner: Any = None

    def __init__(self, module: nn.Module, path: str, context: Context):
        super().__init__(module, path, context.kernels, context.log)
        self.turns: dict[tuple, LiveTurns] = {}
        self.prompt, self.loop = PromptProjections.shared(context), context.of(DenoisingLoop)
        self.layout = context.find(ChannelsLast)  # of the model's convolutions
        self.passes, self.small = context.of(ForwardCounter), context.of(SmallCalls)
        self.passes.tracked = True
        self.variant: Callable[[], tuple] | None = None  # plain values that it depends on too, set by who wraps it
        self.video = bool(path) and any(map(over_video, module.modules()))
        self.holder: nn.Module | None = None  # what it is half of, where hooks may move that to the GPU and back
        keep = context.options.graphs is True
        self.runner = GraphRunner(module, path, context.of(GraphPool), context.log, graph_obstacle, keep)

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in super().__getstate__().items() if name not in ("asked", "casts", "looked")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.asked: Fingerprint | None = None  # as the model was when its casts were looked for
        self.casts: tuple[Cast, ...] = ()
        self.looked: Fingerprint | None = None  # as it was when groups were looked for
        self.groups = False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.stock(*args, **kwargs)
        device = next(self.module.parameters()).device
        on_gpu = device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return self.stock(*args, **kwargs)  # part of somebody's capture
        if self.layout is not None:
            self.layout.follow(device)
        if on_gpu:
            return super().call(*args, **kwargs)
        if not _elsewhere(device, (*args, *kwargs.values())):
            return self.stock(*args, **kwargs)
        self.log.fell_back(self.path, IN_PARTS)
        with as_written():  # no block could run fused
            return self.stock(*args, **kwargs)

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.passes.begin(self._in_groups())
        return super().stock(*args, **kwargs) if self.inner is None else self.inner.call(*args, **kwargs)

    def _in_groups(self) -> bool:
        """Looked for where the module has changed, or nobody has noted how it is."""
        now = self.runner.fingerprint
        if now is None or now is not self.looked:
            self.looked, self.groups = now, in_groups(self.module)
        return self.groups

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "global module hooks would not run in a graph"
        return None

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        if (late := None if self.inner is None else self.inner.late(args, kwargs)) is not None:
            return late[1](self.fast(**late[0]))
        # A decoder's graph would keep the memory of its images while the next model is on the GPU.
        if self.video or (self.holder is not None and comes_to_one_place(self.holder)):
            return self.stock(*args, **kwargs)
        if self.inner is not None and self.inner.unlike(args, kwargs):
            return self.stock(*args, **kwargs)
        packed = self.small.packed and not self.small.takes(self.named(args, kwargs))
        if CAPTURED_SOON.get() or packed:
            return self.stock(*args, **kwargs)
        args, kwargs = self._timestep_as_tensor(args, kwargs)
        variant = () if self.variant is None else self.variant()
        config = context_parallel(self.module)
        self.runner.ranks = None if config is None else sequence_ranks(config)
        # Without a graph blocks of a divided model run stock, which they find out themselves.
        without_graph = None if config is None else partial(self.stock, *args, **kwargs)
        constant = self._constant(args, kwargs)
        with self.small.taken():
            return self.runner(self._soon, args, kwargs, variant, constant, without_graph=without_graph)

    def _soon(self, *args: Any, **kwargs: Any) -> Any:
        if self.runner.reason is not None and self.runner.ranks is None:
            return self._in_turns(*args, **kwargs)
        if self.runner.fingerprint is not self.asked:
            self.asked, self.casts = self.runner.fingerprint, casts_of(self.module.modules())
        token = CAPTURED_SOON.set(True)
        try:
            with in_place(self.casts):
                return self.stock(*args, **kwargs)
        finally:
            CAPTURED_SOON.reset(token)

    def _in_turns(self, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        shapes = tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))
        if shapes not in self.turns and len(self.turns) >= MOST_TURNS:
            del self.turns[next(iter(self.turns))]
        turns = self.turns.setdefault(shapes, LiveTurns())

        def stock() -> Any:
            with as_written():
                return self.stock(*args, **kwargs)

        ways: dict[str, Callable[[], Any]] = {"fused": partial(self.stock, *args, **kwargs), "stock": stock}
        result = turns(ways, next(self.module.parameters()).device)
        if turns.reason is not None:
            self.log.fell_back(self.path, f"{turns.reason}, without a graph")
        return result

    def _constant(self, args: tuple, kwargs: dict) -> LoopConstant | None:
        """The prompt, where a pipeline's loop gives it at every step; its keys and values are computed once a loop."""
        if not self.loop.number or not self.prompt.groups or PROMPT not in self.names:
            return None
        prompt = (dict(zip(self.names, args, strict=False)) | kwargs).get(PROMPT)
        if type(prompt) is not torch.Tensor or prompt.is_inference() or self.prompt.versions() is None:
            return None  # such tensors do not tell when they change
        return LoopConstant(prompt, self.prompt, self.loop.number)

    def _timestep_as_tensor(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Makes a tensor of a timestep that is a number, as the model does: else each step would be a new graph."""
        if "timestep" not in self.names:
            return args, kwargs
        bound = dict(zip(self.names, args, strict=False)) | kwargs
        step = bound.get("timestep")
        if isinstance(step, bool) or not isinstance(step, int | float):
            return args, kwargs
        dtype = torch.float64 if isinstance(step, float) else torch.int64
        device = next(self.module.parameters()).device
        kwargs = bound | {"timestep": torch.tensor([step], dtype=dtype, device=device)}
        return (), kwargs


def _elsewhere(device: torch.device, given: tuple) -> bool:
    """Whether the weights are not where the call computes."""
    return device.type == "meta" or any(isinstance(one, torch.Tensor) and one.device.type == "cuda" for one in given)


def obstacle(root: nn.Module, stored: bool = False) -> str | None:
    """Why a captured forward could differ from a called one: weights that move, or Python that a replay skips.

    stored: weights stored in fewer bits are no obstacle, as the caller casts them in place. Neither are hooks by which
    diffusers divides sequences among ranks.
    """
    config = context_parallel(root)
    reason = None if config is None else uncapturable(config)
    if reason is not None:
        return reason
    for name, module in root.named_modules():
        attributes = vars(module)
        where = name or type(root).__name__
        placed = module is root and comes_to_one_place(module)
        casts = stored and uncast(module) is not vars(module).get("forward")
        moved = hook_of(module) is not None and not placed
        if moved or (hooks_of(module) and not casts and not only_divides(module, config)):
            reason = moved_by_torch(module)
            if reason is not None:
                return f"hooks on {where} move its weights one by one (offload): {reason}"
            return f"hooks on {where} may move weights (offload) or divide work among ranks"
        inside = context_parallel(attributes.get("processor"))
        if inside is not None and inside is not config:
            return f"the attention of {where} is divided among ranks that the model does not name"
        if module is not root and foreign_hooks(module, own=CallersHook) and row_adapters(module) is None:
            return f"forward hooks on {where} would not run"
        forward = attributes.get(BENEATH) if placed else beneath(module)
        ours = isinstance(forward, FastForward | StoredForward)
        ours = ours or stock_method(module, forward) or by_transformers(forward)
        if forward is not None and not ours:
            return f"{where} has a replaced forward that may keep state"
        reason = foreign_processor(module)
        if reason is not None:
            return f"{reason} ({where})"
    if len({tensor.device for tensor in root.parameters()}) > 1:
        return "weights on several devices"
    return None


def graph_obstacle(root: nn.Module) -> str | None:
    """As `obstacle`; modules of classes from outside the libraries are one too, since a replay skips their Python."""
    reason = obstacle(root, stored=True)
    if reason is None:
        kinds = {type(module): name for name, module in root.named_modules()}
        reasons = ((foreign(root.get_submodule(name)), name) for name in kinds.values())
        reason = next((f"{why}, and may keep state ({name})" for why, name in reasons if why is not None), None)
    return reason


def match_graph(site: Site, context: Context) -> Match | Skip | None:
    """Matches modules whose whole forward is captured, at the paths that the model's family names."""
    if site.path not in context.graph_paths:
        return None
    if context.options.graphs is False:
        return Skip("graphs=False")
    forward = GraphForward(site.module, site.path, context)
    device = next(site.module.parameters()).device.type
    note = "" if device == "cuda" else f"waits for CUDA; the module is on {device}"
    if forward.video:
        note = "none is captured: over video a launch takes no time, and a graph would hold all frames"
    return Match(forward, covers=(), note=note)
