"""Guidance parallel: the rows of a denoiser's batch divided among ranks.

Classifier-free guidance (Ho and Salimans, 2022) computes each step with the prompt and without it, as two halves of one
batch. With two ranks each computes one half, with more each its share of the rows. The results are gathered on all of
them, so pipeline and scheduler run unchanged on every rank.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from accel.comparison import relative_rms
from accel.cuda_graphs.rule import PROMPT, graph_obstacle
from accel.diffusion.linears import denoises
from accel.diffusion.parallel.rows import BatchCall, gather_rows, not_rows, rank_rows
from accel.diffusion.parallel.same_numbers import LoopChecks, check_same
from accel.errors import reason_of
from accel.fusion.loop import DenoisingLoop
from accel.libraries.diffusion import DIVIDED
from accel.libraries.hooks import hook_of, hooks_of
from accel.parallel.ranks import Ranks, all_ranks
from accel.patching.fast_forward import AS_WRITTEN, FastForward, as_written
from accel.patching.rule import Context, Match, Rule, Site, Skip, first_of
from accel.tolerances import ROWS, bound

NAME = "guidance parallel"  # of the rule


class ModelDigest(NamedTuple):
    """Which modules a denoiser has. digest: equal on ranks with equal models. reason: why rows may not be divided."""

    kinds: tuple
    digest: str
    reason: str | None


class GuidanceForward(FastForward):
    """Around a denoiser's forward, with its step cache and CUDA graph: computes this rank's rows.

    The first call of a kind also runs whole in stock, to see whether rows depend on each other.
    """

    renewed = ("ranks", "checks", "verdicts", "make", "prompt")

    def __init__(self, module: nn.Module, path: str, context: Context, inner: FastForward | None):
        self.inner, self.loop = inner, context.of(DenoisingLoop)  # None: the stock forward
        super().__init__(module, path, context.kernels, context.log)

    def renew(self) -> None:
        self.ranks = all_ranks()
        self.checks = LoopChecks(self.loop)
        self.verdicts: dict[tuple, str | None] = {}  # by kind of call: why its rows cannot be divided
        self.make: ModelDigest | None = None
        self.prompt: tuple[torch.Tensor, torch.Tensor] | None = None  # as it was given, and this rank's rows

    def call(self, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner or self.stock
        if torch.compiler.is_compiling() or AS_WRITTEN.get():
            return inner(*args, **kwargs)
        reason = self.mode() or self._apart()
        if reason is not None:
            return self._whole(reason, inner, args, kwargs)
        return self.fast(*args, **kwargs)

    def _apart(self) -> str | None:
        """Why this call stays on this rank."""
        if self.ranks is None:
            return "this process is alone"
        if getattr(self.module, DIVIDED, None) is not None:
            return "diffusers divides it among ranks already (enable_parallelism)"
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return "part of somebody's CUDA graph"
        return None

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        ranks, inner = self.ranks, self.inner or self.stock
        assert ranks is not None
        call = BatchCall.of(args, kwargs, self.names[0])
        divided = call.divided(ranks.size)
        self._agree(call, divided, ranks)
        if isinstance(divided, str):
            return self._whole(divided, inner, args, kwargs)
        assert self.make is not None
        reason = self.make.reason
        if reason is None:
            kinds = tuple(getattr(leaf, "dtype", type(leaf)) for leaf in call.leaves)
            key = (self.make.digest, call.spec, tuple(divided), kinds)
            if key not in self.verdicts:
                self.verdicts[key] = self._try(call, divided, ranks)
            reason = self.verdicts[key]
        if reason is not None:
            return self._whole(reason, inner, args, kwargs)
        args, kwargs = self._part(call, divided, ranks)
        return gather_rows(inner(*args, **kwargs), call.batch // ranks.size, ranks)

    def _whole(self, reason: str, inner: Callable, args: tuple, kwargs: dict) -> Any:
        self.log.fell_back(self.path, f"{NAME}: computed whole: {reason}")
        return inner(*args, **kwargs)

    def _agree(self, call: BatchCall, divided: list[bool] | str, ranks: Ranks) -> None:
        """Raises `errors.Refused` on all ranks that are about to compute different things; asked as a loop begins."""
        tensors = [(i, leaf) for i, leaf in enumerate(call.leaves) if type(leaf) in (torch.Tensor, nn.Parameter)]
        form = [(tuple(tensor.shape), str(tensor.dtype)) for _, tensor in tensors], divided
        if not self.checks.due(form):
            return
        if self.checks.begins or self.make is None:
            self._look()
        told = {
            "the shapes of its tensors": form[0],
            "what else it is given": [leaf for leaf in call.leaves if isinstance(leaf, int | float | bool | str)],
            "why it is computed whole": divided if isinstance(divided, str) else None,
            "what it is made of": self.make and self.make.digest,
            "why it may not be divided": self.make and self.make.reason,
            "the interval of its step cache": getattr(getattr(self.inner, "state", None), "interval", None),
        }
        names = call.names(self.names)
        check_same(ranks, self._place(), told, [(repr(names[i]), one) for i, one in tensors], self._device())

    def _look(self) -> None:
        """Makes the digest anew where modules were replaced, such as by adapters or processors."""
        kinds = tuple(map(_sort, self.module.modules()))
        if self.make is None or kinds != self.make.kinds:
            digest = blake2b(repr(kinds).encode(), digest_size=8).hexdigest()
            self.make = ModelDigest(kinds, digest, graph_obstacle(self.module))

    def _place(self) -> str:
        return f"a call of the {type(self.module).__name__}" + (f" ({self.path})" if self.path else "")

    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    def _part(self, call: BatchCall, divided: Sequence[bool], ranks: Ranks) -> tuple[tuple, dict]:
        """The arguments with this rank's rows. A prompt that is given again has the same part, so that what is computed
        from it once a loop is found again. No other part is kept: it would keep the memory of a step before.
        """
        args, kwargs = pytree.tree_unflatten(call.leaves, call.spec)
        prompt: Any = self.named(args, kwargs).get(PROMPT)
        leaves = []
        for leaf, each in zip(call.leaves, divided, strict=True):
            part = rank_rows(leaf, ranks) if each else leaf
            if each and leaf is prompt:
                if self.prompt is None or self.prompt[0] is not leaf:
                    self.prompt = leaf, part
                part = self.prompt[1]
            leaves.append(part)
        return pytree.tree_unflatten(leaves, call.spec)

    def _try(self, call: BatchCall, divided: list[bool], ranks: Ranks) -> str | None:
        """Why rows cannot be divided in such calls: stock gives other results for a rank's rows alone than in the whole
        batch.

        The same on all ranks. Raises `errors.Refused` where ranks have other weights.
        """
        whole: list = []
        try:
            reason = self._differs(call, divided, ranks, whole)
        except Exception as error:
            reason = f"without the other rows it raised {reason_of(error)}"
        if ranks.any(reason is not None, self._device()):
            return reason or "another rank cannot compute its rows alone"
        outputs = [("what it gives", leaf) for leaf in whole if leaf is not None]
        check_same(ranks, self._place(), {}, outputs, self._device(), "load the same weights and adapters on all ranks")
        return None

    def _differs(self, call: BatchCall, divided: list[bool], ranks: Ranks, whole: list) -> str | None:
        """whole: filled with what the whole batch gives."""
        with as_written():
            part_args, part_kwargs = self._part(call, divided, ranks)
            part = pytree.tree_leaves(self.stock(*part_args, **part_kwargs))
            args, kwargs = pytree.tree_unflatten(call.leaves, call.spec)
            whole += pytree.tree_leaves(self.stock(*args, **kwargs))
        reason = not_rows(whole, call.batch) or not_rows(part, call.batch // ranks.size)
        if reason is not None:
            return reason
        for a, b in zip(part, whole, strict=True):
            if a is not None:
                off = relative_rms(a, rank_rows(b, ranks))
                if not off <= bound(ROWS, a.dtype):
                    return f"its rows depend on each other: without the others they are off by {off:.1e}"
        return None


def _sort(module: nn.Module) -> tuple:
    """Types of a module, its processor and forward, and which hooks it has."""
    held = vars(module)
    hooks = bool(held["_forward_hooks"]), bool(held["_forward_pre_hooks"]), hook_of(module) is not None
    return type(module), type(held.get("processor")), type(held.get("forward")), *hooks, bool(hooks_of(module))


def match_guidance(site: Site, context: Context, beneath: Sequence[Rule]) -> Match | Skip | None:
    """The root of a denoiser. It keeps the forward that the rules `beneath` give it inside of this one."""
    if context.options.parallel != "guidance" or site.path or not denoises(site.module):
        return None
    ranks = all_ranks()
    if ranks is None:
        return Skip("this process is alone")
    inner = first_of(beneath, site, context)
    if isinstance(inner, Skip):
        return inner
    forward = GuidanceForward(site.module, site.path, context, inner.forward)
    note = f"rank {ranks.rank} of {ranks.size} computes its rows of a batch; {inner.note}"
    return Match(forward, inner.patches, covers=inner.covers or (), note=note)
