"""A captured graph with its buffers, what is known of one input shape, and the key of a shape."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from accel.comparison import tensor_leaves
from accel.cuda_graphs.adapter_buffers import AdapterBuffers
from accel.cuda_graphs.fingerprint import Fingerprint
from accel.cuda_graphs.host_copies import HostCopies
from accel.errors import logged, out_of_memory
from accel.fusion.float32_precision import convolutions_in_tf32, products_in_tf32
from accel.fusion.stacked_linears import StackedLinears
from accel.libraries.code import comes_from
from accel.parallel.sequences import waited
from accel.quantization.adapters import BUFFERS

FAILED = "capture failed"
HOPELESS = 3  # shapes whose captures fail, as of a forward that reads from the GPU


@dataclass(frozen=True)
class LoopConstant:
    """An input that stays the same through a loop, such as a prompt; `joint` projects it once.

    Valid while the caller passes the same tensor in the same loop, and neither it nor the weights change, as autograd
    counts. An edit through `.data` in the middle of a loop is seen by the next loop.
    """

    tensor: torch.Tensor
    joint: StackedLinears
    loop: int

    def source(self) -> tuple:
        buffers = BUFFERS.get()
        adapters = None if buffers is None else (buffers.written, buffers.filled)
        return self.tensor, self.tensor._version, self.joint.versions(), self.loop, adapters


class InputBuffers:
    """Fixed buffers on the module's device for the tensors among the leaves of a call.

    place: of the loop constant among them, None for none. source: the tensor last copied there, its version and loop.
    """

    def __init__(self, leaves: list, device: torch.device, constant: LoopConstant | None):
        given = _tensors(leaves)
        self.buffers = [torch.empty_like(tensor, device=device) for tensor in given]  # laid out as they are
        self.place = None if constant is None else next(i for i, t in enumerate(given) if t is constant.tensor)
        self.source: tuple = ()

    def substituted(self, leaves: list) -> list:
        """The leaves with these buffers in place of their tensors."""
        fixed = iter(self.buffers)
        return [next(fixed) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def fill(self, leaves: list, constant: LoopConstant | None) -> None:
        given, buffers = _tensors(leaves), list(self.buffers)
        if constant is not None and self.place is not None:
            buffer, tensor = buffers.pop(self.place), given.pop(self.place)
            if not self.source or self.source[0] is not tensor or self.source[1:] != constant.source()[1:]:
                buffer.copy_(tensor, non_blocking=True)
                constant.joint.keep(buffer)
                self.source = constant.source()
        if buffers:
            torch._foreach_copy_(buffers, given, non_blocking=True)  # in one launch where they are alike


class CallToCapture(NamedTuple):
    """A call that is to become a graph. without_graph: as of `GraphRunner`."""

    eager: Callable
    leaves: list
    spec: pytree.TreeSpec
    device: torch.device
    constant: LoopConstant | None
    without_graph: Callable | None

    def on_buffers(self, adapters: AdapterBuffers, factor: float) -> tuple[InputBuffers, Callable[[], Any]]:
        """Buffers for its inputs, filled, and what runs it on these."""
        inputs = InputBuffers(self.leaves, self.device, self.constant)
        adapters.asked.clear()
        adapters.fill(factor)
        inputs.fill(self.leaves, self.constant)
        leaves = inputs.substituted(self.leaves)

        def run() -> Any:
            args, kwargs = pytree.tree_unflatten(leaves, self.spec)  # anew: some forwards empty their lists
            adapters.advance()
            return waited(self.eager(*args, **kwargs))

        return inputs, run


class CapturedGraph(NamedTuple):
    """A graph, the buffers it reads, and the leaves it writes, with their structure. copies: it reads these too."""

    graph: torch.cuda.CUDAGraph
    device: torch.device
    inputs: InputBuffers
    outputs: list
    spec: pytree.TreeSpec
    copies: HostCopies

    @classmethod
    def of(
        cls, graph: torch.cuda.CUDAGraph, device: torch.device, inputs: InputBuffers, made: Any, copies: HostCopies
    ) -> "CapturedGraph":
        """made: what the call gave. Raises TypeError where that holds an object of transformers', such as a cache."""
        outputs, spec = pytree.tree_flatten(made)
        kinds = {kind for kind in map(type, outputs) if any(comes_from(one, "transformers") for one in kind.__mro__)}
        if kinds:
            raise TypeError(f"it gives a {kinds.pop().__name__}, which a graph does not make anew")
        return cls(graph, device, inputs, outputs, spec, copies)

    @property
    def beside_mb(self) -> float:
        """Memory outside of the pool that it reads: input buffers and copies of host tensors."""
        held = (*self.inputs.buffers, *(copy.device for copy in self.copies.found))
        return sum(tensor.nbytes for tensor in held) / 2**20

    @property
    def outputs_mb(self) -> float:
        """Memory of the pool that no other graph may use, since outputs are copied out only after a replay."""
        storages = {o.data_ptr(): o.untyped_storage() for o in self.outputs if isinstance(o, torch.Tensor)}
        return sum(storage.nbytes() for storage in storages.values()) / 2**20


