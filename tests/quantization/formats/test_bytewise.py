"""Weights of whole bytes with scales, read where they lie: of transformers, torchao and Quanto, beside their values."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import quantized_linear
from torch import nn

import accel
from accel.cuda_graphs.rule import obstacle
from accel.libraries.code import lacks_kernel
from accel.quantization.formats.stored import StoredWeight
from accel.quantization.formats.stored_weight import read_stored, stored_weight
from support.bits import float8
from support.diffusion.library_formats import FORMATS, READ
from support.llm.families import layers, make, padded
from support.llm.outputs import generate, ran_fast, same
from support.state import assert_same_state, snapshot

library = pytest.importorskip("transformers.integrations.finegrained_fp8")
BLOCKS = [{}, {"block": (1, 32), "powers": True}, {"block": None}]


def dequantized(linear, dtype):
    """As transformers does it, of whole blocks."""
    n, k = linear.weight.shape
    tall, wide = linear.block_size or (n, k)
    whole = torch.zeros(-(-n // tall) * tall, -(-k // wide) * wide, dtype=torch.float8_e4m3fn)
    whole[:n, :k] = linear.weight
    op = library.Fp8Dequantize(None)
    return op._dequantize_one(whole, linear.weight_scale_inv.reshape(-1, -(-k // wide)), dtype)[:n, :k]


@pytest.mark.parametrize("options", BLOCKS)
def test_its_values_are_the_librarys_to_the_bit(options):
    linear = float8(nn.Linear(288, 150), **options)
    held = stored_weight(linear).weight
    assert held.data.data_ptr() == linear.weight.data_ptr() and held.format.name == "fp8"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(held.dequantized(dtype), dequantized(linear, dtype))


@pytest.mark.parametrize("options", BLOCKS)
def test_on_a_gpu_kernels_of_our_own_float8_read_them(options):
    held = stored_weight(float8(nn.Linear(416, 150), **options)).weight  # the last of some groups is smaller
    ours, x = held.quantized(), torch.randn(3, 416)
    assert ours.data.data_ptr() == held.data.data_ptr()
    for dtype in (torch.float32, torch.bfloat16):
        wide = held.dequantized(dtype)
        assert torch.equal(ours.dequantized(dtype), wide)
        found = quantized_linear.instead(x.to(dtype), ours, up=ours, activation="silu")
        y = F.linear(x.to(dtype), wide)
        torch.testing.assert_close(found, F.silu(y) * y)


@pytest.mark.parametrize("what", ["columns", "scales", "meta", "turned"])
def test_what_cannot_be_read_is_told(what):
    linear = float8(nn.Linear(132 if what == "columns" else 64, 64))
    if what == "scales":
        linear.weight_scale_inv = nn.Parameter(torch.ones(2, 1))
    elif what != "columns":
        weight = linear.weight.to("meta") if what == "meta" else linear.weight.t()
        linear.weight = nn.Parameter(weight, requires_grad=False)
    assert isinstance(read_stored(linear), str) and stored_weight(linear) is None


def rounding(x, weight, scales, block, dtype, activation_scale=None):
    """What the library's kernel computes: inputs in float8 by a scale for each block of them, or a fixed one."""
    n, k = weight.shape
    tall, wide = block or (n, k)
    blocks = x.float().unflatten(-1, (-1, wide))
    step = blocks.abs().amax(-1, keepdim=True) / 448 if activation_scale is None else activation_scale
    x = ((blocks / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step).flatten(-2)
    scales = scales.float().reshape(-1, k // wide).repeat_interleave(tall, 0)[:n].repeat_interleave(wide, 1)
    return F.linear(x, weight.float() * scales).to(dtype)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(library, "_FINEGRAINED_FP8", library.FineGrainedFP8(rounding, None, None))


@pytest.mark.usefixtures("kernel")
@pytest.mark.share(1)
@pytest.mark.parametrize("options", [*BLOCKS, {"block": None, "fixed": 0.02}])
def test_a_linear_that_rounds_its_inputs_is_known(options):
    class Doubled(library.FP8Linear):
        def forward(self, x):
            return super().forward(x) * 2

    linear = float8(nn.Linear(256, 130), **options)
    found, x = stored_weight(linear), torch.randn(5, 256)
    truth = F.linear(x, dequantized(linear, torch.float32), linear.bias)
    torch.testing.assert_close(found(x), truth)
    assert 0.005 < ((linear(x) - truth).norm() / truth.norm()) < 0.05  # and it keeps them
    linear.__class__ = Doubled
    assert stored_weight(linear) is None and isinstance(read_stored(linear), StoredWeight)


@pytest.mark.usefixtures("kernel")
def test_a_linear_of_groups_is_called():
    linear = float8(nn.Linear(128, 256))
    linear.__class__, linear.n_groups = library.FP8GroupedLinear, 2
    assert stored_weight(linear) is None


def in_float8():
    """A model, and one with the same values as plain weights."""
    model = make("llama-biases", torch.float32, intermediate_size=160)
    truth = copy.deepcopy(model)
    for layer, other in zip(layers(model).values(), layers(truth).values(), strict=True):
        for where, linear in list(layer.named_modules()):
            if type(linear) is nn.Linear:
                layer.set_submodule(where, made := float8(linear, (32, 32)))
                other.get_submodule(where).weight.data = dequantized(made, torch.float32)
    return model, truth


def test_they_are_not_quantized_again():
    model, truth = in_float8()
    with pytest.warns(UserWarning, match="is fp8 already"):
        accel.optimize(model, weights="int8")
    same(generate(model, *padded()), generate(truth, *padded()))


@pytest.mark.parametrize("there", [False, True])
def test_language_models(there, request):
    """Without the kernel stock cannot run them at all; with it ours are nearer to what the weights say."""
    if there:
        request.getfixturevalue("kernel")
    model, truth = in_float8()
    ids, mask = padded()
    before, saved = snapshot(model), {key: one.clone() for key, one in model.state_dict().items()}
    accel.optimize(model)
    same(generate(model, ids, mask), generate(truth, ids, mask))
    ran_fast(model)
    assert obstacle(model) is None  # it is captured on a GPU
    rows = [row[3] for row in accel.report(model).sites if row[1] == "weights"]
    assert rows and all("read as it came; its inputs keep their dtype" in reason for reason in rows)
    same(generate(copy.deepcopy(model), ids, mask), generate(truth, ids, mask))
    assert all(torch.equal(one, saved[key]) for key, one in model.state_dict().items())
    accel.restore(model)
    assert_same_state(before, snapshot(model))
    if there:
        generate(model, ids, mask)
    else:
        with pytest.raises(ImportError, match="kernel"):
            generate(model, ids, mask)


def test_a_checkpoint(tmp_path, monkeypatch):
    """Loaded as where there is a GPU; elsewhere transformers writes its weights out."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    model, truth = in_float8()
    model.config.quantization_config = FineGrainedFP8Config(weight_block_size=(32, 32))
    model.config.save_pretrained(tmp_path)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with monkeypatch.context() as there:
        there.setattr("torch.cuda.is_available", lambda: True)
        there.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
        there.setattr("torch.cuda.empty_cache", lambda: None)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for one in (accel.optimize(loaded), accel.optimize(accel.load(tmp_path, torch.float32))):
        same(generate(one, *padded()), generate(truth, *padded()))
        ran_fast(one)
    loaded.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], one) for name, one in tensors.items())


@pytest.mark.parametrize("format", sorted(READ))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_formats_of_other_libraries(format, dtype):
    FORMATS[format](layer := nn.Sequential(nn.Linear(96, 70).to(dtype)))
    held = stored_weight(layer[0]).weight
    own = layer[0].weight
    wanted = F.linear(torch.eye(96, dtype=dtype), own).t() if "int4" in format else own.dequantize()
    assert torch.equal(held.dequantized(dtype), wanted)
    model, stock = (make("llama-biases", torch.float32, intermediate_size=160) for _ in range(2))
    FORMATS[format](model)
    FORMATS[format](stock)
    accel.optimize(model)
    same(generate(model, *padded()), generate(stock, *padded()))
    ran_fast(model)
    rows = [row[3] for row in accel.report(model).sites if row[1] == "weights"]
    assert len(rows) == 15 and all("read as it came" in reason for reason in rows)
    accel.restore(model)
    same(generate(model, *padded()), generate(stock, *padded()))


@pytest.mark.parametrize("format", ["torchao-int8-int8", "quanto-int4"])
def test_formats_that_run_their_own_forward(format):
    FORMATS[format](layer := nn.Sequential(nn.Linear(96, 70)))
    assert stored_weight(layer[0]) is None


def test_tiles_of_torchao_are_named():
    kinds = pytest.importorskip("torchao.quantization.quantize_.workflows", reason="needs torchao: make test-formats")
    linear = nn.Linear(1024, 64, bias=False)
    tiles, beside = torch.zeros(8, 8, 32, 4, dtype=torch.int32), torch.zeros(32, 64, 2, dtype=torch.bfloat16)
    held = kinds.Int4TilePackedTo4dTensor(tiles, beside, [1, 32], linear.weight.shape)
    linear.weight = nn.Parameter(held, requires_grad=False)
    assert read_stored(linear) == "its weight is a Int4TilePackedTo4dTensor"


def test_formats_are_kept_where_they_are_saved(tmp_path):
    torchao = pytest.importorskip("torchao.quantization", reason="needs torchao: make test-formats")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    make("llama", torch.float32).save_pretrained(tmp_path / "plain")
    asked = {"quantization_config": TorchAoConfig(torchao.Int8WeightOnlyConfig()), "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32, **asked).eval()
    wanted = generate(accel.optimize(model), *padded())
    ran_fast(model)
    model.save_pretrained(tmp_path / "saved")
    again = accel.load(tmp_path / "saved", device="cpu")
    same(generate(again, *padded()), wanted)
    assert stored_weight(again.model.layers[0].mlp.up_proj) is not None


def test_a_linear_of_torchao_in_4_bits_lacks_a_kernel_without_the_package_that_multiplies_it():
    kind = type("Int4Tensor", (), {"__module__": "torchao.quantization"})
    assert lacks_kernel(SimpleNamespace(_parameters={"weight": kind()}))
    assert not lacks_kernel(nn.Linear(2, 2))
