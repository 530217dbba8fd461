"""Experts in formats that kernels of the Hub multiply, for which torch stands here: called inside of fused layers."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

import accel
from support.bits import float8
from support.llm.families import make, padded
from support.llm.outputs import generate, ran_fast, same

fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")


def wide(weight, scales, block):
    return weight.float() * scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)


def in_float8(monkeypatch):
    def one(x, weight, scales, block, dtype, **_):
        return x @ wide(weight, scales, block).T

    def batched(x, weight, scales, block_size, expert_ids):
        return torch.einsum("rk,rnk->rn", x, wide(weight, scales, block_size)[expert_ids])

    def grouped(x, weight, scales, offsets, block_size, **_):
        rows = x.tensor_split(offsets[:-1].long())
        return torch.cat([part @ own.T for part, own in zip(rows, wide(weight, scales, block_size), strict=True)])

    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", fp8.FineGrainedFP8(one, batched, grouped))
    config = transformers.FineGrainedFP8Config(weight_block_size=(32, 32))
    model = make("qwen3-moe", torch.float32, hidden_size=64, moe_intermediate_size=32)
    stock = copy.deepcopy(model)
    fp8.replace_with_fp8_linear(model, ["lm_head", "gate"], config)
    for name, module in model.named_modules():
        if isinstance(module, fp8.FP8Experts):
            for stack, weight in stock.get_submodule(name).named_parameters():
                linears = [nn.Linear(*one.T.shape, bias=False) for one in weight]
                for linear, one in zip(linears, weight, strict=True):
                    linear.weight.data = one.data
                made = [float8(linear, (32, 32)) for linear in linears]
                module._parameters[stack] = nn.Parameter(torch.stack([one.weight for one in made]), False)
                scales = torch.stack([one.weight_scale_inv for one in made])
                module._parameters[f"{stack}_scale_inv"] = nn.Parameter(scales, False)
        elif isinstance(module, fp8.FP8Linear):
            vars(module).update(vars(float8(stock.get_submodule(name), (32, 32))))
    return model.eval()


class Stack:
    """No tensor, as the library's."""

    def __init__(self, matrices):
        self.matrices, self.shape = matrices, matrices.shape


def in_mxfp4(monkeypatch):
    def routing(logits, k):
        values, chosen = logits.topk(k)
        return SimpleNamespace(chosen=chosen, gate_scal=values.softmax(-1)), object(), object()

    def multiply(x, weight, bias, routing, gather_indx=None, fused_activation=None, gammas=None, **_):
        experts = routing.chosen.flatten()
        x = x if gather_indx is None else x.repeat_interleave(routing.chosen.shape[1], 0)
        y = torch.einsum("rk,rkn->rn", x, weight.matrices[experts]) + bias[experts]
        if fused_activation is not None:
            alpha, limit = fused_activation
            gate, up = y[:, ::2].clamp(max=limit), y[:, 1::2].clamp(-limit, limit)
            y = (up + 1) * gate * torch.sigmoid(gate * alpha)
        return y if gammas is None else (y * gammas.reshape(-1, 1)).view(*gammas.shape, -1).sum(1)

    ogs = SimpleNamespace(FnSpecs=lambda *_: None, FusedActivation=lambda _, given, __: given, matmul_ogs=multiply)
    hub = SimpleNamespace(
        matmul_ogs=ogs, swiglu=SimpleNamespace(swiglu_fn=None), routing=SimpleNamespace(routing=routing)
    )
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", lambda *_, **__: hub)
    monkeypatch.setattr(mxfp4, "triton_kernels_hub", hub, raising=False)
    model = make("gpt-oss", torch.float32)
    stock, values = copy.deepcopy(model), torch.tensor(mxfp4.FP4_VALUES) / 64
    mxfp4.replace_with_mxfp4_linear(model, transformers.Mxfp4Config())
    for name, module in model.named_modules():
        if isinstance(module, mxfp4.Mxfp4GptOssExperts):
            for stack, weight in stock.get_submodule(name).named_parameters():
                module._parameters.pop(stack)
                if stack.endswith("bias"):
                    module._parameters[stack] = nn.Parameter(weight.data, False)
                else:
                    setattr(module, stack, Stack(values[(weight.data * 997).int().remainder(16).long()]))
    return model.eval()


@pytest.mark.parametrize("build", [in_float8, in_mxfp4])
def test_they_are_called(build, monkeypatch):
    model = build(monkeypatch)
    stock = copy.deepcopy(model)
    wanted = generate(stock, *padded())
    accel.optimize(model)
    same(generate(model, *padded()), wanted)
    ran_fast(model)
    layers = [row[3] for row in accel.report(model).sites if row[1] == "decoder layer"]
    assert len(layers) == 2 and all("in a format of their library" in reason for reason in layers)
    accel.restore(model)
    same(generate(model, *padded()), wanted)


def test_float8_runs_without_its_kernel(monkeypatch):
    model = in_float8(monkeypatch)
    wanted = generate(model, *padded())
    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", None)
    accel.optimize(model)
    same(generate(model, *padded()), wanted)
    ran_fast(model)
    same(generate(copy.deepcopy(model), *padded()), wanted)
    told = [row[3] for row in accel.report(model).sites if row[1] == "weights"]
    assert len(told) == 10 and sum("kernel for its experts is missing" in reason for reason in told) == 2
    accel.restore(model)
    with pytest.raises(ImportError, match="kernel"):
        generate(model, *padded())
