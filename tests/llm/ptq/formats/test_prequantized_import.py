"""Models that came quantized: taken over as they are, or refused with the reason."""

import copy
import pickle

import pytest
import torch
from torch import nn

import accel
from accel.quantization.formats.compressed_tensors import read_compressed_tensors
from accel.quantization.formats.repacked import Repacked
from support.llm.families import in_turn, make
from support.llm.held_out import LiveBytes
from support.llm.outputs import ran_fast, same, write_alike
from support.llm.prequantized.models import MAKERS, GptqLinear, compressed, prequantized
from support.llm.quantized import held_by, logits, sites, whole_numbers, written_out

KINDS = ("gptq", "gptq-v2", "awq", "bitsandbytes")


def fast(model) -> bool:
    return all(s == "patched" for _, rule, s, _ in accel.report(model).sites if rule in ("language model", "weights"))


# transformers itself dequantizes packed numbers with zero points
SCHEMES = ("int8", "int8 bytes", "int8-asym bytes", "int4-g32", "fp8")
FAMILIES = ("llama-biases", "llama-tied", "qwen2", "gpt-neox", "mixtral")


@pytest.mark.parametrize(
    ("name", "scheme"),
    sorted(
        {*in_turn(FAMILIES, SCHEMES), *((name, scheme) for name in ("llama-biases", "mixtral") for scheme in SCHEMES)}
        | {("llama-biases", "int4-g32 3")}
    ),
)
@pytest.mark.share(6)
@pytest.mark.turns(2)
def test_compressed_tensors_run_fast_and_come_back_as_they_were(name, scheme, folders):
    folder = folders(name, scheme)
    model, stock, fresh = compressed(folder), compressed(folder), compressed(folder)
    parameters = {key: id(value) for key, value in model.named_parameters()}
    accel.optimize(model)
    assert len(held_by(model)) == sum(hasattr(module, "weight_scale") for module in fresh.modules()) > 0
    assert fast(model) and accel.verify(model).passed
    write_alike(model, stock)
    ran_fast(model)
    accel.restore(model)
    assert not held_by(model)
    assert {key: id(value) for key, value in model.named_parameters()} == parameters
    for (key, mine), (other, theirs) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert key == other and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert torch.equal(logits(model)["logits"], logits(fresh)["logits"])


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "int8"])  # which are unpacked
def test_numbers_stay_where_they_are(scheme, folders):
    model = compressed(folders("llama-biases", scheme))
    module = model.model.layers[0].mlp.down_proj
    big = module.weight_packed if scheme == "int4-g32" else module.weight
    place = big.data_ptr()
    accel.optimize(model)
    assert model.model.layers[0].mlp.down_proj.data.data_ptr() == place and big.numel() == 0
    accel.restore(model)
    assert big.data_ptr() == place


@pytest.mark.parametrize("kind", ["int8", "int4-g32", *KINDS])
@pytest.mark.share(16)
@pytest.mark.turns(2)
def test_no_more_than_a_layers_weights_are_ever_whole(kind, folders):
    """Of three layers. Where no operation gives a tensor, as in loading a file, there is none of numbers either."""
    if kind in KINDS:
        model, _ = prequantized(kind, num_hidden_layers=3)
    else:
        model = make("llama-biases", num_hidden_layers=3)
        accel.quantize(model, kind)
        folder = folders()
        model.save_pretrained(folder.parent / f"three-{kind}")
    with LiveBytes(counts=written_out) as counted:
        if kind not in KINDS:
            model = compressed(folder.parent / f"three-{kind}")
        accel.optimize(model)
        model(torch.tensor([[3, 4, 5]]))
    assert len(held_by(model)) == 21
    assert 0 < counted.most_tensors <= 7, f"{counted.most_tensors} at once"


