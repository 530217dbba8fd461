"""Scales moved from the inputs of linear layers into what stands before them, without changing what a model computes.

What stands before which linears is read off the formulas of the layers (see `LayerSpec`), not off names or classes.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from accel.fusion.norm_kind import NormKind
from accel.llm.attention.projections import KEYS, SEPARATE, split
from accel.llm.attention.softmax_attention import SoftmaxSpec
from accel.llm.parts.linear import weights
from accel.llm.parts.norm import NormSpec
from accel.llm.ptq.calibration.linears import put, weight_matrix
from accel.llm.recording.record import NotUnderstood
from accel.llm.runtime.analyze import formulas
from accel.llm.runtime.layer_spec import LayerSpec
from accel.patching.rule import set_data
from accel.quantization.linears import Dense

# Positively homogeneous: act(s x) = s act(x) for s > 0.
HOMOGENEOUS = {"relu"}


@dataclass(frozen=True, eq=False)
class BeforeNorm:
    """A norm whose output goes to the linears, and nowhere else. weight: the name of its own."""

    module: nn.Module
    kind: NormKind
    weight: str

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.module,)

    def tied(self, sizes: Tensor) -> Tensor:
        """(K,) of which a scale is made: as they are."""
        return sizes

    def divide(self, scales: Tensor) -> list[str]:
        """Its output becomes 1 / scales of what it was. Returns the names of the parameters that changed."""
        offset, weight, bias = self.kind.offset, self.weight, self.kind.bias
        held = self.module.get_parameter
        set_data(held(weight), lambda w: ((w.float() + offset) / scales - offset).to(w.dtype))
        if bias is None:
            return [weight]
        set_data(held(bias), lambda b: (b.float() / scales).to(b.dtype))
        return [weight, bias]


@dataclass(frozen=True, eq=False)
class BeforeRows:
    """A linear of whose outputs the others' inputs are multiples, or sums over tokens. rows: (K,) which of them."""

    module: Dense
    rows: Tensor

    def tied(self, sizes: Tensor) -> Tensor:
        """(K,), the mean of those that come from one output: heads of queries may share values."""
        order = self.rows.to(sizes.device).argsort(stable=True)
        times = len(self.rows) // len(self.rows.unique())  # all as often as each other
        means = sizes[order].unflatten(0, (-1, times)).mean(1)
        return torch.empty_like(sizes).index_copy_(0, order, means.repeat_interleave(times))

    def divide(self, scales: Tensor) -> list[str]:
        """As of a norm. scales: equal where they are of one output."""
        weight = weight_matrix(self.module)
        factors = torch.ones(len(weight), device=scales.device).index_copy_(0, self.rows.to(scales.device), 1 / scales)
        put(self.module, weight.float() * factors[:, None])
        if self.module.bias is None:
            return ["weight"]
        set_data(self.module.bias, lambda b: (b.float() * factors).to(b.dtype))
        return ["weight", "bias"]


@dataclass(frozen=True, eq=False)
class FoldGroup:
    """Linears that share an input. label: what they are in the layer; paths: from the model. normed: the input is that
    of the attention or the MLP, which norms usually give. before: None where nothing can take a scale, for this reason.
    """

    label: str
    normed: bool
    paths: tuple[str, ...]
    before: BeforeNorm | BeforeRows | None
    reason: str = ""

    @property
    def note(self) -> str:
        return f"{self.label}: no scale is folded: {self.reason}"

    def fold(self, model: nn.Module, scales: Tensor) -> dict[str, nn.Parameter]:
        """Divides the input by scales, (K,) in float32, and multiplies the weights by them: the same products.

        Returns all parameters that changed, by path. Raises NotUnderstood where nothing can take the scales.
        """
        before = self.before
        if before is None:
            raise NotUnderstood(self.note)
        owner = next(path for path, module in model.named_modules() if module is before.module)
        changed = {f"{owner}.{name}": before.module.get_parameter(name) for name in before.divide(scales)}
        for path in self.paths:
            module = model.get_submodule(path)
            put(module, weight_matrix(module).float() * scales)
            changed[f"{path}.weight"] = module.get_parameter("weight")
        return changed


