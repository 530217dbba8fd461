"""The `quantization_config` in config.json of a folder in the layout of compressed-tensors.

The configuration and the tensors beside it may disagree, and trusting either alone could give wrong weights in silence.
So both are read, and compared.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accel_kernels.gemm.quantized_weight import Quantized

PATTERN = "re:"  # in front of a regular expression among paths
LINEAR = "Linear"  # a class among paths
ORDERED = "group"  # the value of `actorder` with which columns of one group lie apart
FIELD = "quantization_config"
KINDS = ("int", "float")
STRATEGIES = ("tensor", "channel", "group")


@dataclass(frozen=True)
class Group:
    """One of `config_groups`. bits, kind, symmetric, strategy, size, ordered: of weights. activations: as they are."""

    name: str
    targets: tuple[str, ...]
    bits: int
    kind: str
    symmetric: bool
    strategy: str
    size: int | None
    ordered: bool
    activations: Mapping

    def contradicts(self, weight: Quantized, scales: torch.Tensor, ordered: bool) -> str | None:
        """How a weight contradicts it, if it does. scales: as in the file; ordered: the file orders columns."""
        columns, found = weight.shape[1], 1 if scales.numel() == 1 else scales.shape[-1]
        size = {"tensor": columns, "channel": columns}.get(self.strategy, self.size)
        held = "float" if weight.data.is_floating_point() else "int"
        pairs = [
            ("num_bits", self.bits, weight.format.bits),
            ("type", self.kind, held),
            ("symmetric", self.symmetric, weight.zeros is None),
            ("group_size", size, columns // found),
            ("actorder", *(ORDERED if one else None for one in (self.ordered, ordered))),
        ]
        if self.strategy == "tensor" and scales.numel() != 1:
            pairs.append(("strategy", "tensor", f"{scales.shape[0]} scales"))
        differing = ((name, said, own) for name, said, own in pairs if said != own)
        texts = (f"{name} is {said!r} in {FIELD} and {own!r} in the tensors" for name, said, own in differing)
        return next(texts, None)


class QuantizationConfig:
    """A `quantization_config`, read. Raises ValueError for a field of another kind than it must be, naming it."""

    def __init__(self, fields: Mapping):
        groups = typed_field(fields, "config_groups", Mapping, FIELD)
        self.groups = [_group(f"{FIELD}.config_groups.{name}", name, found) for name, found in groups.items()]
        self.ignored = tuple(_texts(fields, "ignore", FIELD, ()))

    def group(self, path: str) -> Group | None:
        """That of a linear: a group that names it goes before one that names all linears."""
        ranked = [(rank, group) for group in self.groups if (rank := _rank(group.targets, path)) is not None]
        return min(ranked, key=lambda one: one[0])[1] if ranked else None

    def leaves(self, path: str) -> bool:
        """Whether it excludes this linear from quantization."""
        return _rank([one for one in self.ignored if one != LINEAR], path) is not None


def _group(where: str, name: str, found: object) -> Group:
    if not isinstance(found, Mapping):
        raise ValueError(f"{where} is {found!r}, not an object")
    weights = typed_field(found, "weights", Mapping, where)
    inside = f"{where}.weights"
    size = typed_field(weights, "group_size", int, inside, None)
    size = None if size == -1 else size
    usual = "channel" if weights.get("group_size") == -1 else "tensor" if size is None else "group"
    strategy = typed_field(weights, "strategy", str, inside, usual)
    if strategy not in STRATEGIES:
        raise ValueError(f"{inside}.strategy is {strategy!r}; read are {', '.join(STRATEGIES)}")
    if strategy == "group" and (size is None or size < 1):
        raise ValueError(f"{inside}.group_size is {size!r}, and strategy is 'group'")
    kind = typed_field(weights, "type", str, inside, "int")
    if kind not in KINDS:
        raise ValueError(f"{inside}.type is {kind!r}; read are {', '.join(KINDS)}")
    return Group(
        name,
        tuple(_texts(found, "targets", where)),
        typed_field(weights, "num_bits", int, inside, 8),
        kind,
        typed_field(weights, "symmetric", bool, inside, True),
        strategy,
        size,
        typed_field(weights, "actorder", str, inside, None) == ORDERED,
        typed_field(found, "input_activations", Mapping, where, {}) or {},
    )


MISSING = object()
NAMES = {Mapping: "an object", int: "a whole number", str: "a text", bool: "true or false", Sequence: "a list"}


def typed_field(fields: Mapping, name: str, kind: type, where: str, usual: object = MISSING) -> Any:
    """The value of a field, `usual` where it is not there or null."""
    value = fields.get(name)
    if value is None and usual is not MISSING:
        return usual
    wrong = not isinstance(value, kind) or (kind is int and isinstance(value, bool))
    if wrong or (kind is Sequence and isinstance(value, str)):
        raise ValueError(f"{where}.{name} is {value!r}, not {NAMES[kind]}")
    return value


def _texts(fields: Mapping, name: str, where: str, usual: object = MISSING) -> Sequence[str]:
    values = typed_field(fields, name, Sequence, where, usual)
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"{where}.{name} holds {value!r}, not a text")
        try:
            re.compile(value.removeprefix(PATTERN) if value.startswith(PATTERN) else "")
        except re.error as error:
            raise ValueError(f"{where}.{name} holds {value!r}: {error}") from None
    return values


def _rank(targets: Sequence[str], path: str) -> int | None:
    """How closely one of the targets names a path: 0 for itself, 1 for a pattern, 2 for all linears, None for none."""
    if path in targets:
        return 0
    if any(one.startswith(PATTERN) and re.match(one.removeprefix(PATTERN), path) for one in targets):
        return 1
    return 2 if LINEAR in targets else None
