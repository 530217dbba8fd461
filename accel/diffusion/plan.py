"""The plan of a denoiser whose weights are quantised: before anything is understood or bound."""

from torch import nn
from torch.nn.modules.conv import _ConvNd

from accel.diffusion.family import RULES
from accel.diffusion.guard import Guard
from accel.diffusion.linears import linears
from accel.options import Options
from accel.plan import Context, Plan, Row
from accel.quant.quantisation import RULE, Quantisation
from accel.quant.scheme import Scheme


class DenoiserPlan(Plan):
    """Its quantised linears are the first patch, taken back last. Where planning fails nothing stays quantised."""

    def __init__(self, root: nn.Module, context: Context):
        quantisation = quantised(root, context.options)
        before = _bytes(root)
        try:
            quantisation.run()
            super().__init__(root, RULES, context)
        except BaseException:
            quantisation.swap.undo()
            raise
        if quantisation.records:
            self.patches.insert(0, quantisation.swap)
        self.weights = quantisation.records
        self.rows += [Row(path, RULE, status, reason) for path, status, reason in quantisation.rows]
        self.rows.append(Row("", RULE, "patched", _share(root, quantisation.records, before)))


def quantised(root: nn.Module, options: Options) -> Quantisation:
    """What is to be done, not done yet. Raises ValueError for a scheme of fewer bits than images bear."""
    scheme = Scheme.parse(options.weights)
    if scheme.number == "int4":
        raise ValueError(
            f"weights={options.weights!r}: for causal language models; a {type(root).__name__} takes "
            "'int8', 'int8-asym' or 'fp8'"
        )
    return Quantisation(root, options, *linears(root, scheme), Guard(root))


def _bytes(root: nn.Module, kinds: type = nn.Module) -> int:
    """Of the parameters of all modules of these kinds, counted once."""
    held = (p for module in root.modules() if isinstance(module, kinds) for p in module._parameters.values())
    return sum(p.nbytes for p in {id(p): p for p in held if p is not None}.values())


def _share(root: nn.Module, records: list[dict], before: int) -> str:
    """What became of the bytes of the model, for the report."""
    linear = sum(row["bytes_before"] for row in records)
    after = before - linear + sum(row["bytes_after"] for row in records)
    convolutions = f"convolutions, {_bytes(root, _ConvNd) / before:.0%}, and all else stay as they are"
    became = f"{before / 1e6:,.1f} MB become {after / 1e6:,.1f}"
    return f"{len(records)} linears, {linear / before:.0%} of the bytes; {convolutions}: {became}"