@pytest.mark.parametrize(
    ("kind", "activations"),
    [
        *((kind, None) for kind in ("int8", "int8 bytes", "int4-g32", "fp8", *KINDS)),
        *((kind, "int8") for kind in ("int8", "int8 bytes", "bitsandbytes")),
    ],
)
@pytest.mark.share(16)
def test_numbers_are_never_held_twice(kind, activations, folders):
    """Neither repacked nor given back: the model's, and what a few operations need for one weight."""
    model = prequantized(kind)[0] if kind in KINDS else copy.deepcopy(compressed(folders("llama-biases", kind)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with LiveBytes(model, whole_numbers) as counted:
        accel.optimize(model, activations=activations)
        assert held_by(model)
        zeros = sum(module.zeros.nbytes for module in held_by(model) if module.zeros is not None)  # a byte each, ours
        ours = counted.most
        counted.most = counted.start
        accel.restore(model)
    most = counted.start + 2 * 96 * 64 + zeros
    assert counted.start > 0 and ours <= most and counted.most <= most, (counted.start, ours, counted.most)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "llama-biases"])
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.share(1 if "orders" in k else 6)) for k in MAKERS])
@pytest.mark.turns(2)
def test_other_layouts_are_repacked(kind, name):
    model, twin = prequantized(kind, name)
    held = {key: (id(value), value.clone()) for key, value in (*model.named_parameters(), *model.named_buffers())}
    modules = {path: id(module) for path, module in model.named_modules()}
    accel.optimize(model)
    assert len(held_by(model)) == 14 and fast(model), accel.report(model)
    assert (held_by(model)[0].zeros is None) == (kind in ("gptq-symmetric", "bitsandbytes"))
    ordered = {module.order for module in held_by(model) if module.in_features == 64}
    assert (len(ordered) > 1) == ("orders" in kind) and (None in ordered) == ("order" not in kind)
    for path in sites(model) if kind != "bitsandbytes" else ():  # which divides once more
        ours = model.get_submodule(path).quantized
        assert torch.equal(ours.dequantized(torch.float32), twin.get_submodule(path).weight)
    write_alike(model, twin)
    ran_fast(model)
    _status, reason = sites(model)["model.layers.0.mlp.up_proj"]
    assert ("activations keep their dtype" in reason) == (kind == "bitsandbytes")
    accel.restore(model)
    assert {path: id(module) for path, module in model.named_modules()} == modules
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert after.keys() == held.keys()
    assert all(id(after[key]) == held[key][0] and torch.equal(after[key], held[key][1]) for key in held)


@pytest.mark.parametrize("called", [False, True])
def test_bitsandbytes_before_and_after_its_first_call(called):
    model, twin = prequantized("bitsandbytes")
    ids = torch.tensor([[3, 4, 5]])
    before = model(ids).logits if called else None
    accel.optimize(model)
    assert len(held_by(model)) == 14
    module = accel.api._plans(model)[""].patches[0].pairs[0][0].module
    assert module.weight.numel() == 0 and module.state.CB is None and module.weight.CB is None
    same({"x": model(ids).logits}, {"x": twin(ids).logits})
    accel.restore(model)
    assert not called or torch.equal(model(ids).logits, before)
    model(ids)
    assert module.state.CB.data_ptr() == module.weight.data_ptr()


def test_a_half_precision_model_is_compared_in_its_own_dtype():
    model, twin = prequantized("gptq", "llama", torch.float16)
    accel.optimize(model)
    assert len(held_by(model)) == 14 and held_by(model)[0].scales.dtype == torch.float16
    apart = (logits(model)["logits"].float() - logits(twin)["logits"].float()).norm()
    assert apart < 1e-2 * logits(twin)["logits"].float().norm()


# -- what happens meanwhile --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "gptq", "bitsandbytes"])
def test_it_moves_with_the_model_and_comes_back(kind, folders):
    model = compressed(folders()) if kind == "int8" else prequantized(kind)[0]
    accel.optimize(model)
    model.to(torch.bfloat16)
    accel.restore(model)
    assert not held_by(model) and model.dtype == torch.bfloat16
    assert torch.isfinite(logits(model)["logits"]).all()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_restored_by_itself(copied):
    model, twin = prequantized("awq")
    accel.optimize(model)
    other = copied(model)
    accel.restore(model)
    write_alike(other, twin)
    accel.restore(other)
    assert not held_by(other) and torch.equal(logits(other)["logits"], logits(model)["logits"])


def test_planned_anew_and_after_an_error(monkeypatch):
    from accel.llm import family

    model, twin = prequantized("gptq")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    accel.optimize(model)
    accel.optimize(model, graphs=False)
    write_alike(model, twin)
    accel.restore(model)

    def broken(*given):
        assert len(held_by(model)) == 14
        raise MemoryError

    monkeypatch.setattr(family, "find_convention", broken)
    with pytest.raises(MemoryError):
        accel.optimize(model)
    assert not held_by(model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["int4-g32", "gptq", "awq", "bitsandbytes"])
def test_what_arrived_is_saved_as_compressed_tensors_beside_what_did_not(kind, folders, tmp_path):
    model = compressed(folders("llama-biases", kind)) if kind not in MAKERS else prequantized(kind)[0]
    accel.optimize(model, weights="int8-head")
    wanted = logits(model)["logits"]
    model.save_pretrained(tmp_path)
    found = logits(compressed(tmp_path))["logits"]
    assert (found - wanted).abs().max() < 1e-5


def test_it_is_recognized_by_what_it_holds():
    class Elsewhere(nn.Linear):
        """Of no package we know."""

    module = Elsewhere(64, 32)
    del module.weight
    module.weight = nn.Parameter(torch.ones(32, 64, dtype=torch.int8), requires_grad=False)
    assert read_compressed_tensors(module) is None
    module.weight_scale = nn.Parameter(torch.ones(32, 1))
    assert read_compressed_tensors(module) is None  # as of transformers' linears of Gemma, which round outputs too
    module.quantization_scheme = object()
    assert isinstance(read_compressed_tensors(module), Repacked)
    assert read_compressed_tensors(nn.Linear(4, 4)) is None


def uneven(module):
    module.g_idx = (torch.arange(module.g_idx.numel()) >= 20).int()


