"""CUDA graphs of whole forwards: one per input shape, captured lazily, bounded in memory, never aliased.

A call copies its inputs into fixed buffers, replays the graph and returns copies of the outputs. The first calls of a
shape run eagerly, while its kernels are being chosen a little at a time; then one captures. What cannot be captured, or
gains nothing, runs eagerly and says why.
"""

import gc
from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accel_kernels.trials import Trials
from accel_kernels.warmup import warmup
from torch import nn
from torch.utils import _pytree as pytree

from accel.cuda_graphs.adapter_buffers import AdapterBuffers
from accel.cuda_graphs.entry import CallToCapture, CapturedGraph, Entry, LoopConstant, Replayed, grew, key_of, switches
from accel.cuda_graphs.fingerprint import Fingerprint, States, Watched
from accel.cuda_graphs.host_copies import capture_with_copies
from accel.cuda_graphs.pays import milliseconds
from accel.cuda_graphs.pool import CaptureMemory, GraphPool
from accel.errors import reason_of
from accel.offload.call_hooks import whole_runs
from accel.parallel.ranks import Ranks
from accel.parallel.sequences import waited
from accel.patching.fallback_log import FallbackLog

LEAST_GAIN = 0.02  # a graph that saves less than this share of the eager time is not worth its memory
LEAST_LAUNCHING = 0.1  # a graph is not tried if launching takes less than this share of the eager time
CROWDED = 2  # times that all graphs are dropped for one, after which it stays eager: the next would drop it again
FORGIVEN = 1 / 8  # of such a time is taken back by each replay
MOST_SHAPES = 256  # shapes remembered per module; the oldest is forgotten
SETTLING = 0.1  # seconds of a call, about, that may be spent measuring kernels for its shape
PATIENCE = 12  # eager calls of a shape that may wait for that before it is captured
RESTLESS = 8  # consecutive calls that find the module changed, after which no more graphs are captured


