"""The weights of one model to be quantized, and what there is to tell about it."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from accel_kernels import Quantized
from torch import nn

from accel.errors import Refused, SkippedSite
from accel.options import Options
from accel.parallel.ranks import Ranks
from accel.parallel.sharded_layers import INPUTS, expert_sharding, local, sharded_dim, sharding
from accel.patching.rule import Change
from accel.patching.structure import twin
from accel.quantization.experts import ExpertStacks, QuantizedExperts
from accel.quantization.linears import Dense, nothing_to_quantize
from accel.quantization.module import QuantizedLinear
from accel.quantization.patch import QuantizedModule, QuantizedModulePatch, held_elsewhere
from accel.quantization.rounding import round_to_nearest, sqnr_db
from accel.quantization.scheme import Scheme

RULE = "weights"  # what the report calls it


class Quantization:
    """The weights of one model that are to be quantized; `swap` is the patch that does it when applied.

    rows: (path, status, reason) of every site. records: of the quantized ones, see `Report.weights`. warnings: for a
    model of which nothing is quantized, nor was before.

    weights: a value of `Options.weights`. chosen: the linears by path. experts: those of mixtures by path. skipped: why
    others are not quantized. guard: see `QuantizedModulePatch`. Raises ValueError for a skipped site with `strict`.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: str,
        options: Options,
        chosen: Mapping[str, Dense],
        skipped: Mapping[str, str],
        guard: Change | None = None,
        experts: Mapping[str, ExpertStacks] = {},
    ):
        self.options, self.weights = options, weights
        self.scheme = replace(Scheme.parse(weights), activations=options.activations)
        self.chosen, self.experts = chosen, experts
        self.rows: list[tuple[str, str, str]] = []
        self.records: list[dict] = []
        self.warnings: list[str] = []
        self.skip(skipped)
        if not self.modules and not _holds(model, Scheme.parse(weights)):
            self.warn(skipped)
        self.swap = QuantizedModulePatch(model, options.keep_original, guard, self.run)
        self.tied = held_elsewhere(model, self.modules.values())

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All that is quantized, by path."""
        return {path: stacks.module for path, stacks in self.experts.items()} | dict(self.chosen)

    def run(self) -> None:
        """What `swap` does first: exchanges the modules. Raises ValueError for NaN or Inf in one, naming it."""
        if not self.modules:
            return
        paths = {id(module): path for path, module in self.modules.items()}

        def made(module: nn.Module) -> QuantizedModule:
            path = paths[id(module)]
            if path in self.experts:
                return self._quantized_experts(path, self.experts[path])
            return self._quantized(path, self.chosen[path])

        with torch.inference_mode(False), torch.no_grad():
            self.swap.put(self.modules.values(), made)

    def skip(self, reasons: Mapping[str, str]) -> None:
        for path, reason in reasons.items():
            if self.options.strict:
                raise SkippedSite(f"strict=True: {path or 'the model'} ({RULE}): {reason}")
            self.rows.append((path, "skipped", reason))

    def warn(self, reasons: Mapping[str, str]) -> None:
        """Nothing is quantized, for these reasons."""
        told = nothing_to_quantize(self.weights, reasons)
        self.skip({"": told})
        self.warnings.append(told)

    def scheme_of(self, path: str) -> Scheme:
        return self.scheme

    def transposed(self, module: Dense) -> bool:
        """Whether it holds its weight (in, out)."""
        return False

    def _quantized(self, path: str, module: Dense) -> QuantizedLinear:
        transposed, scheme, found = self.transposed(module), self.scheme_of(path), sharding(module)
        stored = local(module.weight)
        weight = stored.t() if transposed else stored
        across = None if found is None or found.dim != INPUTS else found.ranks
        quantized, note = self._rounded(path, weight, stored, scheme, across)
        self._tell(path, scheme, note)
        made = QuantizedLinear(quantized, module.bias, weight.dtype, scheme, transposed)
        if found is not None:
            found.install(made)
        return made

    def _quantized_experts(self, path: str, stacks: ExpertStacks) -> QuantizedExperts:
        scheme, found, notes = replace(self.scheme, activations=None), {}, []
        parts, module = expert_sharding(stacks.module), stacks.module
        own = stacks if parts is None else stacks._replace(module=twin(module, local))
        for name in stacks.names:
            stack = module.get_parameter(name)
            across = parts.ranks if parts is not None and sharded_dim(stack) == stacks.inputs_dim else None
            found[name], note = self._rounded(f"{path}.{name}", own.matrices(name), local(stack), scheme, across)
            notes.append(note)
        self._tell(path, scheme, *notes)
        made = QuantizedExperts(own, found, scheme)
        if parts is not None:
            parts.install(made)
        return made

    def _rounded(
        self, path: str, weight: torch.Tensor, stored: torch.Tensor, scheme: Scheme, ranks: Ranks | None = None
    ) -> tuple[Quantized, str]:
        """A weight in fewer bits, and a note on its memory; adds its record. ranks: see `round_to_nearest`."""
        try:
            quantized = round_to_nearest(weight, scheme, ranks)
        except ValueError as error:
            raise Refused(f"weights={self.weights!r}: {path}: {error}") from None
        other, kept = self.tied.get(id(stored)), self.options.keep_original
        ratio = sqnr_db(weight, quantized)
        self.records.append(quantization_record(path, scheme, weight, quantized, other, ratio, kept))
        if other is None:
            return quantized, ""
        return quantized, f"{quantized.nbytes / 1e6:,.2f} MB more, since {other} keeps the weight that it shares"

    def _tell(self, path: str, scheme: Scheme, *notes: str) -> None:
        lost = "" if self.options.keep_original else "not reversible, its original is not kept"
        self.rows.append((path, "patched", "; ".join(filter(None, (str(scheme), *notes, lost)))))


def _holds(model: nn.Module, scheme: Scheme) -> bool:
    """Whether some linears or experts are of this scheme already."""
    held = (module.scheme for module in model.modules() if isinstance(module, QuantizedLinear | QuantizedExperts))
    return any(replace(one, activations=None) == scheme for one in held)


def quantization_record(
    path: str,
    scheme: Scheme,
    weight: torch.Tensor,
    quantized: Quantized,
    other: str | None,
    ratio: float | None,
    reversible: bool,
) -> dict:
    """A row of `Report.weights`. other: who else holds the weight, which then takes its memory as before."""
    return {
        "path": path,
        "scheme": str(scheme),
        "sqnr_db": ratio,
        "bytes_before": weight.nbytes,
        "bytes_after": quantized.nbytes + (0 if other is None else weight.nbytes),
        "reversible": reversible,
    }
