"""Weights quantized and taken back: bit for bit, whatever came between, errors too."""

import copy
import pickle
from itertools import product

import pytest
import torch

import accel
from accel.errors import PatchConflict
from accel.planning.plan import PLAN
from accel.quantization import patch as swap
from accel.quantization.experts import holds_numbers
from accel.quantization.module import QuantizedLinear
from support.everything import EVERYTHING
from support.llm.families import layers, make, padded
from support.llm.optimized_models import optimized, pair
from support.llm.outputs import generate, ran_fast, same, write_alike
from support.llm.quantized import HEADS, held_by, logits, of_experts, rounded, sites

FAMILIES = ("llama", "llama-tied", "llama-biases", "gpt2", "falcon-grouped", "mixtral", "mpt", "deepseek-v3", "gpt-oss")
# Tied words, experts with biases, Conv1D, layers that stay stock; each with a head in 8 bits or without.
SOME = [("llama-tied", "int8-head"), ("gpt-oss", "int4-g32-asym"), ("gpt2", "int8"), ("deepseek-v3", "int8-asym-head")]
SCHEMES = ("int8", "int4-g32-asym", *HEADS)


@pytest.mark.parametrize(("name", "weights"), list(product(FAMILIES, SCHEMES)) if EVERYTHING else SOME)
@pytest.mark.share(1)
@pytest.mark.turns(4)
def test_restore_is_exact(name, weights, tiny):
    model, twin = make(name), make(name)
    ids, mask = padded((9, 9))
    before = tiny.snapshot(model)
    accel.optimize(model, weights=weights)
    assert held_by(model)
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))
    accel.optimize(model, weights=weights)
    generate(model, ids, mask), generate(twin, ids, mask)
    accel.restore(model)
    assert tiny.differences(model, twin) == []
    assert list(model.state_dict()) == list(twin.state_dict())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    parameters = {key: value[0] for key, value in before.items() if key[0] == "tensor"}
    assert {("tensor", n): id(p) for n, p in (*model.named_parameters(), *model.named_buffers())} == parameters
    assert torch.equal(model(ids, attention_mask=mask).logits, twin(ids, attention_mask=mask).logits)


def test_tied_weights_stay_tied_and_words_as_they_are():
    model = make("llama-tied")
    words = model.get_input_embeddings().weight
    accel.optimize(model, weights="int8")
    assert model.get_output_embeddings().weight is words is model.get_input_embeddings().weight
    accel.restore(model)
    assert model.get_output_embeddings().weight is words is model.get_input_embeddings().weight


def test_linears_that_share_a_weight_share_it_again():
    model = make("llama")
    one, other = (layer.mlp for layer in list(layers(model).values())[:2])
    other.up_proj.weight = one.up_proj.weight
    other.gate_proj = one.gate_proj
    ids, mask = padded()
    accel.optimize(model, weights="int8")
    same(generate(model, ids, mask), generate(rounded(accel.restore(copy.deepcopy(model)), model), ids, mask))
    assert other.gate_proj is one.gate_proj and type(one.gate_proj) is QuantizedLinear
    accel.restore(model)
    assert other.up_proj.weight is one.up_proj.weight and other.gate_proj is one.gate_proj


