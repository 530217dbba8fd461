"""What verify and report say of quantized weights: the loss is told, anything else that is wrong still fails."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import int8_linear, quantize_rows, quantized_linear

import accel
from accel.quantization.activations import RowProducts
from accel.verification import rounded_products as judging
from accel.verification.agreement import perplexity
from support.llm.families import in_turn, layers, make, padded, prompt
from support.llm.optimized_models import optimized, pair


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek-v3"])
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_the_loss_is_told_and_passes(name):
    ids, mask = padded((30, 30))
    figures = []
    for weights in ("int8", "int4-g32"):
        model = optimized(name, weights=weights)
        quality = accel.verify(model, input_ids=ids, attention_mask=mask)
        assert quality.passed and quality.lossy == f"weights='{weights}'"
        assert quality.verdict.startswith(f"lossy, as asked for (weights='{weights}')")
        assert quality.agreement.kl > 1e-7
        assert {part.error is not None and part.lossy is None for part in quality.parts.values()} == {True}
        assert "same quantized weights" in str(quality) and "perplexity of the given text" in str(quality)
        figures.append(quality.agreement.kl)
    assert 10 * figures[0] < figures[1]
    assert json.loads(json.dumps(quality.to_dict()))["agreement"]["perplexity"] > 1


def test_perplexities_are_those_of_the_given_text():
    model, stock = pair("llama", weights="int4-g32")
    ids, mask = padded((9, 5))
    agreement = accel.verify(model, input_ids=ids, attention_mask=mask).agreement
    found = []
    for each in (model, stock):
        logits, loss = each(input_ids=ids, attention_mask=mask).logits.double(), []
        for row, length in enumerate(mask.sum(1).tolist()):
            real = slice(ids.shape[1] - length, None)
            loss.append(F.cross_entropy(logits[row, real][:-1], ids[row, real][1:], reduction="none"))
        found.append(math.exp(torch.cat(loss).mean()))
    assert (agreement.perplexity, agreement.stock_perplexity) == (pytest.approx(found[0]), pytest.approx(found[1]))
    assert abs(found[0] / found[1] - 1) > 1e-4
    assert accel.verify(model).agreement.perplexity is None  # random tokens are no text
    assert perplexity(torch.zeros(1, 5), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)) is None


def test_weights_that_stayed_as_they_are_lose_nothing():
    model = make("llama")
    accel.optimize(model, weights="int4")
    quality = accel.verify(model)
    assert quality.passed and quality.lossy is None and not accel.report(model).weights


@pytest.mark.parametrize("only", [lambda rows: rows > 2, lambda rows: rows <= 2], ids=["prompt", "decode"])
def test_what_is_wrong_beyond_the_rounding_fails(only):
    model, ids = optimized("llama", weights="int8"), prompt(1, 9)
    assert accel.verify(model, input_ids=ids).passed

    def wrong(x, *given, **more):
        y = quantized_linear(x, *given, **more)
        return 1.01 * y if only(x.shape[:-1].numel()) else y

    for layer in layers(model).values():
        object.__setattr__(vars(layer)["forward"].kernels, "quantized_linear", wrong)
    quality = accel.verify(model, input_ids=ids)
    assert not quality.passed and quality.lossy == "weights='int8'"
    name = "prompt" if only(9) else "decode"
    assert quality.verdict.startswith(f"FAILED: {name}: relative RMS")


def test_the_model_is_quantized_again_after_verify(tiny):
    model = optimized("llama-biases", weights="fp8")
    ids, mask = padded()
    before = [None if t is None else t.clone() for t in model.buffers()], model(ids, attention_mask=mask).logits
    accel.verify(model)
    assert all(torch.equal(*pair) for pair in zip(before[0], model.buffers(), strict=True))
    assert torch.equal(model(ids, attention_mask=mask).logits, before[1])


def test_the_report_shows_every_weight():
    model = optimized("llama", weights="int4-g32")
    report = accel.report(model)
    assert len(report.weights) == 14
    row = next(row for row in report.weights if row["path"] == "model.layers.1.mlp.down_proj")
    assert row["scheme"] == "int4 by 32 columns" and 18 < row["sqnr_db"] < 22 and row["reversible"]
    assert (row["bytes_before"], row["bytes_after"]) == (64 * 96 * 4, 64 * 96 // 2 + 64 * 3 * 4)
    text = str(report)
    assert "model.layers.*.mlp.down_proj" in text and "int4 by 32 columns" in text
    assert json.loads(json.dumps(report.to_dict()))["weights"] == report.weights


# -- rows in 8 bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activations", "dtype"),
    in_turn(["int8", "int8-outliers", "fp8"], [torch.float32, torch.bfloat16]),
    ids=str,
)
@pytest.mark.share(5)
@pytest.mark.turns(2)
def test_the_loss_of_rounded_rows_is_told_and_their_products_are_judged(activations, dtype):
    weights = activations.partition("-")[0]
    ids, mask = padded((70, 50))
    found = []
    for options in ({}, {"activations": activations}):
        model = optimized("llama-biases", dtype, weights=weights, **options)
        found.append(accel.verify(model, input_ids=ids, attention_mask=mask))
    plain, quality = found
    assert quality.passed and quality.lossy == f"weights='{weights}', activations='{activations}'"
    assert set(quality.parts) == {"prompt", "decode", "rounded rows", "their products"}
    assert quality.parts["rounded rows"].measure.startswith("worst of 8,")  # four a layer
    assert quality.agreement.kl > 1.2 * plain.agreement.kl and "without rounding rows" in quality.note
    assert json.loads(json.dumps(quality.to_dict()))["parts"]["rounded rows"]["error"] > 0.5
    few = accel.verify(model, input_ids=ids[:1, :20])
    assert few.passed and set(few.parts) == {"prompt", "decode"} and "too few" in few.note


WRONG = {
    "a product that is 1 % off": {"int8_linear": lambda *given, **more: 1.01 * int8_linear(*given, **more)},
    "no bias": {"int8_linear": lambda x, weight, bias, **more: int8_linear(x, weight, **more)},
    "no norm": {"quantize_rows": lambda x, norm=None, **more: quantize_rows(x, **more)},
    "a scale too large": {"quantize_rows": lambda x, **more: _coarse(quantize_rows(x, **more))},
    "cut off": {"quantize_rows": lambda x, **more: _cut(quantize_rows(x, **more))},
    "outliers overlooked": {"quantize_rows": lambda x, outliers=None, **more: quantize_rows(x, outliers=100.0, **more)},
    "NaN": {"int8_linear": lambda *given, **more: torch.nan * int8_linear(*given, **more)},
}  # fmt: skip


def _coarse(rows):
    return rows._replace(data=(rows.data.float() / 1.25).round().to(rows.data.dtype), scales=rows.scales * 1.25)


def _cut(rows):
    return rows._replace(data=rows.data - rows.data.sign())


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.share(5)
@pytest.mark.turns(2)
def test_a_wrong_kernel_of_rounded_rows_fails(name, monkeypatch):
    model = make("llama-biases", torch.bfloat16)
    for layer in layers(model).values():
        layer.input_layernorm.weight.data[3] *= 30
    accel.optimize(model, weights="int8", activations="int8-outliers")
    assert accel.verify(model).passed
    monkeypatch.setattr(judging, "KERNELS", RowProducts(**WRONG[name]))
    quality = accel.verify(model)
    assert not quality.passed and quality.failure.startswith(("rounded rows:", "their products:")), quality.verdict
