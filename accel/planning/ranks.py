"""Checks that all ranks which share a model optimize it, with the same options."""

from dataclasses import fields
from hashlib import blake2b
from importlib.metadata import version

from torch import nn

from accel.options import Options
from accel.parallel.agreement import require_agreement
from accel.parallel.ranks import Ranks
from accel.parallel.sharded_layers import ranks_of
from accel.planning.targets import stays_stock

LIBRARIES = ("torch", "transformers")


def agree_to_optimize(name: str, part: object, options: Options, world: Ranks | None = None) -> None:
    """Raises `errors.Refused` on all ranks where one has other options, another model or version of a library, or is
    missing. Does nothing for a model that is whole in this process.

    name: the path of the part, empty for a model alone. world: all ranks, if they divide the work of whole models.
    """
    if not isinstance(part, nn.Module) or stays_stock(part) is not None:
        return
    ranks = ranks_of(part) or world
    if ranks is None:
        return
    told: dict[str, object] = {"the model": _made_of(part)}
    told |= {f"option {field.name}": getattr(options, field.name) for field in fields(options)}
    told |= {f"the version of {library}": version(library) for library in LIBRARIES}
    require_agreement(ranks, f"accel.optimize({name})" if name else "accel.optimize", told)


def _made_of(model: nn.Module) -> str:
    """Class, and names, whole shapes and dtypes of all weights, in short."""
    weights = ";".join(f"{name} {tuple(one.shape)} {one.dtype}" for name, one in model.named_parameters())
    config = getattr(getattr(model, "config", None), "to_json_string", str)()
    told = f"{weights} {config}"
    return f"{type(model).__name__} {blake2b(told.encode(), digest_size=8).hexdigest()}"
