"""Scales moved from the inputs of linear layers into what stands before them, without changing what a model computes.

What stands before which linears is read off the formulas of the layers (see `LayerSpec`), not off names or classes.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accel.llm.attention_spec import SEPARATE, split
from accel.llm.formulas import formulas
from accel.llm.layer_spec import LayerSpec
from accel.llm.linear import Weights, weights
from accel.llm.norm_spec import NormSpec
from accel.llm.quant.layer_work import matrix, put
from accel.llm.understanding import NotUnderstood
from accel.norm_kind import NormKind
from accel.patch import set_data

# Positively homogeneous: act(s x) = s act(x) for s > 0.
HOMOGENEOUS = {"relu"}


@dataclass(frozen=True)
class BeforeNorm:
    """A norm whose output goes to the linears, and nowhere else."""

    module: nn.Module
    kind: NormKind

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.module,)

    def tied(self, sizes: Tensor) -> Tensor:
        """(K,) of which a scale is made: as they are."""
        return sizes

    def divide(self, scales: Tensor) -> list[str]:
        """Its output becomes 1 / scales of what it was. Returns the names of the parameters that changed."""
        offset = self.kind.offset
        parameters = self.module._parameters
        set_data(parameters[self.kind.weight], lambda w: ((w.float() + offset) / scales - offset).to(w.dtype))
        if self.kind.bias is None:
            return [self.kind.weight]
        set_data(parameters[self.kind.bias], lambda b: (b.float() / scales).to(b.dtype))
        return [self.kind.weight, self.kind.bias]


@dataclass(frozen=True)
class BeforeRows:
    """A linear of whose outputs the others' inputs are multiples, or sums over tokens. rows: (K,) which of them."""

    module: nn.Module
    rows: Tensor

    def tied(self, sizes: Tensor) -> Tensor:
        """(K,), the mean of those that come from one output: heads of queries may share values."""
        outputs = matrix(self.module).shape[0]
        rows = self.rows.to(sizes.device)
        total = sizes.new_zeros(outputs).index_add_(0, rows, sizes)
        return (total / torch.bincount(rows, minlength=outputs).clamp_min(1))[rows]

    def divide(self, scales: Tensor) -> list[str]:
        """As of a norm. scales: equal where they are of one output."""
        weight = matrix(self.module)
        factors = torch.ones(len(weight), device=scales.device).index_copy_(0, self.rows.to(scales.device), 1 / scales)
        put(self.module, weight.float() * factors[:, None])
        if self.module.bias is None:
            return ["weight"]
        set_data(self.module.bias, lambda b: (b.float() * factors).to(b.dtype))
        return ["weight", "bias"]


@dataclass(frozen=True)
class Group:
    """Linears that share an input. label: what they are in the layer; paths: from the model. before: None where
    nothing can take the scale, for this reason.
    """

    label: str
    paths: tuple[str, ...]
    before: BeforeNorm | BeforeRows | None
    reason: str = ""

    def fold(self, model: nn.Module, scales: Tensor) -> dict[str, nn.Parameter]:
        """Divides the input by scales, (K,) in float32, and multiplies the weights by them: the same products.

        Returns all parameters that changed, by path.
        """
        changed = {}
        owner = next(path for path, module in model.named_modules() if module is self.before.module)
        for name in self.before.divide(scales):
            changed[f"{owner}.{name}"] = self.before.module._parameters[name]
        for path in self.paths:
            module = model.get_submodule(path)
            put(module, matrix(module).float() * scales)
            changed[f"{path}.weight"] = module.weight
        return changed


