"""What calibration fixes for activations: a scale of all inputs, or which columns are never rounded; and its files."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import accel
from accel.llm.ptq import run as running
from accel.llm.ptq.calibrate import quantize_layers
from accel.quantization.activations import RowProducts, weight_dtype_of
from accel.quantization.module import QuantizedLinear
from accel.quantization.scheme import Scheme
from support.llm.families import make, padded, prompt
from support.llm.quantized import by_token, held_by
from support.llm.rounded_cache import Counting, off, oracle, planted

MOST = {"int8-static": 127.0, "fp8-static": 448.0}
DATA = [{"input_ids": prompt(2, 40, seed)} for seed in range(2)]


def quantized(name: str, kind: str, **given):
    return accel.quantize(make(name), weight_dtype_of(kind), DATA, method="rtn", activations=kind, **given)


@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_a_scale_is_the_largest_input_of_the_calibration(name, kind):
    """Of the rounded model, token for token, without what is padded."""
    model, (ids, mask) = make(name), padded((12, 7))
    data = [{"input_ids": ids, "attention_mask": mask}]
    accel.quantize(model, weight_dtype_of(kind), data, method="rtn", activations=kind)
    largest = {}
    for path, module in model.named_modules():
        if type(module) is QuantizedLinear:

            def note(_, args, path=path):
                largest[path] = args[0][mask.bool()].abs().max() / MOST[kind]

            module.register_forward_pre_hook(note)
    model(**data[0])
    assert len(largest) == len(held_by(model))
    for path, scale in largest.items():
        torch.testing.assert_close(model.get_submodule(path).input_scale, scale.view(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_saved_loaded_arrived_and_stock(kind, dtype, tmp_path):
    pytest.importorskip("compressed_tensors")
    make("llama-biases", dtype).save_pretrained(tmp_path / "stock")  # whose frequencies are in full precision
    stock, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype=dtype).eval(), DATA[0]["input_ids"]
    model, given = copy.deepcopy(stock), {"method": "rtn", "activations": kind}
    accel.quantize(model, weight_dtype_of(kind), DATA, out=tmp_path / "out", **given)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    said = group["input_activations"]
    assert (said["strategy"], said["dynamic"], said["num_bits"]) == ("tensor", False, 8)
    wanted = model(ids).logits
    loaded = accel.load(tmp_path / "out")
    assert {module.activations for module in held_by(loaded)} == {kind} and len(held_by(loaded)) == 14
    assert torch.equal(loaded(ids).logits, wanted)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(accel.load(tmp_path / "again")(ids).logits, wanted)
    theirs, prequantized = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype).eval() for _ in range(2)
    )
    before = {key: value.clone() for key, value in prequantized.state_dict().items()}
    accel.optimize(prequantized, activations=kind)
    assert {module.activations for module in held_by(prequantized)} == {kind}
    accel.optimize(loaded)
    assert torch.equal(prequantized(ids).logits, loaded(ids).logits)
    accel.restore(prequantized)
    assert all(torch.equal(value, before[key]) for key, value in prequantized.state_dict().items())
    accel.optimize(prequantized)  # not asked for, and said
    assert {module.activations for module in held_by(prequantized)} == {None}
    assert "activations keep their dtype" in str(accel.report(prequantized).sites)
    scales = {path: module.input_scale for path, module in theirs.named_modules() if hasattr(module, "input_scale")}
    assert len(scales) == 14 and all(torch.equal(v, model.get_submodule(p).input_scale) for p, v in scales.items())
    if dtype == torch.float32:  # numbers next to a half fall to either side; in bf16 the sums before them do
        assert off(theirs(ids).logits, wanted) < 0.1 * off(wanted, stock(ids).logits)


@torch.no_grad()
def test_smoothquant_is_tried_with_the_inputs_it_will_have():
    """Planted outliers: a scale a tensor has to be tried with a scale a tensor."""
    given = {"method": "smoothquant", "activations": "int8-static"}
    stock, ids = planted(make("llama"), factor=60.0), DATA[0]["input_ids"]
    losses = []
    for method in ("rtn", "smoothquant"):
        model = accel.quantize(copy.deepcopy(stock), "int8", DATA, **given | {"method": method})
        losses.append(off(model(ids).logits, stock(ids).logits))
    assert losses[1] < 0.5 * losses[0]
    results = list(
        quantize_layers(copy.deepcopy(stock), Scheme("int8", activations="int8-static"), "smoothquant", DATA)
    )
    again = dict.fromkeys([results[0].path], results[0])
    twice = quantize_layers(copy.deepcopy(stock), Scheme("int8", activations="int8-static"), "smoothquant", DATA, again)
    assert all(torch.equal(scale, other.inputs[path]) for one, other in zip(results, twice, strict=True)
               for path, scale in one.inputs.items())  # fmt: skip


def test_an_interrupted_run_goes_on_and_another_is_refused(tmp_path, monkeypatch):
    real = running.quantize_layers

    def first(*given):
        yield next(iter(real(*given)))
        raise KeyboardInterrupt

    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(running, "quantize_layers", first)
        quantized("llama", "int8-static", out=tmp_path)
    with pytest.raises(ValueError, match="another activations: int8-static, now None"):
        accel.quantize(make("llama"), "int8", DATA, method="rtn", out=tmp_path)
    found, whole = quantized("llama", "int8-static", out=tmp_path), quantized("llama", "int8-static")
    state = whole.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in found.state_dict().items())


def test_linears_that_no_token_reaches_round_nothing():
    model = make("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.zero_()
    accel.quantize(model, "int8", DATA, method="rtn", activations="int8-static")
    kinds = {path: module.activations for path, module in model.named_modules() if type(module) is QuantizedLinear}
    assert kinds.pop("model.layers.1.mlp.down_proj") is None and set(kinds.values()) == {"int8-static"}


COLUMNS = {"method": "rtn", "activations": "int8-outliers-static"}


def without(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """x in float64, rounded by token but for these columns, by definition; up to 64 rows as they are."""
    if x.shape[:-1].numel() <= 64:
        return x
    rest = x.index_fill(-1, columns, 0)
    return by_token(rest, "int8") + (x - rest)


@torch.no_grad()
def test_columns_beyond_the_threshold_in_calibration_are_kept_and_no_others(in_double):
    stock = planted(make("llama-biases", torch.float64))
    model = accel.quantize(copy.deepcopy(stock), "int8", DATA, **COLUMNS)
    twin = oracle(stock, model, lambda x, module: without(x, module.input_columns))
    first = model.model.layers[0]
    for module in (first.self_attn.q_proj, first.self_attn.v_proj, first.mlp.gate_proj):
        assert 5 in module.input_columns.tolist() and module.input_columns.dtype == torch.int64
    assert first.self_attn.q_proj.rounding == first.self_attn.k_proj.rounding
    assert min(len(module.input_columns) for module in held_by(model)) == 0
    accel.optimize(model)
    counting = Counting()
    for module in held_by(model):
        module.products = counting
    in_double()
    for ids in (prompt(1, 100), prompt(5, 13), prompt(1, 64)):
        assert off(model(ids).logits, twin(ids).logits) < 1e-9
    assert len(counting.calls) == 2 * 8 and all(fixed for *_, fixed in counting.calls)


@torch.no_grad()
def test_columns_are_verified_told_of_and_not_saved(tmp_path):
    model, ids = accel.quantize(planted(make("llama-biases")), "int8", DATA, **COLUMNS), prompt(1, 80)
    other = accel.quantize(planted(make("llama-biases")), "int8", DATA, **COLUMNS)
    other.load_state_dict(model.state_dict())
    wanted = model(ids).logits
    assert torch.equal(other(ids).logits, wanted)
    loss = off(wanted, planted(make("llama-biases"))(ids).logits)
    dynamic = accel.quantize(planted(make("llama-biases")), "int8", DATA, method="rtn", activations="int8")
    assert loss < 0.5 * off(dynamic(ids).logits, planted(make("llama-biases"))(ids).logits)
    accel.optimize(model)
    quality = accel.verify(model, input_ids=ids)
    assert quality.passed and quality.lossy == "activations='int8-outliers-static'"
    (told,) = [reason for path, rule, _, reason in accel.report(model).sites if rule == "activations" and not path]
    assert told.startswith("14 linear layers keep fixed columns in 16 bits, 0 to ")
    with pytest.warns(UserWarning, match="fixed in the inputs of 14 linear layers are not saved"):
        model.save_pretrained(tmp_path)
    loaded = accel.load(tmp_path)
    assert {module.activations for module in held_by(loaded)} == {None}
    with pytest.raises(ValueError, match=r"holds what it needs; its columns of inputs are fixed by calibration: accel"):
        accel.optimize(loaded, activations="int8-outliers-static")


class Overlooking(RowProducts):
    """Columns are forgotten."""

    def rounded(self, x, activations, norm=None, fixed=None):
        return super().rounded(x, "int8", norm)


@torch.no_grad()
def test_columns_that_are_forgotten_do_not_pass(monkeypatch):
    model = accel.optimize(accel.quantize(planted(make("llama-biases")), "int8", DATA, **COLUMNS))
    monkeypatch.setattr("accel.verification.rounded_products.KERNELS", Overlooking())
    assert not accel.verify(model, input_ids=prompt(1, 80)).passed
