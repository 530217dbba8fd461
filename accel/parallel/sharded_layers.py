"""Layers that transformers has divided among ranks. The one file that knows its parallel layers and torch's DTensor.

transformers keeps the class of a divided layer. Its weights become DTensors, of which each rank holds a part, and a
closure in `vars(module)["forward"]` does what is to be done before and after. In the closure's cells are the style (a
`TensorParallelLayer`), the mesh of ranks, and the forward beneath. So it is in 5.17 and 5.23.
"""

import inspect
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from accel.parallel.ranks import Ranks

STYLES = "transformers.distributed.tensor_parallel"
TENSORS = "torch.distributed.tensor"
OUTPUTS, INPUTS = 0, 1  # which dimension of a weight (outputs, inputs) is divided; of a table, words and channels


class Sharding(NamedTuple):
    """How one layer is divided. dim: of its weight, `OUTPUTS` or `INPUTS`.

    gathers: the ranks' outputs are put side by side, so that each rank has all of them. splits: it is given whole
    inputs and takes its part of them. Where inputs or the words of a table are divided, the ranks' results are summed.
    style, mesh: of transformers and torch, by which a layer in its place is divided alike.
    """

    dim: int
    gathers: bool
    splits: bool
    ranks: Ranks
    style: Any
    mesh: Any

    def install(self, module: nn.Module) -> None:
        """Lets another module that holds this rank's part of the weight do before and after what this layer does."""
        self.style.install_forward(module, self.mesh)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is divided among ranks, always the same object; any other tensor itself.

    `to_local` would make a view: what is moved into one storage with others would stay where it was.
    """
    if type(tensor) is torch.Tensor or type(tensor) is nn.Parameter or not divided(tensor):
        return tensor
    return tensor._local_tensor  # type: ignore[attr-defined]


def divided(tensor: torch.Tensor | None) -> bool:
    """Whether ranks hold parts of it, or copies that they share: a DTensor. There is none before its module is."""
    kind = getattr(sys.modules.get(TENSORS), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def division(tensor: torch.Tensor | None) -> int | None:
    """The dimension along which ranks have divided a tensor; None for one that each has whole."""
    if tensor is None or not divided(tensor):
        return None
    dims = [one.dim % tensor.dim() for one in tensor.placements if hasattr(one, "dim")]  # type: ignore[attr-defined]
    return dims[0] if dims else None


def sharding(module: nn.Module) -> Sharding | None:
    """How transformers has divided this linear or embedding; None for any other, or a way that is not known.

    Its closure is then all that stands in the place of the code of its class.
    """
    held = _closure(module)
    if held is None or held["mesh"].ndim != 1:
        return None
    how = _how(held["self"], isinstance(module, nn.Embedding))
    weight = module._parameters.get("weight")
    if how is None or (weight is not None and not _lies(weight, how[0])):
        return None
    return Sharding(*how, Ranks.of(held["mesh"].get_group()), held["self"], held["mesh"])


def rests_without_gradients(module: nn.Module, forward: object) -> bool:
    """Whether this forward, put there by transformers, only sums the gradients of weights that all ranks hold."""
    if not inspect.isfunction(forward) or forward.__module__ != STYLES:
        return False
    held = dict(_cells(forward))
    beneath = held.get("original_forward")
    return (
        forward.__qualname__.startswith("ReplicatedWithGradAllReduce.")
        and held.get("module") is module
        and getattr(beneath, "__func__", None) is type(module).forward
    )


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks among which a model's weights are divided, or its layers work together; None where it is whole."""
    meshes = [parameter.device_mesh for parameter in model.parameters() if divided(parameter)]  # type: ignore[attr-defined]
    meshes += [held["mesh"] for held in map(_closure, model.modules()) if held is not None]
    meshes += [held["ep_mesh"] for held in map(_dispatch, model.modules()) if held is not None]
    return None if not meshes else Ranks.of(meshes[0].get_group(0))


def fully_sharded(module: nn.Module) -> bool:
    """Whether torch's FSDP, of either kind, divides the weights of this module and those in it that it does not wrap.

    They are put together before each of its calls, in memory that is taken from them afterwards.
    """
    library = sys.modules.get("torch.distributed.fsdp")
    kinds = (getattr(library, name, None) for name in ("FullyShardedDataParallel", "FSDPModule"))
    return isinstance(module, tuple(kind for kind in kinds if kind is not None))


class ExpertSharding(NamedTuple):
    """How a module of experts is divided: matrices, each rank having a part of each, or whole experts.

    first: the number of this rank's first expert where it is given numbers of all, else 0; an expert that it does not
    have adds nothing. What the ranks give is summed. style, mesh: as of `Sharding`; None for what no other module can
    be divided by.
    """

    first: int
    ranks: Ranks
    style: Any = None
    mesh: Any = None

    def install(self, module: nn.Module) -> None:
        """As `Sharding.install`."""
        self.style.install_forward(module, self.mesh)


