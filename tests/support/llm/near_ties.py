"""Models of many layers, with routers that are nearly undecided."""

import itertools

import torch
from torch import nn
from torch.nn.functional import linear

from accel.llm.moe.router import RouterForward
from accel.llm.moe.router_formula import RouterFormula
from support.llm.families import make, prompt
from support.llm.gpu import talk
from support.llm.miniatures.family import ROTARY

LEAST = 1e-4  # of the largest logit: a hundred times what the order of sums moves logits in float32


def deep_gpt_oss(dtype: torch.dtype = torch.bfloat16, layers: int = 12, spread: float = 0.1):
    """Random weights, in which routers find many experts nearly equal. spread: standard deviation of the matrices."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 32, "num_experts_per_tok": 4}
    config = GptOssConfig(
        vocab_size=99, num_hidden_layers=layers, head_dim=16, sliding_window=8, initializer_range=spread,
        pad_token_id=0, eos_token_id=1, bos_token_id=2, rope_parameters=ROTARY | {"rope_type": "default"},
        **sizes, **experts,
    )  # fmt: skip
    model = GptOssForCausalLM(config).eval()
    for layer in model.model.layers:  # else sinks and biases are zeros
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            getattr(layer.mlp.experts, name).data.normal_(std=0.1)
        layer.self_attn.sinks.data.normal_()
    return model.to(dtype)


def clear_seeds(model: nn.Module, rows: int, length: int, count: int) -> list[int]:
    """The first seeds of prompts whose smallest gap is above LEAST; model: stock, in float32, on the CPU."""
    found = (seed for seed in itertools.count() if smallest_gap(model, prompt(rows, length, seed)) > LEAST)
    return list(itertools.islice(found, count))


@torch.no_grad()
def smallest_gap(model: nn.Module, ids: torch.Tensor) -> float:
    """Between the last expert chosen and the best one that is not, by the largest logit of the token.

    Of all tokens, routers and steps of a talk. Raises LookupError for a model in which nothing chooses.
    """
    gaps: list[float] = []

    def look(module: nn.Module, args: tuple, output: object) -> None:
        index = [one for one in output if one.dtype == torch.int64] if isinstance(output, tuple) else []
        if index:
            gaps.append(_gap(linear(args[0], module.weight, getattr(module, "bias", None)), index[0].shape[-1]))

    choosing = [module for module in model.modules() if isinstance(getattr(module, "weight", None), nn.Parameter)]
    handles = [module.register_forward_hook(look) for module in choosing]
    try:
        talk(model, ids)
    finally:
        for handle in handles:
            handle.remove()
    if not gaps:
        raise LookupError("nothing in this model chooses")
    return min(gaps)


def _gap(logits: torch.Tensor, chosen: int) -> float:
    best = logits.flatten(0, -2).sort(descending=True).values
    gaps = (best[:, chosen - 1] - best[:, chosen]) / best.abs().amax(-1)
    return gaps.min().item()


def model_of(family: str, dtype: torch.dtype = torch.bfloat16, spread: float = 2.0, **config) -> nn.Module:
    """spread: what matrices of layers are multiplied by. The larger they are, the more do layers amplify rounding."""
    model = make(family, **config)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not name.startswith(("model.embed", "transformer.w", "lm_head")):
            weight.data *= spread
    return model.to(dtype)


def routers(model: nn.Module) -> dict[str, RouterForward]:
    found = {path: vars(module).get("forward") for path, module in model.named_modules()}
    return {path: forward for path, forward in found.items() if type(forward) is RouterForward}


def now(forward: RouterForward) -> RouterFormula:
    """For tokens of its weight's dtype."""
    found = forward.formula(next(forward.module.parameters())[:0])
    assert found is not None
    return found


def assert_routed_alike(found: tuple, wanted: tuple, least: float) -> None:
    """The same form; the same choices, in any order, of all tokens in float32 and of so many in 16 bits, where several
    have equal scores; of these tokens shares and logits that differ by the order of sums in float32, else in the last
    digit but one.
    """
    assert type(found) is type(wanted) and len(found) == len(wanted)
    for ours, stock in zip(found, wanted, strict=True):
        assert ours.dtype == stock.dtype and ours.shape == stock.shape and ours.device == stock.device
    mine, theirs = (next(one for one in many if one.dtype == torch.int64) for many in (found, wanted))
    same = mine.sort().values.eq(theirs.sort().values).all(1)
    assert same.float().mean() >= least
    for ours, stock in zip(found, wanted, strict=True):
        if ours.is_floating_point():
            rtol = max(1e-5, 4 * torch.finfo(stock.dtype).eps)
            left, right = (one[same].sort().values.float() for one in (ours, stock))
            torch.testing.assert_close(left, right, rtol=rtol, atol=rtol)
