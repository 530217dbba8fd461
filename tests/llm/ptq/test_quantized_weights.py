"""Models with quantized weights: they write what stock code writes over the same weights, whatever their structure."""

import copy
import functools
import math

import pytest
import torch

import accel
from accel.quantization.module import QuantizedLinear
from support.everything import EVERYTHING
from support.llm.families import BY_NAME, FAMILIES, available, every, layers, make, padded, prompt
from support.llm.modes import MODES
from support.llm.outputs import generate, ran_fast, same
from support.llm.quantized import rounded, weight_of

FAST = [family.name for family in FAMILIES if family.expected == "fast"]
OTHERS = [family.name for family in FAMILIES if family.expected != "fast"]
CORE = [family.name for family in FAMILIES if family.core]
BY_MODE = {mode.name: mode for mode in MODES}
USED = ("greedy", "greedy-padded", "sample", "sample-top", "beam", "assisted", "assisted-by-its-like",
        "continued-padded", "prompt-lookup", "fanned-out", "chunked-prefill-padded", "inference-mode")  # fmt: skip
SCHEMES = ("int8", "int8-asym", "int4-g32", "int4-g32-asym", "fp8")
# By how much each may be off, relative RMS, of weights that are normally distributed.
NOISE_DB = {"int8": 40, "int8-asym": 40, "int4-g32": 18, "int4-g32-asym": 19, "fp8": 30}


@functools.cache
def quantized(name: str, weights: str, dtype: torch.dtype = torch.float32):
    """(optimized with these weights, stock over the same ones rounded)."""
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    stock = make(name, dtype)
    ours = accel.optimize(copy.deepcopy(stock), weights=weights)
    return ours, checked(stock, ours, weights)


def checked(stock, ours, weights: str):
    """Stock over the weights that ours hold, which are stock's but for the rounding, as the report says."""
    twin = rounded(stock, ours)
    for row in accel.report(ours).weights:
        exact, held = (weight_of(model, row["path"]) for model in (stock, twin))
        noise = (held.double() - exact.double()).square().sum() / exact.double().square().sum()
        assert NOISE_DB[weights] < row["sqnr_db"] < 60
        if exact.dtype == torch.float32:
            assert row["sqnr_db"] == pytest.approx(-10 * math.log10(noise), rel=1e-3)
        assert row["bytes_before"] == exact.nbytes and row["bytes_after"] < 0.6 * exact.nbytes
    return twin


def quantizable(model) -> set[str]:
    """By path, linear layers inside the decoder layers that are large enough to be worth it, and stacks of experts."""
    found = set()
    for path, layer in layers(model).items():
        for name, module in layer.named_modules():
            if name.endswith("experts") and hasattr(module, "gate_up_proj"):
                found |= {f"{path}.{name}.gate_up_proj", f"{path}.{name}.down_proj"}
            if type(module).__name__ in ("Linear", "Conv1D", "FalconLinear") and max(module.weight.shape) >= 16:
                found |= {f"{path}.{name}"} if min(module.weight.shape) >= 16 else set()
    return found


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for mode in ("greedy-padded", "beam")
        for name in FAST[:: 1 if EVERYTHING else 3 if mode != "beam" else 12]
    ],
)
@pytest.mark.share(5)
def test_every_fast_family(name, mode, monkeypatch):
    ours, reference = quantized(name, "int8")
    assert {row["path"] for row in accel.report(ours).weights} == quantizable(reference)
    inputs = padded(BY_MODE[mode].lengths)
    if not any("shared_expert" in path for path in quantizable(reference)):  # which a mixture's own code calls
        monkeypatch.setattr(QuantizedLinear, "forward", None)  # the others are part of fused operations
    same(BY_MODE[mode](ours, *inputs), BY_MODE[mode](reference, *inputs))
    ran_fast(ours)


@pytest.mark.parametrize(("name", "mode"), every(3, CORE, USED))
@pytest.mark.share(5)
def test_every_mode(name, mode):
    ours, reference = quantized(name, SCHEMES[(CORE.index(name) + USED.index(mode)) % len(SCHEMES)])
    inputs = padded(BY_MODE[mode].lengths)
    same(BY_MODE[mode](ours, *inputs), BY_MODE[mode](reference, *inputs))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.share(4)
def test_those_not_understood_run_their_own_code_over_quantized_linears(name):
    ours, reference = quantized(name, "int8")
    ids, mask = padded((9, 9))
    same(generate(ours, ids, mask), generate(reference, ids, mask))
    same({"x": ours(ids).logits}, {"x": reference(ids).logits})
    if name == "rwkv":  # it writes into its weights
        reasons = [reason for _, rule, _, reason in accel.report(ours).sites if rule == "weights"]
        assert any("does not run with quantized linears: RuntimeError" in reason for reason in reasons)
        assert any(reason.startswith("nothing to quantize as 'int8': rwkv.") for reason in reasons)
        assert not accel.report(ours).weights
    else:
        assert accel.report(ours).weights


@pytest.mark.parametrize(
    ("name", "weights", "dtype"), every(4, CORE, SCHEMES, (torch.bfloat16, torch.float16)), ids=str
)
@pytest.mark.share(4)
def test_in_half_precision_as_good_as_stock_over_the_same_weights(name, dtype, weights):
    ours, reference = quantized(name, weights, dtype)
    exact = rounded(reference, ours, torch.float32)  # not even rounded to half precision
    ids = prompt(3, 12)
    wanted = exact(ids).logits.double()
    own, mine = (float((model(ids).logits.double() - wanted).norm() / wanted.norm()) for model in (reference, ours))
    assert 0 < mine <= 2 * own


def test_queries_keys_and_values_are_one_product_and_so_are_gate_and_up():
    ours, _ = quantized("llama-biases", "int4-g32-asym")
    generate(ours, *padded())
    bound = vars(next(iter(layers(ours).values())))["forward"].bound
    assert bound.attention.joint is not None and bound.attention.joint.now()[0].shape == (64 + 32 + 32, 64)
    assert bound.mlp.gate is not None and bound.mlp.up is not None
    held = layers(ours)["model.layers.0"].self_attn
    for name in ("data", "scales", "zeros", "bias"):
        storages = {getattr(held.get_submodule(p), name).untyped_storage().data_ptr() for p in ("q_proj", "v_proj")}
        assert len(storages) == 1


def test_a_text_pipeline():
    from transformers import pipeline

    from support.llm.calls import tokenizer

    pipe = pipeline("text-generation", model=make("llama"), tokenizer=tokenizer())
    before = pipe("abcdef", max_new_tokens=6, do_sample=False)
    with accel.optimized(pipe, weights="int8"):
        assert [row["path"].partition(".")[0] for row in accel.report(pipe).weights] == ["model"] * 14
        assert accel.verify(pipe, "abcdefgh").agreement.perplexity > 1
        assert pipe("abcdef", max_new_tokens=6)
    assert pipe("abcdef", max_new_tokens=6, do_sample=False) == before
