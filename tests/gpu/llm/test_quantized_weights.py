"""Quantized weights on a GPU: memory is really saved and given back, graphs hold, results are those of the weights."""

import copy
from itertools import product

import pytest
import torch

import accel
import accel.quantization.module as quantized_modules
from accel.bench.llm.models import round_to_mxfp4
from accel.quantization.experts import QuantizedExperts
from support.device_memory import allocated
from support.llm.families import make, padded, prompt
from support.llm.gpu import on_gpu
from support.llm.modes import MODES
from support.llm.outputs import generate, same
from support.llm.prequantized.models import prequantized
from support.llm.quantized import held_by, mixture, of_experts, rounded

SCHEMES = ("int8", "int8-asym", "int4-g32", "int4-g32-asym", "fp8")
HEADS = ("int8-head", "int4-g32-head", "fp8-head")
FAMILIES = ("llama-biases", "gpt2", "gemma2", "phi3", "mixtral", "falcon-grouped")
USED = ("greedy", "greedy-padded", "sample-top", "beam", "assisted", "continued-padded")


pytestmark = pytest.mark.usefixtures("exact")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.name in USED], ids=str)
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *((name, SCHEMES[number % 5]) for number, name in enumerate(FAMILIES)),
        *zip(FAMILIES, HEADS, strict=False),  # the output head too
    ],
)
def test_in_float32_token_for_token(name, weights, mode):
    stock = make(name).cuda()
    ours = accel.optimize(copy.deepcopy(stock), weights=weights, graphs=True)
    theirs, inputs = rounded(stock, ours), on_gpu(*padded(mode.lengths))
    wanted = mode(theirs, *inputs)
    for _ in range(3):  # eager, capture, replay
        same(mode(ours, *inputs), wanted, 4e-5)
    assert (ours.get_output_embeddings() in held_by(ours)) == weights.endswith("-head")


def has_router(ours) -> bool:
    return any(not layer.spec.mlp.first for layer in vars(ours)["forward"].layers)


@pytest.mark.parametrize("weights", (*SCHEMES, *HEADS))
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_as_near_to_the_truth_as_stock_over_the_same_weights(name, weights, dtype):
    """The root mean square for each prompt; of the median token of all where rounding may send some to other experts,
    in stock as in ours: those have little in common with the truth, and who has more of them is chance.
    """
    stock = make(name).to("cuda", dtype)
    ours = accel.optimize(copy.deepcopy(stock), weights=weights, graphs=True)
    theirs, truth = rounded(stock, ours), rounded(stock, ours, torch.float32)
    chooses = has_router(ours)
    prompts = [prompt(*size).cuda() for size in ((3, 12), (1, 80), (1, 1), (300, 1), (5, 90))]
    wanted = [truth(ids).logits for ids in prompts]

    def off(model) -> torch.Tensor:
        squares = [
            (model(ids).logits.float() - right).pow(2).mean(-1).flatten()
            for ids, right in zip(prompts, wanted, strict=True)
        ]
        found = [torch.cat(squares).median()] if chooses else [each.mean() for each in squares]
        return torch.stack(found).sqrt()

    allowed = off(theirs)
    for _ in range(3):  # eager, capture, replay
        error = off(ours)
        assert bool((error <= 2 * allowed + 1e-6).all()), f"{error.tolist()}, stock's own {allowed.tolist()}"
    assert accel.verify(ours).passed


@pytest.mark.parametrize("kind", ["gptq-order", "gptq-3-order", "gptq-8-orders", "gptq-uneven", "gptq-2", "awq-3"])
def test_numbers_of_other_libraries_as_near_to_the_truth_as_their_values(kind):
    model, values = prequantized(kind, dtype=torch.bfloat16)
    ours, theirs = accel.optimize(model.cuda(), graphs=True), values.cuda()
    truth = copy.deepcopy(theirs).float()
    assert len(held_by(ours)) == 14
    for ids in (prompt(*size).cuda() for size in ((3, 12), (1, 80), (1, 1), (300, 1), (5, 90))):
        wanted = truth(ids).logits
        allowed = (theirs(ids).logits.float() - wanted).pow(2).mean().sqrt()
        for _ in range(3):  # eager, capture, replay
            assert (ours(ids).logits.float() - wanted).pow(2).mean().sqrt() <= 2 * allowed + 1e-6


