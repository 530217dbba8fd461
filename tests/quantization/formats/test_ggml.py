"""GGUF: which linears are read, and whole models that hold such blocks, beside the library's own."""

import copy
from types import SimpleNamespace

import pytest
import torch
from accel_kernels.gemm.blocks.ggml import GGML

import accel
from accel.diffusion.dit.executable import Executable
from accel.quantization.formats.ggml import read_ggml
from accel.quantization.formats.stored import MISPLACED
from accel.quantization.formats.stored_weight import read_stored, stored_weight
from support.compatibility.diffusers_calls import inputs
from support.compatibility.tiny_diffusers_models import build
from support.compatibility.transformer_pair import FLUX, SD3, first
from support.diffusion.library_formats import in_blocks
from support.diffusion.outputs import close, error, in_dtype
from support.diffusion.tiny_models import make_unet, unet_inputs
from support.kernels.ggml import random_blocks
from support.llm.prequantized.gguf_file import write_llama

pytest.importorskip("gguf")


@pytest.mark.parametrize("name", GGML)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.share(4)
def test_linears_of_diffusers(name, dtype):
    columns = GGML[name].columns * 2
    linear = in_blocks(torch.nn.Sequential(torch.nn.Linear(columns, 12)), name, dtype)[0]
    x = torch.randn(3, columns, dtype=dtype)
    held = read_ggml(linear).weight
    assert held.data.data_ptr() == linear.weight.data_ptr() and type(held.data) is torch.Tensor
    assert torch.equal(torch.nn.functional.linear(x, held.dequantized(dtype), linear.bias), linear(x))


def test_bfloat16_in_bytes():
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    linear, weight = GGUFLinear(96, 12, bias=True, compute_dtype=torch.float32), torch.randn(12, 96).bfloat16()
    kind = gguf.GGMLQuantizationType.BF16
    linear._parameters["weight"] = GGUFParameter(weight.view(torch.uint8), quant_type=kind)
    held = stored_weight(linear).weight
    assert held.data.data_ptr() == linear.weight.data_ptr() and torch.equal(held.dequantized(torch.bfloat16), weight)
    assert torch.equal(torch.nn.functional.linear(x := torch.randn(3, 96), weight.float(), linear.bias), linear(x))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K"])
def test_linears_of_transformers(name):
    from transformers.integrations.gguf.utils import GgufLinear

    format = GGML[name]
    linear = GgufLinear(2 * format.columns, 12, format.code, bias=True)
    linear.weight.data = random_blocks(format, 24).reshape(12, -1)
    linear.bias.data = torch.randn(12)
    x = torch.randn(9, linear.in_features)  # up to 8 rows are left to a kernel that only GPUs have
    held = read_ggml(linear).weight
    assert torch.equal(x @ held.dequantized(torch.float32).T + linear.bias, linear(x))
    linear.input_permutation = torch.randperm(linear.in_features)
    assert "order" in read_ggml(linear)


def test_what_is_no_such_linear():
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFParameter

    assert read_ggml(torch.nn.Linear(32, 4)) is read_ggml(torch.nn.LayerNorm(4)) is None
    linear = in_blocks(torch.nn.Sequential(torch.nn.Linear(32, 4)), "Q8_0", torch.float32)[0]
    for data, kind, said in (
        (torch.zeros(4, 34, dtype=torch.uint8), "TQ1_0", "type TQ1_0"),
        (torch.zeros(4, 68, dtype=torch.uint8), "Q8_0", r"(4, 68) for 4 outputs of 32 inputs"),
        (torch.zeros(34, 4, dtype=torch.uint8).T, "Q8_0", MISPLACED),
        (torch.zeros(4, 34, dtype=torch.uint8, device="meta"), "Q8_0", MISPLACED),
    ):
        linear._parameters["weight"] = GGUFParameter(data, quant_type=gguf.GGMLQuantizationType[kind])
        assert said in read_stored(linear)


def called(make, dtype, given):
    """Outputs of a model and of the optimized one, its report, and whether it is given back as it was."""
    stock, ours = make(dtype), make(dtype)
    accel.optimize(ours, cpu="fuse")
    with torch.no_grad():
        outputs = [first(model(**in_dtype(given, dtype))) for model in (stock, ours, ours)]
    report, kept = accel.report(ours), stock.state_dict()
    state = ours.state_dict()
    assert all(type(state[name]) is type(one) and torch.equal(state[name], one) for name, one in kept.items())
    accel.restore(ours)
    with torch.no_grad():
        assert torch.equal(first(ours(**in_dtype(given, dtype))), outputs[0])
    return outputs, report