def expert_sharding(module: nn.Module) -> ExpertSharding | None:
    """How transformers has divided the experts of this module; None for any other, or a way that is not known."""
    held, styles = _closure(module), sys.modules.get(STYLES)
    if held is not None and styles is not None:
        if type(held["self"]) is not styles.MoeExpertsParallel or held["mesh"].ndim != 1:
            return None
        return ExpertSharding(0, Ranks.of(held["mesh"].get_group()), held["self"], held["mesh"])
    held = _dispatch(module)
    if held is None or held["ep_mesh"].ndim != 1:
        return None
    way = held["implementation"]
    if getattr(way, "megamoe", None) is not None:
        return None
    way = getattr(way, "all_reduce", None) or way  # what it takes without gradients, where all ranks have one batch
    if not getattr(way, "needs_shared_batch", False) or not getattr(way, "shares_batch", False):
        return None
    ranks = Ranks.of(held["ep_mesh"].get_group())
    return ExpertSharding(ranks.rank * way.num_local_experts, ranks)


def local_twin(module: nn.Module) -> nn.Module:
    """A module of the same class and settings that holds this rank's part of the weights, and is not divided."""
    twin = type(module).__new__(type(module))
    vars(twin).update(vars(module))
    vars(twin).pop("forward", None)
    own = {name: local(one) for name, one in module._parameters.items() if one is not None}
    plain = {name: nn.Parameter(one.detach(), requires_grad=False) for name, one in own.items()}
    vars(twin)["_parameters"] = dict.fromkeys(module._parameters) | plain
    return twin


def installed_anew(module: nn.Module, quantized: nn.Module) -> None:
    """Lets a quantized linear in the place of a module do before and after what transformers' closure has that one do,
    whatever it is. Nothing where the module is not divided.
    """
    held = _closure(module)
    if held is not None:
        quantized._hf_quantized_needs_local_tp = True  # type: ignore[assignment]  # with gradients too
        held["self"].install_forward(quantized, held["mesh"])


def known(module: nn.Module) -> bool:
    """Whether what stands in the place of the code of its class is what transformers divides it by, as known here."""
    return sharding(module) is not None or expert_sharding(module) is not None


def by_transformers(forward: object) -> bool:
    """Whether this forward is one of the closures by which transformers divides layers; they keep no state."""
    return inspect.isfunction(forward) and forward.__module__.startswith("transformers.distributed.")


def _dispatch(module: nn.Module) -> dict[str, Any] | None:
    """The same of the closure by which whole experts are divided, in 5.23."""
    forward = vars(module).get("forward")
    if not by_transformers(forward):
        return None
    held = dict(_cells(forward))
    fits = {"implementation", "module", "ep_mesh"} <= held.keys() and held["module"] is module
    return held if fits and not _hooked(module) else None


def _hooked(module: nn.Module) -> bool:
    attributes = vars(module)
    return bool(attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] or "_hf_hook" in attributes)


def _closure(module: nn.Module) -> dict[str, Any] | None:
    """What is in the cells of the closure by which transformers divides a module, where nothing else hangs on it."""
    forward = vars(module).get("forward")
    if not inspect.isfunction(forward) or forward.__module__ != STYLES or STYLES not in sys.modules:
        return None
    held = dict(_cells(forward))
    if not {"self", "mesh", "module", "original_forward"} <= held.keys() or held["module"] is not module:
        return None
    beneath = held["original_forward"]
    stock = getattr(beneath, "__self__", None) is module and beneath.__func__ is type(module).forward
    return held if stock and not _hooked(module) else None


def _cells(function: Any) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell.cell_contents


def _how(style: Any, table: bool) -> tuple[int, bool, bool] | None:
    """Dimension, gathers and splits of a style of transformers; table: it divides an embedding."""
    styles, kind = sys.modules[STYLES], type(style)
    if not getattr(style, "use_local_output", False):
        return None
    if kind is getattr(styles, "EmbeddingParallel", None):
        return style.shard_dim, style.shard_dim == 1, False
    if kind not in (styles.ColwiseParallel, styles.RowwiseParallel):
        return None
    takes_part, gives_part = style.input_layouts.is_shard(-1), style.output_layouts.is_shard(-1)
    whole = style.output_layouts.is_replicate()
    if table:  # 5.17 has no style of their own for them
        columns = kind is styles.ColwiseParallel
        return None if takes_part or not whole else (int(columns), columns, False)
    if kind is styles.ColwiseParallel:
        return None if takes_part or not (gives_part or whole) else (OUTPUTS, whole, False)
    return (INPUTS, False, not takes_part) if whole else None


def _lies(weight: torch.Tensor, dim: int) -> bool:
    """Whether a weight is divided along this dimension, and no other way."""
    if not divided(weight):
        return False
    (placement,) = weight.placements  # type: ignore[attr-defined]
    return type(placement).__name__ == "Shard" and placement.dim % weight.dim() == dim
