"""How weights in files are divided among ranks: along which dimension, and what each rank holds.

The model's plan, the styles behind it, the conversions between file and model, and DTensor decide that, and all of them
change. So transformers' own loading is run on a model without memory, once for each rank, and what it asks of each
tensor in the files is noted.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from accel.libraries.loading import distribute, load_from, no_tie_weights

Span = tuple[int, int]  # first, and one past the last


class Division(NamedTuple):
    """How a tensor is divided along one dimension: by rank, the spans of it that the rank holds, one behind another."""

    dim: int
    spans: tuple[tuple[Span, ...], ...]


class TensorInfo(NamedTuple):
    """A tensor in a file. shape: of all of it; dtype: of torch."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def taken(tensor: torch.Tensor, division: Division | None, rank: int) -> torch.Tensor:
    """The rank's part of a whole tensor, or of what safetensors gives for one in a file."""
    if division is None:
        return tensor[...]

    def rows(start: int, stop: int) -> torch.Tensor:
        index = (slice(None),) * division.dim + (slice(start, stop),)
        return tensor[index]

    parts = [rows(*span) for span in division.spans[rank]] or [rows(0, 0)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, division.dim)


def spans_of(index: Any, shape: tuple[int, ...]) -> tuple[Span, ...]:
    """What an index of slices, or of an ellipsis, takes of every dimension."""
    index = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
    slices = [*index, *[slice(None)] * (len(shape) - len(index))]
    found = []
    for size, one in zip(shape, slices, strict=True):
        start, stop, step = one.indices(size)
        if step != 1:
            raise ValueError(f"every {step}th of a tensor's rows is asked for")
        found.append((start, max(start, stop)))
    return tuple(found)


class Divided(NamedTuple):
    """tensors: the division by the names in the files, None for a whole one. plan: styles by names of layers."""

    tensors: dict[str, Division | None]
    plan: dict[str, str]


def divided_among(config: PretrainedConfig, tensors: Mapping[str, TensorInfo], ranks: int) -> Divided:
    """How transformers divides a causal language model among so many ranks when it loads files with these tensors.

    Makes process groups without other processes, one after another. Raises ValueError where the process is in a group,
    or the class has no plan. It also raises where the plan does not fit, or tensors are not those of the model.
    """
    if dist.is_initialized():
        raise ValueError("this process is one of a group of torch.distributed: divide weights in a process by itself")
    asked: list[dict[str, list[tuple[Span, ...]]]] = []
    plan: dict[str, str] = {}
    for rank in range(ranks):
        with _alone(rank, ranks) as mesh:
            with torch.device("meta"), no_tie_weights():  # plans name both of two that will be tied
                model = AutoModelForCausalLM.from_config(config)
            if not model.tp_plan:
                raise ValueError(f"transformers has no plan to divide a {type(model).__name__} among ranks")
            distribute(model, mesh)
            plan = dict(model.tp_plan)
            asked.append(_asked(model, tensors))
    return Divided({name: _division(name, one.shape, asked) for name, one in tensors.items()}, plan)


@contextmanager
def _alone(rank: int, ranks: int) -> Iterator[DeviceMesh]:
    """Inside, this process is the rank of a group whose other processes are not there."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


class _Asked:
    """Stands for a tensor in a file: of the kind that safetensors gives, and notes what is taken of it."""

    def __init__(self, described: TensorInfo):
        self.described = described
        self.taken: list[tuple[Span, ...]] = []

    def get_shape(self) -> list[int]:
        return list(self.described.shape)

    def get_dtype(self) -> str:
        return "F32" if self.described.dtype.is_floating_point else "I64"

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.taken.append(spans_of(index, self.described.shape))
        return torch.empty(self.described.shape, dtype=self.described.dtype, device="meta")[index]


def _asked(model: PreTrainedModel, tensors: Mapping[str, TensorInfo]) -> dict[str, list[tuple[Span, ...]]]:
    stand_ins = {name: _Asked(one) for name, one in tensors.items()}
    found = load_from(model, stand_ins)
    for name, file, own in sorted(found.mismatched_keys):
        raise ValueError(f"{name} is {tuple(file)} in the files and {tuple(own)} in the model, of this rank's part")
    for name, told in found.conversion_errors.items():
        raise ValueError(f"{name} cannot be made of what the files hold: {told.strip().splitlines()[-1]}")
    return {name: one.taken for name, one in stand_ins.items()}


def _division(name: str, shape: tuple[int, ...], asked: list[dict[str, list[tuple[Span, ...]]]]) -> Division | None:
    """asked: by rank, what was taken of each tensor."""
    whole = tuple((0, size) for size in shape)
    taken = [one[name] for one in asked]
    if not any(taken) or all(one == [whole] for one in taken):
        return None
    apart = {dim for one in taken for spans in one for dim in range(len(shape)) if spans[dim] != whole[dim]}
    if len(apart) > 1:
        raise ValueError(f"{name} is divided along {len(apart)} dimensions at once")
    (dim,) = apart or {0}
    return Division(dim, tuple(tuple(spans[dim] for spans in one) for one in taken))
