"""Columns that calibration found too large to round, which stay in their dtype."""

import copy

import pytest
import torch

import accel
from accel.quantization.activations import RowProducts
from support.llm.families import make, prompt
from support.llm.quantized import by_token, held_by
from support.llm.rounded_activations import Counting, off, oracle, planted

DATA = [{"input_ids": prompt(2, 40, seed)} for seed in range(2)]
COLUMNS = {"method": "rtn", "activations": "int8-outliers-static"}


def without(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """x in float64, rounded by token but for these columns, by definition; up to 64 rows as they are."""
    if x.shape[:-1].numel() <= 64:
        return x
    rest = x.index_fill(-1, columns, 0)
    return by_token(rest, "int8") + (x - rest)


@torch.no_grad()
def test_columns_beyond_the_threshold_in_calibration_are_kept_and_no_others(double):
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
    double()
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
