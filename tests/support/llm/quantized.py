"""What quantized models are compared with: stock code over the same weights, rounded beforehand."""

import copy

import torch
from torch import nn

import accel
from accel.quantization.experts import QuantizedExperts
from support.llm import optimized_models
from support.llm.families import make, padded

# Layers with experts, and what differs from the table of families.
MIXTURES = {
    "mixtral": (2, {}),
    "qwen2-moe": (2, {"moe_intermediate_size": 64}),  # beside an expert that all share
    "qwen2-moe-some-dense": (1, {"moe_intermediate_size": 64}),
    "qwen3-moe": (2, {"moe_intermediate_size": 64}),
    "olmoe": (2, {}),
    "granite-moe": (2, {}),
    "phi-moe": (2, {}),
    "glm4-moe": (1, {"moe_intermediate_size": 64}),
    "deepseek-v3": (1, {"moe_intermediate_size": 64}),  # beside a shared expert
    "qwen3-next": (2, {"moe_intermediate_size": 64}),
    "gpt-oss": (2, {}),  # transposed, gates and ups in turn, biases
}
STACKS = ("gate_up_proj", "down_proj")
HEADS = ("int8-head", "int4-g32-head", "fp8-head", "int8-asym-head", "int4-g32-asym-head")


def held_by(model) -> list:
    """The model's quantized linears."""
    from accel.quantization.module import QuantizedLinear

    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


def optimized(name: str, weights: str, dtype: torch.dtype = torch.float32, **options):
    """(stock, the same quantized)."""
    return optimized_models.pair(name, dtype, weights=weights, **options)[::-1]


def weight_of(model, path: str) -> torch.Tensor:
    """The parameter that a row of `Report.weights` tells of, by its path: a linear's weight, or a stack of experts."""
    try:
        return model.get_submodule(path).weight
    except AttributeError:
        return model.get_parameter(path)


def sites(model) -> dict[str, tuple[str, str]]:
    """What the report says of weights: status and reason by path."""
    return {path: (status, why) for path, rule, status, why in accel.report(model).sites if rule == "weights"}


def rounded(stock, ours, dtype: torch.dtype | None = None):
    """A copy of stock, in dtype where one is given, whose linears and experts have the weights that ours hold."""
    twin = copy.deepcopy(stock)
    if dtype is not None:
        twin.to(dtype)
    for row in accel.report(ours).weights:
        path, _, name = row["path"].rpartition(".")
        if isinstance(experts := ours.get_submodule(path), QuantizedExperts):
            stack = twin.get_submodule(path).get_parameter(name)
            stack.data = experts.written(name, experts.stack(name), stack.dtype).contiguous()
            continue
        theirs, held = twin.get_submodule(row["path"]), ours.get_submodule(row["path"]).quantized
        held = held.dequantized(theirs.weight.dtype)
        if (
            theirs is getattr(twin, "get_output_embeddings", lambda: None)()
        ):  # the words it may share a weight with stay as they are
            theirs.weight = nn.Parameter(theirs.weight.detach())
        theirs.weight.data = (held.t() if type(theirs).__name__ == "Conv1D" else held).contiguous()
    return twin


def mixture(name: str, dtype: torch.dtype = torch.float32, **changes):
    """A stock model."""
    return make(name, dtype, **MIXTURES[name][1] | changes)


def quantized_pair(name: str, weights: str = "int8", dtype: torch.dtype = torch.float32):
    """(optimized with these weights, stock over what they stand for)."""
    ours, before = optimized_models.pair(name, dtype, tuple(MIXTURES[name][1].items()), weights=weights)
    return ours, rounded(before, ours)


def of_experts(model) -> dict[str, nn.Module]:
    """Modules that hold stacks of experts, quantized or not, by path."""
    return {path: module for path, module in model.named_modules() if path.endswith(".experts")}


def by_token(x: torch.Tensor, kind: str) -> torch.Tensor:
    """x (..., K) in float64 as it is after rounding, by definition; up to 64 rows as they are."""
    if x.shape[:-1].numel() <= 64:
        return x
    out = torch.zeros_like(x, dtype=torch.bool)
    if kind == "int8-outliers":
        large = (x.abs() > 6).flatten(0, -2).any(0)
        out |= large | (16 * large.sum() > len(large))
    rest = x.masked_fill(out, 0)
    least, most = (-448, 448) if kind == "fp8" else (-128, 127)
    reach, peak = (most - least) / 2, rest.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    scale = peak / reach
    steps = torch.where(rest.abs() == peak, reach * rest.sign(), rest / scale)
    steps = steps.to(torch.float8_e4m3fn).double() if kind == "fp8" else steps.clamp(least, most).round()
    return torch.where(out, x, steps * scale)


def logits(model) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)  # of dropout
    ids, mask = padded()
    return {"logits": model(input_ids=ids, attention_mask=mask).logits[mask.bool()]}


def written_out(tensor: torch.Tensor) -> bool:
    """Whether it may be a weight of a tiny model in 16 bits or 32."""
    return (
        tensor.dim() == 2
        and tensor.is_floating_point()
        and tensor.dtype.itemsize > 1
        and (tensor.numel() in (96 * 64, 64 * 64))
    )


def whole_numbers(tensor: torch.Tensor) -> bool:
    """Whether it is a matrix of numbers in fewer bits, or of words of them."""
    small = tensor.dtype.itemsize == 1 or (tensor.dtype.itemsize == 4 and not tensor.is_floating_point())
    return small and tensor.dim() == 2 and bool(tensor.numel())