@pytest.mark.parametrize("first", ["int8", None])
@pytest.mark.parametrize("then", ["int4-g32", None])
def test_a_second_optimize_plans_anew(first, then):
    (model, stock), fresh = pair("llama", weights=first), optimized("llama", weights=then)
    accel.optimize(model, weights=then)
    assert {module.scheme for module in held_by(model)} == {module.scheme for module in held_by(fresh)}
    assert len(held_by(model)) == (0 if then is None else 14)
    write_alike(model, fresh)
    accel.restore(model)
    assert torch.equal(logits(model)["logits"], logits(stock)["logits"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["qwen2", "gpt-oss"])
@pytest.mark.parametrize("weights", ["int8", "int4-g32-asym", "fp8"])
@pytest.mark.share(5)
@pytest.mark.turns(2)
def test_a_copy_is_quantized_by_itself(copied, name, weights):
    model, stock = pair(name, weights=weights)
    ids, mask = padded()
    wanted, count = generate(model, ids, mask), len(accel.report(model).weights)
    other = copied(model)
    own, its = ({b.data_ptr() for m in filter(holds_numbers, one.modules()) for b in m.buffers() if b.numel()}
                for one in (model, other))  # fmt: skip
    assert len(its) == len(own) > 14 and own.isdisjoint(its)
    accel.restore(model)
    same(generate(other, ids, mask), wanted)
    assert len(accel.report(other).weights) == count and not accel.report(other).fallbacks
    assert held_by(other) and not held_by(model)
    accel.restore(other)
    assert not held_by(other) and torch.equal(logits(other)["logits"], logits(stock)["logits"])


def test_hooks_of_the_users_stay_through_restore():
    ours, stock = pair("llama", weights="int8")
    theirs, handles = rounded(stock, ours), []
    for model in (ours, theirs, stock):
        one, other = (layer.mlp.up_proj for layer in layers(model).values())
        handles.append(one.register_forward_hook(lambda module, args, output: 2 * output))
        handles.append(other.register_forward_pre_hook(lambda module, args: (3 * args[0],)))
    write_alike(ours, theirs)
    accel.restore(ours)
    assert torch.equal(logits(ours)["logits"], logits(stock)["logits"])
    for handle in handles:
        handle.remove()
    assert torch.equal(logits(ours)["logits"], logits(make("llama"))["logits"])


@pytest.mark.parametrize(("name", "place"), [("llama", "self_attn.o_proj"), ("mixtral", "mlp.experts")])
def test_restore_refuses_where_a_forward_was_put_on_top(name, place):
    model, stock = pair(name, weights="int8")
    module, count = model.model.layers[1].get_submodule(place), len(held_by(model))
    stood = vars(module).get("forward")
    module.forward = lambda *given: 2 * type(module).forward(module, *given)
    before = logits(model)
    for call in (accel.restore, accel.verify, accel.optimize):
        with pytest.raises(PatchConflict, match=f"{type(module).__name__}.forward was replaced after accel.optimize"):
            call(model)
        assert len(held_by(model)) == count
    same(logits(model), before)
    del module.forward
    vars(module).update({} if stood is None else {"forward": stood})
    accel.restore(model)
    assert torch.equal(logits(model)["logits"], logits(stock)["logits"])


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_offloaded_afterwards(weights, buffers):
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    ours, stock = pair("llama-biases", weights=weights)
    ids, mask = padded()
    wanted = generate(rounded(stock, ours), ids, mask)
    cpu_offload(ours, execution_device=torch.device("cpu"), offload_buffers=buffers)
    assert held_by(ours)[0].data.is_meta is buffers
    same(generate(ours, ids, mask), wanted)
    with pytest.raises(PatchConflict, match="hook"):
        accel.restore(ours)
    remove_hook_from_submodules(ours)
    same(generate(ours, ids, mask), wanted)
    accel.restore(ours)
    assert torch.equal(logits(ours)["logits"], logits(stock)["logits"])


# -- the originals dropped ---------------------------------------------------------------------------------------------


@pytest.mark.turns(2)
def test_without_the_originals_restore_says_so_and_leaves_it_quantized(tmp_path):
    model, stock = make("llama-biases"), make("llama-biases")
    originals = [layer.mlp.up_proj for layer in layers(model).values()]
    accel.optimize(model, weights="int8", keep_original=False)
    assert not any(row["reversible"] for row in accel.report(model).weights)
    assert "not reversible" in str(accel.report(model))
    pairs = [pair for patch in vars(model)[PLAN].patches if hasattr(patch, "pairs") for pair in patch.pairs]
    assert not any(original is originals[0] for original, _ in pairs)
    reference = rounded(stock, model)
    write_alike(model, reference)
    quality = accel.verify(model)
    assert quality.passed and quality.lossy is None and "originals were not kept" in quality.note
    with pytest.warns(UserWarning, match="14 weights stay quantized"):
        accel.restore(model)
    assert len(held_by(model)) == 14 and accel.report(model).sites == []
    write_alike(model, reference)
    model.save_pretrained(tmp_path)
    assert "quantization_config" in (tmp_path / "config.json").read_text()
    accel.optimize(model)  # they are the model's own now
    write_alike(model, reference)
    assert accel.report(model).fallbacks == [] and not accel.report(model).weights
    assert accel.verify(model).passed
    with pytest.warns(UserWarning, match="nothing to quantize as 'fp8': model.layers.0.*: is int8 by row already"):
        accel.optimize(model, weights="fp8")
    assert {reason for path, (_, reason) in sites(model).items() if path} == {"is int8 by row already"}
    write_alike(model, reference)


@pytest.mark.parametrize(
    ("name", "weights", "place", "count"),
    [("llama-tied", "int8-head", "lm_head", 15), ("gpt-oss", "int8", "model.layers.1.mlp.experts", 12)],
)
@pytest.mark.turns(2)
def test_heads_and_experts_stay_without_their_originals(name, weights, place, count):
    ours, stock = pair(name, weights=weights, keep_original=False)
    ids, mask = padded()
    wanted = generate(rounded(stock, ours), ids, mask)
    same(generate(ours, ids, mask), wanted)
    with pytest.warns(UserWarning, match=f"{count} weights stay quantized"):
        accel.restore(ours)
    same(generate(ours, ids, mask), wanted)
    accel.optimize(ours)
    same(generate(ours, ids, mask), wanted)
    ran_fast(ours)
    assert all("forward" in vars(one) for one in of_experts(ours).values())
    with pytest.warns(UserWarning, match="nothing to quantize as 'fp8"):
        accel.optimize(ours, weights=weights.replace("int8", "fp8"))
    assert sites(ours)[place] == ("skipped", "is int8 by row already")


# -- errors meanwhile --------------------------------------------------------------------------------------------------


def test_an_error_after_quantizing_takes_it_back(tiny, monkeypatch):
    from accel.llm import family

    model = make("llama")
    before = tiny.snapshot(model)

    def broken(*given):
        assert len(held_by(model)) == 14
        raise MemoryError

    monkeypatch.setattr(family, "find_convention", broken)
    with pytest.raises(MemoryError):
        accel.optimize(model, weights="int8")
    tiny.assert_same_state(before, tiny.snapshot(model))


@pytest.mark.parametrize("keep", [True, False])
def test_an_error_at_the_very_end_takes_it_back_too(keep, tiny):
    model = make("llama")
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match="step_cache"):
        accel.optimize(model, weights="int8", keep_original=keep, step_cache=3)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_an_error_while_quantized_again_leaves_it_stock(tiny, monkeypatch):
    model = make("llama")
    before = tiny.snapshot(model)
    accel.optimize(model, weights="int8")
    plan, calls = vars(model)[PLAN], []

    def broken(module, device, dtype):
        calls.append(module)
        if len(calls) == 5:
            raise MemoryError
        return module

    plan.undo()
    del vars(model)[PLAN]
    monkeypatch.setattr(swap, "_moved", broken)
    with pytest.raises(MemoryError):
        plan.apply()
    tiny.assert_same_state(before, tiny.snapshot(model))
    monkeypatch.undo()
    plan.apply()
    assert len(held_by(model)) == 14


def test_without_gradients_being_possible_at_all():
    with torch.inference_mode():
        stock, ours = make("llama-biases"), make("llama-biases")
        accel.optimize(ours, weights="int4-g32")
        ids, mask = padded()
        same(generate(ours, ids, mask), generate(rounded(stock, ours), ids, mask))
        assert accel.report(ours).fallbacks == [] and accel.verify(ours).passed
        accel.restore(ours)
        assert torch.equal(logits(ours)["logits"], logits(stock)["logits"])