@dataclass
class Entry:
    """One input shape: at first without a graph, then with one, or with the reason why it stays eager."""

    reason: str | None = None
    graph: "CapturedGraph | None" = None
    eager_ms: float = 0.0
    graph_ms: float = 0.0
    memory_mb: float = 0.0
    open_trials: tuple = ()  # trials of its kernels that were unfinished after its last call
    eager_calls: int = 0  # eager calls so far
    evictions: float = 0.0  # how often, of late, all graphs together went beyond the memory limit when it was captured
    last_replay: int = 0  # the number of its last replay, among all replays of its runner
    factor: float = 1.0  # of all adapters' scales in such a call
    written: int | None = None  # of `AdapterBuffers`, where the graph also reads adapters elsewhere

    def fail(self, error: Exception) -> None:
        self.graph, self.reason = None, f"{FAILED}: {logged(error)}"

    @staticmethod
    def hopeless(entries: "Iterable[Entry]", error: Exception) -> str | None:
        """Why no shape is captured any more: none has a graph, several failed, now of this, with memory enough."""
        known = list(entries)
        failed = [one.reason for one in known if one.reason is not None and one.reason.startswith(FAILED)]
        alike = len(failed) >= HOPELESS and not any(one.graph for one in known) and not out_of_memory(error)
        return failed[-1] if alike else None

    def row(self, path: str, inputs: str) -> dict:
        """For the report."""
        awaited = "its kernels are being chosen" if self.open_trials else "seen too seldom so far"
        return {
            "path": path,
            "inputs": inputs,
            "status": "graph" if self.graph else "eager",
            "reason": self.reason or ("" if self.graph else f"{awaited}; captured in a later call"),
            "eager_ms": round(self.eager_ms, 3),
            "graph_ms": round(self.graph_ms, 3),
            "memory_mb": round(self.memory_mb, 1),
        }


class Replayed(NamedTuple):
    """A replay launched before its call. versions: of the weights and adapters it read; empty if nobody asks."""

    key: tuple
    fingerprint: Fingerprint
    versions: tuple[int | None, ...]
    outputs: object

    def tensors(self) -> list[torch.Tensor]:
        return tensor_leaves(self.outputs)


def key_of(leaves: list, spec: pytree.TreeSpec, variant: tuple) -> tuple | None:
    """What a graph depends on besides the module: shapes, dtypes, plain values, and torch's numeric switches."""
    shapes: list[str] = []
    parts: list[tuple] = []
    for leaf in leaves:
        if type(leaf) is torch.Tensor:
            shapes.append("x".join(map(str, leaf.shape)) or "scalar")
            parts.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        elif leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.device):
            parts.append((type(leaf), leaf))
        else:
            return None
    return ", ".join((*shapes, *map(str, variant))), tuple(parts), spec, switches(), variant


def grew(given: list, before: list) -> bool:
    """Whether something was added to a list that a call was given."""
    known = set(map(id, before))
    return any(id(value) not in known for value in given)


def switches() -> tuple:
    """Global settings of torch that change which kernels run."""
    return (
        products_in_tf32(),
        convolutions_in_tf32(),
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )


def _tensors(leaves: list) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