def no_groups(module):
    module.scales, module.forward = module.scales[:0], lambda x: x.new_zeros(*x.shape[:-1], module.qweight.shape[1])


LEFT = {
    "9 bits: only 2 to 8 are read": lambda module: setattr(
        module, "qweight", torch.zeros(18, module.qweight.shape[1], dtype=torch.int32)
    ),
    "it computes something else than its tensors say (": lambda module: setattr(
        module, "forward", lambda x: GptqLinear.forward(module, x) * 1.1
    ),
    "calling it to compare raised IndexError": lambda module: setattr(module, "forward", lambda x: [][1]),
    "64 inputs in 2 groups, zero points (2, 11)": lambda module: setattr(
        module, "qzeros", module.qzeros[:, :-1].contiguous()
    ),
    "384 bits: only 2 to 8 are read": lambda module: setattr(module, "qweight", module.qweight.flatten()),
    "it runs its own forward: groups of uneven sizes: [20, 44] inputs share a scale": uneven,
    "64 inputs in 0 groups": no_groups,
    "forward hooks": lambda module: module.register_forward_hook(lambda *given: None),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_not_understood_is_left_alone_and_said(reason):
    model, _ = prequantized("gptq")
    module = model.model.layers[1].mlp.up_proj
    LEFT[reason](module)
    with pytest.raises(ValueError, match=r"strict=True: model.layers.1.mlp.up_proj \(weights\): "):
        accel.optimize(model, strict=True)
    assert not held_by(model)
    accel.optimize(model)
    assert len(held_by(model)) == 13 and model.model.layers[1].mlp.up_proj is module
    status, said = sites(model)["model.layers.1.mlp.up_proj"]
    assert status == "skipped" and reason in said
    accel.restore(model)
    assert not held_by(model)


def test_layers_are_fused_around_what_is_left():
    model, _ = prequantized("gptq")
    for module in model.modules():
        if isinstance(module, GptqLinear):
            uneven(module)
    wanted = logits(model)
    accel.optimize(model)
    assert not held_by(model) and {status for status, _ in sites(model).values()} == {"skipped"}
    assert {row[2:] for row in accel.report(model).sites if row[1] == "decoder layer"} == {("patched", "")}
    same(logits(model), wanted)


def test_four_bits_that_cannot_be_read_are_left_alone():
    model = make("llama")
    weight = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    weight.data = torch.zeros(96 * 32, 1, dtype=torch.uint8)
    weight.quant_state = object()
    accel.optimize(model)
    status, reason = sites(model)["model.layers.0.mlp.up_proj"]
    assert status == "skipped" and "cannot be read" in reason


@pytest.mark.parametrize("damage", ["scales", "shape", "bits", "order"])
def test_compressed_tensors_that_do_not_fit_are_left_to_their_library(damage, folders):
    model = compressed(folders("llama-biases", "int4-g32"))
    module = model.model.layers[0].mlp.down_proj
    if damage == "scales":
        module.weight_scale = nn.Parameter(torch.ones(64, 5), requires_grad=False)
    elif damage == "shape":
        module.weight_shape.data = torch.tensor([64, 104])
    elif damage == "bits":
        module.weight_packed.data = module.weight_packed.data[:, :10].contiguous()
    else:
        module.register_buffer("weight_g_idx", torch.arange(96))
    accel.optimize(model)
    assert model.model.layers[0].mlp.down_proj is module and not held_by(model)
    status, reason = sites(model)["model.layers.0.mlp.down_proj"]
    assert status == "skipped" and ("raised" in reason) == (damage in ("scales", "bits")) == bool(
        model._forward_pre_hooks
    )


def test_compressed_tensors_of_another_layout_are_dequantized_as_by_a_first_call(folders):
    ours, stock = compressed(folders("llama-biases", "fp8")), compressed(folders("llama-biases", "fp8"))
    for module in (*ours.modules(), *stock.modules()):
        if hasattr(module, "weight_scale"):
            module.quantization_scheme.weights.strategy = "block"
            module.quantization_scheme.weights.block_structure = [16, 16]
            scales = torch.rand(*(size // 16 for size in module.weight.shape), generator=torch.manual_seed(1)) / 448
            module.weight_scale = nn.Parameter(scales, requires_grad=False)
    accel.optimize(ours)
    write_alike(ours, stock)
    ran_fast(ours)
    assert {status for status, _ in sites(ours).values()} == {"skipped"}
    accel.restore(ours)
    assert torch.equal(logits(ours)["logits"], logits(stock)["logits"])


def test_dequantized_by_a_call_before(folders):
    model = compressed(folders("llama-biases", "int8"))
    before = logits(model)["logits"]
    accel.optimize(model)
    assert not held_by(model)
    assert {reason for _, reason in sites(model).values()} == {
        "it runs its own forward: its weight was dequantized by a call before accel.optimize"
    }
    assert torch.equal(logits(model)["logits"], before) or accel.verify(model).passed