def layer_groups(model: nn.Module) -> dict[str, list[Group]]:
    """The groups of every decoder layer, by its path. Raises NotUnderstood."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    found = formulas(model, {})
    return {layer.path: _Layer(layer.layer, layer.path, spec, owners).groups() for layer, spec in found}


def middle(scales: Tensor) -> Tensor:
    """Between the largest and the smallest: scales over it are about 1, and keep half precision in range."""
    return (scales.max() * scales.min()).sqrt()


class _Layer:
    def __init__(self, layer: nn.Module, path: str, spec: LayerSpec, owners: Counter):
        self.layer, self.path, self.spec, self.owners = layer, path, spec, owners

    def groups(self) -> list[Group]:
        attention, mlp = self.spec.attention, self.spec.mlp
        before = [("attention", attention.projections, lambda: self._norm(self.spec.before_attention))]
        if self.spec.shared:
            label = "attention and MLP"
            before = [(label, (*attention.projections, *mlp.first), lambda: self._shared())]
        elif mlp.first:
            before.append(("MLP", mlp.first, lambda: self._norm(self.spec.before_mlp)))
        before.append(("attention's output", (attention.out,), self._values))
        if mlp.first:
            before.append(("MLP's output", (mlp.down,), self._up))
        return [self._group(*each) for each in before]

    def _group(self, label: str, names: Iterable[str], before) -> Group:
        paths = tuple(f"{self.path}.{name}" for name in names)
        try:
            self._own(names)
            return Group(label, paths, before())
        except NotUnderstood as reason:
            return Group(label, paths, None, str(reason))

    def _own(self, names: Iterable[str]) -> None:
        """Raises NotUnderstood for a linear whose weight may not be changed alone."""
        for name in names:
            module = self.layer.get_submodule(name)
            if type(weights(module)) is not Weights:
                raise NotUnderstood(f"{name} is more than a weight and a bias, or quantised")
            self._unshared(name, module)

    def _unshared(self, name: str, module: nn.Module) -> None:
        if any(self.owners[id(p)] > 1 for p in module._parameters.values() if p is not None):
            raise NotUnderstood(f"{name} has parameters that another module has too")

    def _norm(self, norm: NormSpec | None) -> BeforeNorm:
        if norm is None:
            raise NotUnderstood("no norm stands before it")
        if norm.kind is None or norm.kind.weight is None:
            raise NotUnderstood(f"{norm.name} is no norm with a weight")
        spec = self.spec
        around = (spec.before_attention, spec.post_attention, spec.after_attention)
        norms = (*around, spec.before_mlp, spec.post_mlp, spec.after_mlp)
        if sum(other is not None and other.name == norm.name for other in norms) > 1:
            raise NotUnderstood(f"{norm.name} stands at another place too")
        module = self.layer.get_submodule(norm.name)
        self._unshared(norm.name, module)
        return BeforeNorm(module, norm.kind)

    def _shared(self) -> BeforeNorm:
        if not self.spec.mlp.first:
            raise NotUnderstood(f"{self.spec.mlp.whole} is given the same, and called as a whole")
        return self._norm(self.spec.before_attention)

    def _values(self) -> BeforeRows:
        """Every head's result is a mean of values."""
        spec = self.spec.attention
        self._own(spec.projections)
        modules = [self.layer.get_submodule(name) for name in spec.projections]
        layout = {"layout": spec.layout, "heads": spec.heads, "groups": spec.groups, "kv_heads": spec.kv_heads}
        numbers = [torch.arange(matrix(module).shape[0])[None, None] for module in modules]
        _, _, values = split(numbers, **layout, dim=spec.dim)
        rows = values.repeat_interleave(spec.heads // spec.kv_heads, dim=-2).flatten()
        if len(rows) != matrix(self.layer.get_submodule(spec.out)).shape[1]:
            raise NotUnderstood("its inputs are not the heads' values one for one")
        return BeforeRows(modules[2 if spec.layout == SEPARATE else 0], rows)

    def _up(self) -> BeforeRows:
        """What the activation is multiplied by."""
        spec = self.spec.mlp
        self._own(spec.first)
        module = self.layer.get_submodule(spec.first[-1])
        rows = torch.arange(matrix(module).shape[0])
        if spec.halves is not None:
            first, second = rows.chunk(2)
            return BeforeRows(module, second if spec.halves else first)
        if len(spec.first) == 1 and spec.activation not in HOMOGENEOUS:
            raise NotUnderstood(f"{spec.activation} of a multiple is no multiple of {spec.activation}")
        return BeforeRows(module, rows)