def as_near_as_stock(plain, name, given):
    """A denoiser's report: in float32 it is stock's, in bfloat16 no farther from that than stock is."""

    def make(dtype):
        return in_blocks(copy.deepcopy(plain), name, dtype)

    (truth, *found), report = called(make, torch.float32, given)
    for output in found:
        close(output, truth)
    assert not report.fallbacks
    (stock, *found), report = called(make, torch.bfloat16, given)
    assert not report.fallbacks and error(found[-1], truth) <= 1.1 * error(stock, truth)
    return report


@pytest.mark.parametrize(("family", "name"), [("sd15", "Q8_0"), ("sdxl", "IQ4_NL")])
@pytest.mark.turns(2)
def test_unets_are_fused_around_them(family, name):
    plain = make_unet(family, block_out_channels=(32, 64), cross_attention_dim=32)
    report = as_near_as_stock(plain, name, unet_inputs(plain))
    assert {"attention", "resnet block", "transformer block"} <= {row[1] for row in report.sites if row[2] == "patched"}


@pytest.mark.parametrize(("kind", "name"), [(FLUX, "Q5_1"), (SD3, "Q8_0")])
def test_diffusion_transformers_are_fused_around_them(kind, name, monkeypatch):
    plain, ran, run = build(kind), [], Executable.__call__
    monkeypatch.setattr(Executable, "__call__", lambda *args: ran.append(args) or run(*args))
    report = as_near_as_stock(plain, name, inputs(plain))
    blocks = [row for row in report.sites if row[1:3] == ("diffusion transformer block", "patched")]
    assert len(ran) == 4 * len(blocks) > 0  # compared, and run, in either dtype
    assert all(row[3].startswith("recorded at its first call") for row in blocks)


def test_adapters_on_them():
    peft, plain = pytest.importorskip("peft"), build(FLUX)

    def make(dtype):
        model = in_blocks(copy.deepcopy(plain), "Q4_0", dtype)
        torch.manual_seed(4)
        names = ["to_q", "to_out.0", "proj_mlp"]
        model.add_adapter(peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False))
        return model.requires_grad_(False).eval()

    outputs, report = called(make, torch.float32, inputs(plain))
    assert torch.equal(outputs[1], outputs[0]) and torch.equal(outputs[2], outputs[0]) and not report.fallbacks
    assert sum(row[1:3] == ("diffusion transformer block", "patched") for row in report.sites) == 2


def as_stock(make):
    """A language model, optimized, whose logits and tokens are stock's, all layers fused."""
    ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(3))
    stock, ours = make(), accel.optimize(make(), cpu="fuse")
    with torch.no_grad():
        close(ours(ids).logits, stock(ids).logits)
    wanted, got = (model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0) for model in (stock, ours))
    assert torch.equal(got, wanted)
    report = accel.report(ours)
    assert sum(row[1:3] == ("decoder layer", "patched") for row in report.sites) == 2 and not report.fallbacks
    return ours


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Maker of a tiny Llama from a file in Q4_K."""
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("gguf")
    write_llama(folder / "llama.gguf", "Q4_K")
    return lambda: LlamaForCausalLM.from_pretrained(folder, gguf_file="llama.gguf", dtype=torch.float32).eval()


def test_a_file_that_transformers_dequantizes_at_load(llama):
    as_stock(llama)


@pytest.mark.turns(2)
def test_a_language_model_that_keeps_its_blocks(llama, monkeypatch):
    """As transformers has it where there is a kernel, for which its own dequantized weight stands here."""
    from transformers.integrations.gguf import dequant, kernels, utils

    def multiply(weight, x, kind, rows):
        return x.float() @ dequant.dequantize(weight, kind).reshape(rows, -1).T

    names = dict.fromkeys(("dequantize", "get_rows", "mul_mat_id"))
    ops = SimpleNamespace(mul_mat_vec=multiply, GEMV_TYPES={12}, **names)
    monkeypatch.setattr(kernels, "_gguf_kernel", kernels.GgufKernel(ops))

    def make():
        model = llama()
        kinds = (torch.nn.Linear, torch.nn.Embedding)
        plan = {f"{n}.weight": GGML["Q4_K"].code for n, one in model.named_modules() if type(one) in kinds}
        replaced = utils.replace_with_gguf_modules(model, plan, kernels._gguf_kernel, torch.float32)
        for seed, module in enumerate(replaced.values()):
            count = module.weight.numel() // GGML["Q4_K"].bytes
            module.weight.data = random_blocks(GGML["Q4_K"], count, seed, 0.0005).reshape(module.weight.shape)
        assert len(replaced) == 16
        return model

    ours = as_stock(make)
    assert ours.state_dict()["model.embed_tokens.weight"].dtype == torch.uint8
    assert all(row[2] == "patched" for row in accel.report(ours).sites if row[1] == "weights")