class GraphRunner:
    """Runs one module's forward through graphs of a shared pool.

    obstacle(module): None, or why no forward may be captured; asked again whenever the module changes. keep: also
    graphs that gain nothing. ignored, watched: see `Fingerprint`. kernel_key: of a call's leaves, equal for calls that
    launch the same kernels; all do without it. eager_calls: of a shape, before it is captured. ranks: compute each call
    together, so each runs it once, and all capture and drop graphs in it. adapters, trusting: see `AdapterBuffers`.
    """

    ignored: tuple[tuple[str, str], ...] = ()
    watched: Watched | None = None
    kernel_key: Callable[[list], Hashable] | None = None
    ranks: Ranks | None = None
    eager_calls = 1
    trusting = False

    def __init__(self, module: nn.Module, path: str, pool: GraphPool, log: FallbackLog, obstacle: Callable, keep: bool):
        self.module, self.path, self.pool, self.log, self.obstacle, self.keep = module, path, pool, log, obstacle, keep
        self.adapters = AdapterBuffers()
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        names = "module path pool log obstacle keep ignored watched kernel_key ranks eager_calls trusting adapters"
        return {name: getattr(self, name) for name in names.split()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.entries: dict[tuple, Entry] = {}
        self.states = States()
        self.reason: str | None = None
        self.changes = self.replays = 0
        self.warm: set[Hashable] = set()
        self.trials = Trials()
        self.pool.add(self)

    @property
    def fingerprint(self) -> Fingerprint | None:
        """Of the module as it was found last."""
        return self.states.now

    def __call__(
        self, eager: Callable, args: tuple, kwargs: dict, variant: tuple = (), constant: LoopConstant | None = None,
        pending: Replayed | None = None, without_graph: Callable | None = None, looked: Fingerprint | None = None,
    ) -> Any:  # fmt: skip
        """eager(*args, **kwargs), or the replay of its graph.

        variant: plain values that it depends on too. pending: what `begin` has launched with equal arguments, for which
        the stream waits. without_graph: a cheaper way without one, which a graph has to beat. looked: by `look`, now.
        """
        with self.adapters.used():
            if pending is not None and self._stands(pending, variant):
                return pending.outputs
            with whole_runs(self.module, eager) as run:
                return self._call(run, args, kwargs, variant, constant, without_graph, looked)

    def _call(
        self, eager: Callable, args: tuple, kwargs: dict, variant: tuple, constant: Any, without_graph: Any, looked: Any
    ) -> Any:
        device = next(self.module.parameters()).device
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if constant is not None:
            variant = (*variant, "prompt kept")
        key = key_of(leaves, spec, variant)
        with self.pool.lock:
            fingerprint: Fingerprint = looked if looked is self.fingerprint and looked is not None else self.look()
            entry = self._entry(key)
            if entry is not None and entry.graph is not None:
                # Replay first, look for changes while the GPU is at work; a replay of what has changed since is
                # thrown away unread.
                outputs = self._replay(entry, leaves, device, constant)
                if fingerprint.holds() and self.adapters.holds():
                    self.changes = 0
                    return outputs
            if not self.adapters.holds():
                self.adapters.read()
            if not fingerprint.holds() or not fingerprint.reachable():
                self._renew()
            else:
                self.changes = 0
            reason = self.reason
            if key is None:
                reason = "an argument that is neither a tensor nor a plain value"
            elif reason is None:
                entry = self._entry(key)
                if entry is not None and entry.graph is not None and entry.written not in (None, self.adapters.written):
                    self.pool.drop(entry)
                if entry is None:
                    entry = self._remember(key)
                elif entry.graph is not None:  # of a state that the module was in before
                    return self._replay(entry, leaves, device, constant)
                elif entry.reason is None and not self._somewhere(self._unsettled(entry), device):
                    wanted = None if self.keep else without_graph
                    call = CallToCapture(eager, leaves, spec, device, constant, wanted)
                    self._capture(entry, device, partial(self._capture_on_device, entry, call))
                    if entry.graph is not None:
                        return self._replay(entry, leaves, device, constant)
        cold = reason is None and self._warm_up(eager, leaves, spec)
        self.adapters.follow()
        if reason is not None:
            self.log.fell_back(self.path, f"no graph: {reason}")
        if without_graph is not None and (reason is not None or (entry is not None and entry.reason is not None)):
            return without_graph()
        lists = [(given, list(given)) for given in (*args, *kwargs.values()) if type(given) is list]
        with self.trials.noting() as asked:
            outputs = eager(*args, **kwargs)  # outside the lock: eager calls of several threads may overlap
        if reason is None:
            self._follow()
        if entry is not None and any(grew(*pair) for pair in lists):
            entry.reason = "writes into a list that it is given, which a graph would not"
        self._settle(entry, asked, device, cold)
        if entry is not None:
            entry.factor = self.adapters.factor
            entry.eager_calls *= not self.adapters.fresh
        return outputs

    def look(self) -> Fingerprint:
        """The module as it is, whose graphs read no memory given back since; for a call that is about to come."""
        with self.adapters.used(), self.pool.lock:
            if not self.trusting and not self.adapters.seem():  # a replay in vain would take longer than to look
                self.adapters.read()
            now = self.fingerprint
            return self._renew() if now is None or not now.reachable() else now

    def _settle(self, entry: Entry | None, asked: dict, device: torch.device, cold: bool) -> None:
        """Runs trials that were asked for: all after the very first call, none after a shape's first, else a few."""
        open_: Iterable[Hashable] = asked
        if asked and (cold or entry is None or entry.eager_calls):
            torch.cuda.current_stream(device).synchronize()  # for the call itself, which is not to count
            open_ = self.trials.work(asked, float("inf") if cold else SETTLING)
        if entry is not None:
            entry.open_trials, entry.eager_calls = tuple(open_), entry.eager_calls + 1

    def _somewhere(self, flag: bool, device: torch.device) -> bool:
        """Whether it is so here, or on a rank that computes with this one."""
        return flag if self.ranks is None else self.ranks.any(flag, device)

    def _unsettled(self, entry: Entry) -> bool:
        waits = entry.eager_calls < PATIENCE and bool(self.trials.open(entry.open_trials))
        return waits or entry.eager_calls < self.eager_calls

    def _stands(self, pending: Replayed, variant: tuple) -> bool:
        """Whether a call now would replay the same graph, over the weights that it has read."""
        with self.pool.lock:
            now = self.fingerprint
            return (
                pending.key[-2:] == (switches(), variant)
                and now is pending.fingerprint
                and now.reachable()
                and (now.versions(), self.adapters.versions()) == pending.versions
                and now.holds()
                and self.adapters.holds()
            )

    def begin(
        self, args: tuple, kwargs: dict, variant: tuple = (), at_once: bool = False, key: tuple | None = None
    ) -> Replayed | None:
        """Launches the replay for a call to come, on the current stream, where there is a graph for it; else None.
        at_once: it is read without such a call, so nobody asks whether weights were changed meanwhile. key: of the
        replay of one with other tensors in the same flat args."""
        leaves = list(args)
        if key is None:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            if (key := key_of(leaves, spec, variant)) is None:
                return None
        with self.adapters.used(), self.pool.lock:
            entry, fingerprint = self._entry(key), self.fingerprint
            if entry is None or entry.graph is None or fingerprint is None or not fingerprint.reachable():
                return None
            versions = () if at_once else (fingerprint.versions(), self.adapters.versions())
            if None in versions:
                return None
            return Replayed(key, fingerprint, versions, self._replay(entry, leaves, entry.graph.device, None))

    def _warm_up(self, eager: Callable, leaves: list, spec: pytree.TreeSpec) -> bool:
        """Compiles kernels in parallel before the first call of a kind; returns whether it is the very first call.

        Not where something forbids a graph: the user's hooks must not see a dry run. An error comes again in the call.
        """
        key, first = None if self.kernel_key is None else self.kernel_key(leaves), not self.warm
        if key in self.warm:
            return False
        self.warm.add(key)
        try:
            with warmup():
                args, kwargs = pytree.tree_unflatten(leaves, spec)  # lists of its own: some forwards empty theirs
                waited(eager(*args, **kwargs))
        except Exception as error:
            reason_of(error)
        return first

    def _renew(self) -> Fingerprint:
        """Takes a new fingerprint of the module, and drops graphs of states that are no longer kept."""
        self.adapters.keep(self.module.modules())
        now, new = self.states.renew(self._taken)
        if new:
            self.changes += bool(self.entries)
            for key in [key for key in self.entries if key[0] not in self.states.known]:
                self.pool.drop(self.entries.pop(key))
        restless = "the module changes between any two calls" if self.changes >= RESTLESS else None
        self.reason = restless or self.obstacle(self.module)
        return now

    def _taken(self) -> Fingerprint:
        return Fingerprint(self.module, self.ignored, self.watched, self.adapters)

    def _follow(self) -> None:
        """Follows weights that an eager call has stacked for one product, unless a graph reads them."""
        with self.pool.lock:
            if not any(entry.graph is not None for entry in self.entries.values()):
                self.states.follow(self._taken, len(self.adapters.apart()))

    def _entry(self, key: tuple | None) -> Entry | None:
        """Of this call in the present state."""
        return None if key is None else self.entries.get((self.states.number, *key))

    def _remember(self, key: tuple) -> Entry:
        if len(self.entries) >= MOST_SHAPES:
            self.pool.drop(self.entries.pop(next(iter(self.entries))))
        return self.entries.setdefault((self.states.number, *key), Entry())

    def _capture(self, entry: Entry, device: torch.device, capture: Callable[[bool], None]) -> None:
        """capture(crowded): whether all other graphs must go first."""
        crowded = self._crowded(device)
        self._try(capture, crowded, entry, device)
        if not crowded and self._crowded(device):
            # Not together with the others: memory of graphs is given back only where all go.
            entry.evictions, entry.graph = entry.evictions + 1, None
            if entry.evictions > CROWDED:
                entry.reason = "together with the graphs in use it takes more than graph_memory_gb allows"
            self.pool.clear(alone=self.ranks is None)
            if not self._somewhere(entry.reason is not None, device):
                self._try(capture, False, entry, device)
        if self._somewhere(entry.graph is None, device) and entry.graph is not None:
            entry.graph, entry.reason = None, "another rank could not capture it"

    def _crowded(self, device: torch.device) -> bool:
        return self._somewhere(self.pool.used_mb(device) > self.pool.limit_mb(device), device)

    def _try(self, capture: Callable[[bool], None], crowded: bool, entry: Entry, device: torch.device) -> None:
        try:
            with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad(), self.trials.noting():
                capture(crowded)
        except Exception as error:
            # Whatever a forward may raise under capture, also of CUDA and of the memory a graph keeps: this shape stays
            # eager. A GPU that has failed says so at the next line that waits for it.
            entry.fail(error)
            self.reason = Entry.hopeless(self.entries.values(), error) if self.ranks is None else self.reason
            self.pool.handles.pop(device, None)
            torch.cuda.current_stream(device).synchronize()
            gc.collect()
            torch.cuda.empty_cache()

    def _capture_on_device(self, entry: Entry, call: CallToCapture, crowded: bool) -> None:
        device, without_graph = call.device, call.without_graph
        inputs, run = call.on_buffers(self.adapters, entry.factor)
        timed = self.ranks is None  # else it would run more often than elsewhere
        if timed:
            entry.eager_ms, launching = milliseconds(run, device)
        if timed and without_graph is not None:
            if launching < LEAST_LAUNCHING * entry.eager_ms:
                entry.reason = f"a graph gains nothing here ({launching:.2f} ms to launch {entry.eager_ms:.2f} ms)"
                return
            # Twice: the first run of its shape may be the one that makes a plan for it, as cuDNN does.
            entry.eager_ms = min(entry.eager_ms, *(milliseconds(without_graph, device)[0] for _ in range(2)))

        if crowded:
            self.pool.clear(alone=self.ranks is None)
        torch.cuda.empty_cache()
        memory = CaptureMemory(device)
        graph, made, copies = capture_with_copies(
            run, partial(self.pool.handle, device), partial(self._somewhere, device=device)
        )
        entry.written = None if self.adapters.complete() else self.adapters.written
        entry.graph = CapturedGraph.of(graph, device, inputs, made, copies)
        entry.memory_mb = memory.taken_mb(entry.graph)
        # What else the GPU does at a moment must not decide for all calls to come: eager runs have been timed thrice.
        if timed:
            entry.graph_ms = min(milliseconds(graph.replay, device)[0] for _ in range(1 if self.keep else 3))
        if entry.memory_mb > self.pool.limit_mb(device):
            entry.reason = f"its graph takes {entry.memory_mb:.0f} MB, more than graph_memory_gb allows"
        elif timed and entry.graph_ms > (1 - LEAST_GAIN) * entry.eager_ms and not self.keep:
            entry.reason = f"a graph gains nothing here ({entry.graph_ms:.2f} ms, eager {entry.eager_ms:.2f} ms)"
        if entry.reason is not None:
            self.pool.drop(entry)
        else:
            self.pool.bound_outputs(self.entries.values(), entry, device)

    def _replay(self, entry: Entry, leaves: list, device: torch.device, constant: LoopConstant | None) -> Any:
        held = entry.graph
        assert held is not None
        self.replays += 1
        entry.last_replay, entry.evictions = self.replays, max(0.0, entry.evictions - FORGIVEN)
        with torch.cuda.device(device):
            stream, done = torch.cuda.current_stream(), self.pool.done[device]
            stream.wait_event(done)
            self.adapters.fill(entry.factor, self.trusting)
            held.inputs.fill(leaves, constant)
            with nullcontext() if self.ranks is None else self.ranks.exchange():
                held.graph.replay()
            outputs = [o.clone() if isinstance(o, torch.Tensor) else o for o in held.outputs]
            done.record(stream)
        return pytree.tree_unflatten(outputs, held.spec)

    def rows(self) -> list[dict]:
        """One row a shape, for the report."""
        return [entry.row(self.path, key[1]) for key, entry in self.entries.items()]