def layer_groups(model: nn.Module) -> dict[str, list[FoldGroup]]:
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

    def groups(self) -> list[FoldGroup]:
        attention, mlp, spec = self.spec.attention, self.spec.mlp, self.spec
        found = []
        if attention is not None and mlp is not None and spec.shared:
            both = (*attention.projections, *mlp.first)
            found.append(self._group("attention and MLP", True, both, self._shared))
        if attention is not None and not spec.shared:
            norm = partial(self._norm, spec.before_attention)
            found.append(self._group("attention", True, attention.projections, norm))
        if mlp is not None and not spec.shared:
            found.append(self._group("MLP", True, mlp.first, self._before_mlp))
        if attention is not None:
            found.append(self._group("attention's output", False, (attention.out,), self._values))
        if mlp is not None and mlp.first:
            found.append(self._group("MLP's output", False, (mlp.down,), self._up))
        return found

    def _group(self, label: str, normed: bool, names: Iterable[str], before: Callable) -> FoldGroup:
        paths = tuple(f"{self.path}.{name}" for name in names)
        try:
            self._own(names)
            return FoldGroup(label, normed, paths, before())
        except NotUnderstood as reason:
            return FoldGroup(label, normed, paths, None, str(reason))

    def _own(self, names: Iterable[str]) -> None:
        """Raises NotUnderstood for a linear whose weight may not be changed alone."""
        for name in names:
            module = self.layer.get_submodule(name)
            found = weights(module)
            if found is None or found.quantized:
                raise NotUnderstood(f"{name} is more than a weight and a bias, or quantized")
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
        around = (spec.entering, spec.before_attention, spec.post_attention, spec.after_attention)
        norms = (*around, spec.before_mlp, spec.post_mlp, spec.after_mlp)
        if sum(other is not None and other.name == norm.name for other in norms) > 1:
            raise NotUnderstood(f"{norm.name} stands at another place too")
        module = self.layer.get_submodule(norm.name)
        self._unshared(norm.name, module)
        return BeforeNorm(module, norm.kind, norm.kind.weight)

    def _before_mlp(self) -> BeforeNorm:
        self._in_parts()
        return self._norm(self.spec.before_mlp)

    def _shared(self) -> BeforeNorm:
        self._in_parts()
        return self._norm(self.spec.before_attention)

    def _in_parts(self) -> None:
        if self.spec.mlp is not None and self.spec.mlp.wholes:
            raise NotUnderstood(f"{self.spec.mlp.wholes[0]} is called as a whole")
        if self.spec.mlp is not None and self.spec.mlp.beside:
            raise NotUnderstood("several blocks take its input")

    def _values(self) -> BeforeNorm | BeforeRows:
        """Every head's result is a mean of values; a norm of it takes the scales itself."""
        spec = self.spec.attention
        if type(spec) is not SoftmaxSpec or spec.layout == KEYS:
            raise NotUnderstood("its attention is no mean of values")
        if spec.out_norm is not None:
            return self._norm(spec.out_norm)
        self._own(spec.projections)
        modules = [self.layer.get_submodule(name) for name in spec.projections]
        numbers = [torch.arange(weight_matrix(module).shape[0], device="cpu")[None, None] for module in modules]
        _, _, values = split(numbers, spec.layout, spec.heads, spec.groups, spec.kv_heads, spec.dim)
        rows = values.repeat_interleave(spec.heads // spec.kv_heads, dim=-2).flatten()
        if len(rows) != weight_matrix(self.layer.get_submodule(spec.out)).shape[1]:
            raise NotUnderstood("its inputs are not the heads' values one for one")
        return BeforeRows(modules[2 if spec.layout == SEPARATE else 0], rows)

    def _up(self) -> BeforeNorm | BeforeRows:
        """What the activation is multiplied by, or a norm of both."""
        spec = self.spec.mlp
        assert spec is not None
        if spec.inner is not None:
            return self._norm(spec.inner)
        self._own(spec.first)
        module = self.layer.get_submodule(spec.first[-1])
        rows = torch.arange(weight_matrix(module).shape[0], device="cpu")
        if spec.halves is not None:
            first, second = rows.chunk(2)
            return BeforeRows(module, second if spec.halves else first)
        if len(spec.first) == 1 and spec.activation not in HOMOGENEOUS:
            raise NotUnderstood(f"{spec.activation} of a multiple is no multiple of {spec.activation}")
        return BeforeRows(module, rows)