KINDS = ("int8", "int8-outliers", "fp8")
PLANTED = ("llama-biases", "gemma2")
LENGTHS = (65, 96, 200, 600)  # filled up, and replayed as graphs; each chooses tiles of its own


def in_both(model, state):
    """The tensors of its state_dict, and those of the same names in another."""
    own = model.state_dict()
    assert list(own) == list(state) and all(one.is_cuda for one in own.values())
    return [(one, state[name]) for name, one in own.items()]


@pytest.mark.parametrize("kind", ["gptq", "gptq-8", "gptq-order", "awq"])
def test_graphs_read_the_numbers_that_are_loaded(kind, monkeypatch):
    """From the CPU, into those that came quantized: they lie where they lay. Nothing is held twice; what is written
    out for a state_dict lies on the CPU where there is no room.
    """
    (stock, twin), model = prequantized(kind, "llama-biases", seed=2), prequantized(kind, "llama-biases")[0]
    twin, start = twin.cuda(), allocated()
    accel.optimize(model.cuda(), graphs=True)
    inputs, state, held = on_gpu(*padded()), stock.state_dict(), held_by(model)
    for _ in range(3):  # eager, capture, replay
        generate(model, *inputs)
    places, before = [module.data.data_ptr() for module in held], allocated()
    model.load_state_dict(state)
    assert [module.data.data_ptr() for module in held] == places
    assert allocated() - before < 0.01 * (before - start)
    assert all(torch.equal(one.cpu(), other) for one, other in in_both(model, state))
    same(generate(model, *inputs), generate(twin, *inputs), 4e-5)
    assert accel.report(model).fallbacks == []
    with monkeypatch.context() as without:
        without.setattr(quantized_modules, "free_memory", lambda device: 0)
        found = model.state_dict()
    assert {found[name].is_cuda for name in found if name.endswith("qweight")} == {False}
    assert all(torch.equal(found[name].cpu(), other) for name, other in state.items())
    accel.restore(model)
    assert all(torch.equal(one.cpu(), other) for one, other in in_both(model, state))


@pytest.mark.parametrize("activations", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_activations_in_8_bits(name, activations, dtype):
    """As near to the formula in float32 as the rounding itself, and verified product by product."""
    stock = make(name, max_position_embeddings=1024).to("cuda", dtype)
    if activations == "int8-outliers" and name in PLANTED:
        for path, parameter in stock.named_parameters():
            if "layernorm" in path and parameter.dim() == 1:
                parameter.data[5] *= 30
    weights = activations.partition("-")[0]
    ours = accel.optimize(copy.deepcopy(stock), weights=weights, activations=activations, graphs=True)
    plain = accel.optimize(copy.deepcopy(stock), weights=weights, graphs=True)
    truth = rounded(stock, ours, torch.float32)
    most = 0.35 if weights == "fp8" else 0.12  # of a few layers, what rounding each token costs; garbage is above 1
    for length in LENGTHS:
        ids = prompt(1, length).cuda()
        wanted = truth(ids).logits
        for _ in range(3):
            found = ours(ids, logits_to_keep=1).logits
            error = float((found[:, -1].float() - wanted[:, -1]).norm() / wanted[:, -1].norm())
            assert error < most, f"{length} tokens: {error:.2e}"
        assert not torch.equal(ours(ids).logits, plain(ids).logits)
    for ids in (prompt(1, 64).cuda(), prompt(4, 16).cuda()):
        found, wanted = (model(ids).logits.float() for model in (ours, plain))
        assert float((found - wanted).norm() / wanted.norm()) < 0.005
    for length in LENGTHS:
        quality = accel.verify(ours, input_ids=prompt(1, length).cuda())
        assert quality.passed and "their products" in quality.parts, quality.verdict


@pytest.mark.parametrize("activations", KINDS)
def test_a_replayed_prompt_rounds_what_it_is_given(activations):
    """A graph captured from one prompt, replayed with others: as without graphs, outlier columns found anew."""
    stock = make("llama-biases", torch.bfloat16, max_position_embeddings=1024).cuda()
    for path, parameter in stock.named_parameters():
        if "layernorm" in path:
            parameter.data[7] *= 6  # beyond the threshold in some tokens
    options = {"weights": activations.partition("-")[0], "activations": activations}
    ours, eager = (accel.optimize(copy.deepcopy(stock), **options, graphs=graphs) for graphs in (True, False))
    for seed in range(4):
        for length in (128, 512):  # lengths that are not filled up: the same rows
            ids = prompt(1, length, seed).cuda()
            found, wanted = (model(ids, logits_to_keep=1).logits.float() for model in (ours, eager))
            # Kernels of other shapes move numbers next to a half, which then drift as far as all rounding does.
            assert float((found - wanted).norm() / wanted.norm()) < 0.1
    rows = accel.report(ours).graphs
    assert any(row["status"] == "graph" for row in rows), rows


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.name in USED], ids=str)
@pytest.mark.parametrize("name", ["llama-biases", "gpt2"])
def test_generating_after_a_long_prompt_with_rounded_rows(name, mode):
    """Every way of calling it runs, on graphs, as without graphs."""
    stock = make(name, torch.bfloat16, max_position_embeddings=1024).cuda()
    ours = accel.optimize(stock, weights="int8", activations="int8", graphs=True)
    inputs = on_gpu(*padded((90, 70)[: len(mode.lengths)]))
    first = mode(ours, *inputs)
    for _ in range(2):
        again = mode(ours, *inputs)
        assert again.keys() == first.keys() and accel.report(ours).fallbacks == []


