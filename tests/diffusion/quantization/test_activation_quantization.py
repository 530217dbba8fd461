"""Activations rounded to int8, and pipelines in which they are."""

import copy

import pytest
import torch

import accel
from accel.quantization.activations import RowProducts
from benchmarks.models.tiny_denoisers import transformer
from support.diffusion.oracles import EXACT, INT8, options
from support.diffusion.outputs import close, error, in_dtype, run
from support.llm.quantized import held_by
from support.patched import sites


class Counting(RowProducts):
    """Counts what is rounded, and what it is multiplied with."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "rows", [])
        object.__setattr__(self, "given", [])

    def rounded(self, x, activations, norm=None, fixed=None):
        self.rows.append((tuple(x.shape), norm is not None))
        return super().rounded(x, activations, norm, fixed)

    def product(self, activations):
        def counted(x, weight, bias, **after):
            self.given.append((weight.shape[0], {name for name, value in after.items() if value is not None}))
            return RowProducts.product(self, activations)(x, weight, bias, **after)

        return counted


def test_what_is_rounded_and_fused(unet_and_inputs):
    """Queries, keys and values round once; the norm is inside; gate, residuals and biases are in the product."""
    model, inputs = unet_and_inputs("sdxl", torch.float32)
    accel.optimize(model, **INT8)
    counting = Counting()
    for module in held_by(model):
        module.products = counting
    run(model, inputs)
    block = [(32, True), (32, False), (32, True), (32, False), (32, True), (128, False)]
    stack = [(32, False), *block, *block, (32, False)]  # projections into and out of it
    assert {shape for shape, _ in counting.rows} == {(2, 72, 32), (2, 72, 128)} and len(counting.rows) == 4 * len(stack)
    assert [(shape[-1], norm) for shape, norm in counting.rows] == 4 * stack
    products = [(96, set()), (32, {"residual"}), (32, set()), (32, {"residual"}),
                (128, {"up", "up_bias", "activation"}), (32, {"residual"})]  # fmt: skip
    assert counting.given == 4 * [(32, set()), *products, *products, (32, set())]


def test_the_report_tells_which_linears_round(unet_and_inputs):
    model, _ = unet_and_inputs("sdxl", torch.float32)
    accel.optimize(model, **INT8)
    found = sites(model, "activations")
    prompt = [row["path"] for row in accel.report(model).weights if row["scheme"] == "int8 by row"]
    assert len(prompt) == 16 and all("attn2.to_k" in path or "attn2.to_v" in path for path in prompt)
    both = "int8 by row, activations int8 beyond 64 rows"
    assert {row["scheme"] for row in accel.report(model).weights if row["path"] not in prompt} == {both}
    assert {reason for path, (_, reason) in found.items() if path} == {both} and not set(prompt) & set(found)
    count = len(held_by(model)) - len(prompt)
    told = f"{count} linears round rows, where there are more than 64; 16 that project the prompt, once a loop, do not"
    assert found[""] == ("patched", told) and len(found) == count + 1
    assert "activations int8 beyond" in " ".join(str(accel.report(model)).split())
    sizes = {"attention_head_dim": 12, "cross_attention_dim": 24}
    odd = accel.optimize(transformer("pixart", **sizes), **INT8)
    left = {path: reason for path, (status, reason) in sites(odd, "activations").items() if status == "skipped"}
    assert set(left.values()) == {"24 inputs, not a multiple of 16"}
    assert odd.transformer_blocks[0].ff.net[0].proj.activations is None
    assert odd.transformer_blocks[0].ff.net[2].activations == "int8"
    with pytest.raises(ValueError, match=r"strict=True: transformer_blocks.0.attn1.to_q \(activations\): 24 inputs"):
        accel.optimize(transformer("pixart", **sizes), strict=True, graphs=False, **INT8)
    accel.optimize(unet_and_inputs("sd15", torch.float32)[0], strict=True, **INT8)


@pytest.mark.turns(2)
def test_on_and_off_where_the_originals_were_not_kept(unet_and_inputs):
    model, inputs = unet_and_inputs("sd15")
    plain = accel.optimize(copy.deepcopy(model), weights="int8", graphs=False)
    accel.optimize(model, keep_original=False, **INT8)
    with_rows = run(model, inputs)
    with pytest.warns(UserWarning, match="weights stay quantized"):
        accel.restore(model)
    assert {module.activations for module in held_by(model)} == {None}
    accel.optimize(model)
    close(run(model, inputs), run(plain, inputs), EXACT)
    accel.optimize(model, activations="int8")
    close(run(model, inputs), with_rows, 1e-5)  # its numbers may fall to the other side of a half
    assert error(run(model, inputs), run(plain, inputs)) > 1e-4
    quality = accel.verify(model, **inputs)
    assert quality.passed and quality.lossy == "activations='int8'" and "rounded rows" in quality.parts
    accel.restore(model)
    assert {module.activations for module in held_by(model)} == {None}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("int8", torch.float16), ("int8", torch.bfloat16), ("int8-outliers", torch.float16), ("fp8", torch.bfloat16)],
    ids=str,
)
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_verify_tells_the_loss_and_judges_products(kind, dtype, unet_and_inputs):
    model, inputs = unet_and_inputs("sdxl", dtype)
    inputs = in_dtype(inputs, dtype)
    accel.optimize(model, **options(kind))
    quality = accel.verify(model, **inputs)
    assert quality.passed, quality.verdict
    assert quality.lossy == f"weights={options(kind)['weights']!r}, activations={kind!r}"
    assert set(quality.parts) == {"over the same weights", "rounded rows", "their products"}
    assert "without rounding rows" in quality.note and quality.parts["rounded rows"].error > 0.3
    few = torch.utils._pytree.tree_map(lambda t: t[:1] if t.dim() else t, inputs)
    few = accel.verify(model, **few | {"sample": few["sample"][:, :, :8, :8]})
    assert few.passed and "too few in this call" in few.note
