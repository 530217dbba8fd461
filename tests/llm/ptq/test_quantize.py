"""Quantizing linear layers, and what becomes of their weights."""

import copy
import functools
import math
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

import accel
from accel.llm.ptq import run as running
from accel.llm.ptq.calibrate import LayerResult
from accel.quantization.module import QuantizedLinear
from accel.quantization.scheme import Scheme
from support.everything import EVERYTHING
from support.llm.calls import tokenizer
from support.llm.families import BY_NAME, FAMILIES, every, layers, make, padded, prompt
from support.llm.modes import MODES
from support.llm.outputs import generate, ran_fast, same
from support.llm.quantized import HEADS, held_by, logits, rounded, weight_of

IDS = [torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
TEXTS = ["abcdef", "hello there", "once more"]


def by_option(name: str, scheme: str):
    """What accel.optimize makes of it with this option, for good."""
    model = accel.optimize(make(name), weights=scheme, keep_original=False)
    with pytest.warns(UserWarning):
        return accel.restore(model)


@pytest.mark.parametrize("scheme", ["int8", "int4-g32-asym", "fp8"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases", "gpt2", "falcon-grouped", "mpt"])  # no experts
@pytest.mark.share(10)
@pytest.mark.turns(2)
def test_it_is_what_the_option_makes_and_stays(name, scheme):
    model, wanted = make(name), by_option(name, scheme)
    assert accel.quantize(model, scheme) is model
    assert len(held_by(model)) == len(held_by(wanted)) > 0
    assert torch.equal(logits(model)["logits"], logits(wanted)["logits"])
    ids, mask = padded((9, 9))
    before = generate(model, ids, mask)
    accel.optimize(model)
    same(generate(model, ids, mask), before)
    accel.restore(model)
    assert held_by(model) and torch.equal(logits(model)["logits"], logits(wanted)["logits"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_it_can_be_copied_and_each_copy_saved(copied, tmp_path):
    model = accel.quantize(make("llama"), "int8")
    other = copied(model)
    other.lm_head.weight.data.zero_()
    other.save_pretrained(tmp_path)
    assert not AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.any()


def test_out_holds_the_model_and_its_tokenizer(tmp_path):
    model = accel.quantize(make("llama"), "int8", out=tmp_path / "out", tokenizer=tokenizer())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded)["logits"], logits(model)["logits"])


# -- what is refused ---------------------------------------------------------------------------------------------------


WRONG = {
    "scheme='int5' is not one of 'int8'": ("int5", None, None),
    "scheme=None is not one of": (None, None, None),
    "method='best' is not one of 'rtn', 'gptq', 'awq', 'smoothquant'": ("int8", IDS, "best"),
    "method='gptq' looks at calibration data": ("int8", None, "gptq"),
    "calibration holds texts: give their tokenizer": ("int8", TEXTS, None),
    "calibration holds no tokens": ("int8", [], None),
    "calibration is a str; give a list of texts": ("int8", "file.txt", None),
    "calibration is a int": ("int8", 7, None),
    "item 1 holds 'label', 'words'": ("int8", [IDS[0], {"label": 1, "words": "a"}], None),
    "input_ids of item 0 is no": ("int8", [torch.rand(2, 3)], None),
    "item 0 holds tokens outside the vocabulary of 99": ("int8", [torch.tensor([[1, 99]])], None),
    "input_ids of item 2 is no": ("int8", [IDS[0], IDS[1], ["a", "b"]], None),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_named_before_anything_changes(message, tiny, tmp_path):
    scheme, data, method = WRONG[message]
    model = make("llama")
    before = tiny.snapshot(model)
    with pytest.raises((ValueError, TypeError), match=message):
        accel.quantize(model, scheme, data, method=method, out=tmp_path / "out")
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert not (tmp_path / "out").exists()


def test_what_fits_no_groups_or_is_quantized_is_left_alone():
    model = accel.quantize(make("llama"), "int4-g64")  # of 64 and 96 inputs
    kinds = {type(layer.mlp.down_proj) for layer in layers(model).values()}
    assert kinds == {torch.nn.Linear} and len(held_by(model)) == 12
    with pytest.raises(ValueError, match=r"nothing to quantize as 'int8'"):
        accel.quantize(accel.quantize(make("llama"), "int8"), "int8")


def test_objects_that_are_no_language_models_and_optimized_ones(tiny):
    with pytest.raises(TypeError, match="causal language model of transformers, not a UNet2DConditionModel"):
        accel.quantize(tiny.unet(), "int8")
    model = accel.optimize(make("llama"))
    with pytest.raises(ValueError, match="call accel.restore"):
        accel.quantize(model, "int8")
    accel.quantize(accel.restore(model), "int8")
    with torch.device("meta"):
        empty = make("llama")
    with pytest.raises(ValueError, match="not loaded"):
        accel.quantize(empty, "int8")


def test_with_adapters_in_it_nothing_is_saved(tmp_path):
    peft = pytest.importorskip("peft")
    model = make("llama")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="a model with adapters in it cannot be saved"):
        accel.quantize(model, "int8", out=tmp_path / "out")
    assert not held_by(model) and not (tmp_path / "out").exists()
    assert len(held_by(accel.quantize(model, "int8"))) == 14


def test_results_that_are_not_of_the_model(monkeypatch):
    model = make("llama")
    real = running.quantize_layers

    def answered(change):
        monkeypatch.setattr(running, "quantize_layers", lambda *given: map(change, real(*given)))
        accel.quantize(model, "int8")

    with pytest.raises(ValueError, match="gave no weight for model.layers.0.mlp.down_proj"):
        answered(lambda result: result._replace(weights={}))
    with pytest.raises(ValueError, match=r"norm.weight of shape \(3,\) is no parameter"):
        answered(lambda result: result._replace(changed={"model.norm.weight": torch.ones(3)}))
    assert not held_by(model)


def test_changed_parameters_are_put_in_place_and_saved(monkeypatch, tmp_path):
    """As of a method that moves scales from a norm into the weights behind it."""
    model, real = make("llama"), running.quantize_layers

    def scaled(result: LayerResult) -> LayerResult:
        name = f"{result.path}.input_layernorm.weight"
        return result._replace(changed={name: torch.full((64,), 0.5)})

    monkeypatch.setattr(running, "quantize_layers", lambda *given: map(scaled, real(*given)))
    accel.quantize(model, "int8", out=tmp_path / "out")
    assert all((layer.input_layernorm.weight == 0.5).all() for layer in layers(model).values())
    assert type(model.model.layers[0].mlp.up_proj) is QuantizedLinear
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded)["logits"], logits(model)["logits"])


FAST = [family.name for family in FAMILIES if family.expected == "fast"]
OTHERS = [family.name for family in FAMILIES if family.expected != "fast"]
CORE = [family.name for family in FAMILIES if family.core]
BY_MODE = {mode.name: mode for mode in MODES}
USED = ("greedy", "greedy-padded", "sample", "sample-top", "beam", "assisted", "assisted-by-its-like",
        "continued-padded", "prompt-lookup", "fanned-out", "chunked-prefill-padded", "inference-mode")  # fmt: skip
SCHEMES = ("int8", "int8-asym", "int4-g32", "int4-g32-asym", "fp8")
WITH_HEADS = ("llama-tied", "granite", "cohere", "deepseek-v3")  # tied, scaled, not understood
# By how much each may be off, relative RMS, of weights that are normally distributed.
NOISE_DB = {"int8": 40, "int8-asym": 40, "int4-g32": 18, "int4-g32-asym": 19, "fp8": 30}


@functools.cache
def quantized(name: str, weights: str, dtype: torch.dtype = torch.float32):
    """(optimized with these weights, stock over the same ones rounded)."""
    stock = make(name, dtype)
    ours = accel.optimize(copy.deepcopy(stock), weights=weights)
    return ours, checked(stock, ours, weights)


def checked(stock, ours, weights: str):
    """Stock over the weights that ours hold, which are stock's but for the rounding, as the report says."""
    twin = rounded(stock, ours)
    for row in accel.report(ours).weights:
        exact, held = (weight_of(model, row["path"]) for model in (stock, twin))
        noise = (held.double() - exact.double()).square().sum() / exact.double().square().sum()
        assert NOISE_DB[weights.removesuffix("-head")] < row["sqnr_db"] < 60
        if exact.dtype == torch.float32:
            assert row["sqnr_db"] == pytest.approx(-10 * math.log10(noise), rel=1e-3)
        assert row["bytes_before"] == exact.nbytes
        kept = exact.nbytes if exact is stock.get_input_embeddings().weight else 0  # by the words, which share it
        assert row["bytes_after"] - kept < 0.6 * exact.nbytes
    return twin


def quantizable(model) -> set[str]:
    """By path, linear layers inside the decoder layers that are large enough to be worth it, and stacks of experts."""
    found = set()
    for path, layer in layers(model).items():
        for name, module in layer.named_modules():
            if name.endswith("experts") and "Llama4" not in type(module).__name__:
                stacks = {one for one, p in module.named_parameters(recurse=False) if p.dim() == 3}
                found |= {f"{path}.{name}.{one}" for one in stacks}
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
@pytest.mark.share(24)
@pytest.mark.turns(2)
def test_every_fast_family(name, mode, monkeypatch):
    ours, reference = quantized(name, "int8")
    assert {row["path"] for row in accel.report(ours).weights} == quantizable(reference)
    inputs = padded(BY_MODE[mode].lengths)
    if not any("shared_expert" in path for path in quantizable(reference)):  # which a mixture's own code calls
        monkeypatch.setattr(QuantizedLinear, "forward", None)  # the others are part of fused operations
    same(BY_MODE[mode](ours, *inputs), BY_MODE[mode](reference, *inputs))
    ran_fast(ours)


@pytest.mark.parametrize(("name", "mode"), every(3, [*CORE, *WITH_HEADS], USED))
@pytest.mark.share(24)
@pytest.mark.turns(2)
def test_every_mode(name, mode):
    table = (*HEADS, *SCHEMES) if name in CORE else HEADS
    weights = table[([*CORE, *WITH_HEADS].index(name) + USED.index(mode)) % len(table)]
    if not BY_NAME[name].takes(mode):
        pytest.skip("stock cannot do this itself")
    ours, reference = quantized(name, weights)
    inputs = padded(BY_MODE[mode].lengths)
    same(BY_MODE[mode](ours, *inputs), BY_MODE[mode](reference, *inputs))
    if weights in HEADS:
        head = ours.get_output_embeddings()
        assert type(head) is QuantizedLinear and head.scheme == Scheme.of_head(weights)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.share(8)
@pytest.mark.turns(2)
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
    ("name", "weights", "dtype"),
    every(5, CORE, (*SCHEMES, *HEADS[:3]), (torch.bfloat16, torch.float16)),
    ids=str,
)
@pytest.mark.share(24)
@pytest.mark.turns(2)
def test_in_half_precision_as_good_as_stock_over_the_same_weights(name, dtype, weights):
    ours, reference = quantized(name, weights, dtype)
    exact = rounded(reference, ours, torch.float32)  # not even rounded to half precision
    for ids in (prompt(3, 12), prompt(1, 80)):
        wanted = exact(ids).logits.double()
        errors = [model(ids).logits.double() - wanted for model in (reference, ours)]
        own, mine = (float(error.norm() / wanted.norm()) for error in errors)
        if hasattr(ours.config, "num_experts_per_tok"):  # in single tokens rounding chooses other experts, of either
            own, mine = (float((error.norm(dim=-1) / wanted.norm(dim=-1)).median()) for error in errors)
        assert 0 < mine <= 2 * own


def test_queries_keys_and_values_are_one_product_and_so_are_gate_and_up():
    ours, _ = quantized("llama-biases", "int4-g32-asym")
    generate(ours, *padded())
    bound = vars(next(iter(layers(ours).values())))["forward"].bound
    joint = bound.attention.projections.joint
    assert joint is not None and joint.operands()[0].shape == (64 + 32 + 32, 64)
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