@pytest.mark.parametrize(("weights", "share"), [("int8", 0.55), ("int4", 0.35), ("fp8", 0.55)])
@pytest.mark.parametrize(("made", "keep"), [("dense", True), ("dense", False), ("experts", True)])
def test_memory_is_saved_and_given_back(weights, share, made, keep):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 2}
    experts = {"hidden_size": 512, "intermediate_size": 2048, "num_local_experts": 16}
    start = allocated()
    if made == "dense":
        model = make("llama", torch.bfloat16, **sizes).cuda()
    else:
        model = mixture("mixtral", torch.bfloat16, **experts).cuda()
    twin = copy.deepcopy(model).cpu()
    size = allocated() - start
    torch.cuda.reset_peak_memory_stats()
    accel.optimize(model, weights=weights, keep_original=keep, graphs=False)
    assert allocated() - start < share * size
    generate(model, *on_gpu(*padded()))
    if not keep:
        return
    assert all(module.data.is_cuda for module in held_by(model))
    accel.restore(model)
    assert abs(allocated() - start - size) < 0.02 * size
    assert all(
        torch.equal(p.cpu(), q) and p.is_cuda for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )


MIXED = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss")


@pytest.mark.parametrize(("name", "weights"), zip(MIXED, SCHEMES, strict=True))
def test_experts_in_graphs_of_prompts_and_steps_token_for_token(name, weights):
    stock = mixture(name, max_position_embeddings=1024).cuda()
    ours = accel.optimize(copy.deepcopy(stock), weights=weights, graphs=True)
    theirs = rounded(stock, ours)
    assert {type(one) for one in of_experts(ours).values()} == {QuantizedExperts}
    for rows, length in ((1, 12), (1, 300), (40, 9), (96, 5)):
        for seed in range(3):  # eager, capture, replay
            ids = prompt(rows, length, seed).cuda()
            same(generate(ours, ids, None), generate(theirs, ids, None), 4e-5)
    assert accel.report(ours).fallbacks == []
    captured = {row["inputs"].split(",")[0] for row in accel.report(ours).graphs if row["status"] == "graph"}
    assert {"1x1", "40x1", "96x1"} <= captured, accel.report(ours)


@pytest.mark.parametrize(("name", "weights"), [*product(["mixtral", "gpt-oss"], SCHEMES), ("gpt-oss", None)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_expert_is_as_near_to_the_truth_as_stock(name, weights, dtype):
    """For tokens that are multiplied one by one, grouped, and by experts written out first."""
    stock = mixture(name, dtype, hidden_size=256, intermediate_size=512).cuda()
    if weights is None:  # packed by default
        round_to_mxfp4(stock)
    ours = accel.optimize(copy.deepcopy(stock), weights=weights)
    theirs, truth = rounded(stock, ours), rounded(stock, ours, torch.float32)
    path, module = next(iter(of_experts(ours).items()))
    for tokens in (1, 7, 16, 17, 100, 600, 3000):
        generator = torch.Generator("cuda").manual_seed(tokens)
        x = torch.randn(tokens, 256, generator=generator, device="cuda").to(dtype)
        index = torch.rand(tokens, 4, generator=generator, device="cuda").topk(2).indices
        shares = torch.rand(tokens, 2, generator=generator, device="cuda").to(dtype)
        wanted = truth.get_submodule(path)(x.float(), index, shares.float())
        own, mine = ((one(x, index, shares).float() - wanted).norm() for one in (theirs.get_submodule(path), module))
        assert mine <= 1.5 * own, f"{tokens} tokens"
    assert accel.report(ours).fallbacks == []
    assert accel.verify(ours).passed


def test_a_prompt_of_rounded_experts_takes_the_way_that_was_fastest():
    """Experts are written out first, or not, by timing: either way the prompt says the same."""
    stock = mixture("mixtral", torch.bfloat16, max_position_embeddings=4096, hidden_size=512).cuda()
    ours = accel.optimize(copy.deepcopy(stock), weights="int8", graphs=True)
    theirs, truth = rounded(stock, ours), rounded(stock, ours, torch.float32)
    for length in (200, 1000, 4000):  # 100, 500 and 2000 tokens to an expert
        errors = []
        for seed in range(9):
            ids = prompt(1, length, seed).cuda()
            wanted, *found = (model(ids, logits_to_keep=1).logits.float() for model in (truth, theirs, ours))
            errors.append(torch.stack([(one - wanted).norm() for one in found]))
        own, mine = torch.stack(errors).median(0).values  # a router may choose otherwise by rounding
        assert mine <= 2 * own, f"{length} tokens"
    assert accel.report(ours).fallbacks == []


def test_experts_that_came_in_mxfp4():
    """Packed by default: memory falls, graphs hold, tokens are those of the plain weights, which come back."""
    start = allocated()
    model = mixture("gpt-oss", hidden_size=512, intermediate_size=1056, max_position_embeddings=1024).cuda()
    round_to_mxfp4(model)
    stock, size = copy.deepcopy(model).cpu(), allocated() - start
    accel.optimize(model, graphs=True)
    assert {type(one) for one in of_experts(model).values()} == {QuantizedExperts}
    assert allocated() - start < 0.5 * size
    theirs = copy.deepcopy(stock).cuda()
    for rows, length in ((1, 12), (1, 300), (40, 9)):
        for seed in range(3):  # eager, capture, replay
            ids = prompt(rows, length, seed).cuda()
            same(generate(model, ids, None), generate(theirs, ids, None), 4e-5)
    assert accel.report(model).fallbacks == [] and accel.verify(model).passed
    assert all(torch.equal(one.cpu(), other) for one, other in in_both(model, stock.state_dict()))
    accel.restore(model)
    for one, other in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(one.cpu().view(torch.int32), other.view(torch.int32))


def test_moved_after_it_was_quantized():
    stock = make("llama-biases")
    ours = accel.optimize(copy.deepcopy(stock), weights="int4-g32")
    theirs, inputs = rounded(stock, ours), padded()
    wanted = generate(theirs, *inputs)
    ours.cuda()
    same({"sequences": generate(ours, *on_gpu(*inputs))["sequences"].cpu()}, wanted)
    accel.restore(ours)
    assert all(p.is_cuda for p in ours.parameters())
    assert all(torch.equal(p.cpu(), q) for p, q in zip(ours.parameters(), stock.parameters(), strict=True))
