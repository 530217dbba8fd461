"""Prompts, mixed layers, and operations of a user's own."""

import copy

import pytest
import torch
from accel_kernels import OPS, rms_norm
from transformers import DynamicCache

import accel
from accel.llm.generation import prefill as short
from support.llm.families import BY_NAME, FAMILIES, make, padded, prompt
from support.llm.gpu import new_pair, on_gpu, prefill_graphs, talk
from support.llm.outputs import generate, same

FAST = [family.name for family in FAMILIES if family.expected == "fast"]
SOME = ("llama", "gpt2", "mistral", "gemma2", "falcon-alibi", "phi", "gptj", "qwen3")
# Stock reads the greatest position in every forward.
WAITS = ("llama-rope-dynamic", "phi3-longrope")
# Before transformers 5.24 stock made its frequencies on the CPU, which no graph holds.
SOMETIMES = ("phi-moe",)


pytestmark = pytest.mark.usefixtures("exact")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FAST)
def test_logits_are_as_near_to_the_truth_as_stocks(name, dtype):
    """Against the same weights in float32; the root mean square over many prompts, at most twice stock's own.

    Of the median token where rounding may send some to other experts, in stock as in ours.
    """
    ours, stock = new_pair(name, dtype)
    assert "forward" in vars(ours), accel.report(ours)
    parts = [layer.spec.mlp for layer in vars(ours)["forward"].layers]
    chooses = any(mlp.wholes for mlp in parts if mlp is not None)
    wide = copy.deepcopy(stock).float()
    talks = [on_gpu(*padded(lengths, seed)) for seed, lengths in enumerate([(9,), (16,), (50,), (90,), (40, 33)])]

    def logits(model):
        found = [one.flatten(0, -2).float() for ids, mask in talks for one in talk(model, ids, mask).values()]
        return torch.cat(found)

    def off(found):
        of_tokens = (found - truth).pow(2).mean(-1)
        return float((of_tokens.median() if chooses else of_tokens.mean()).sqrt())

    truth = logits(wide)
    allowed = off(logits(stock))
    for _ in range(3):  # eager, capture, replay
        error = off(logits(ours))
        assert error <= 2 * allowed + 1e-6, f"{error:.2e}, stock's own {allowed:.2e}"
    fills = vars(ours)["forward"].convention.pads_prompts
    assert name in SOMETIMES or bool(prefill_graphs(ours)) == (fills and name not in WAITS), accel.report(ours)


@pytest.mark.parametrize(
    "lengths",
    [(1,), (15,), (16,), (17,), (33,), (64,), (65,), (100,), (124,), (9, 5), (16, 1, 7), (40, 64), (30, 30)],
    ids=str,
)
@pytest.mark.parametrize("name", SOME)
def test_logits_in_float32(name, lengths):
    """Of one row without a mask; of several padded on the left."""
    ours, stock = new_pair(name)
    for seed in range(3):
        ids, mask = on_gpu(*padded(lengths, seed))
        given = (ids,) if len(lengths) == 1 else (ids, mask)
        same(talk(ours, *given), talk(stock, *given), 4e-5)
    (row,) = prefill_graphs(ours)
    assert row["inputs"].endswith("prompt" if len(set(lengths)) == 1 else "prompt, mask")


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_bit_for_bit_whatever_it_is_filled_up_with(name, dtype, value, monkeypatch):
    """All in one graph: the prompt, the step after it, and what the cache holds."""
    ours, stock = new_pair(name, dtype)
    whole, found = short.pad_to_bucket, []

    def other(tokens, positions, room):
        new = tokens.shape[1]
        tokens, positions, last = whole(tokens, positions, room)
        tokens[:, new:] = value
        return tokens, positions, last

    embeds = ours.get_input_embeddings()(prompt(2, 21).cuda())
    wanted = DynamicCache(config=stock.config)  # a layer with a window may keep fewer tokens
    for call in ({"inputs_embeds": embeds}, {"input_ids": prompt(2, 1, 3).cuda()}):
        stock(**call, past_key_values=wanted)
    shapes = [t.shape for layer in wanted.layers for t in (layer.keys, layer.values)]
    for fill in (whole, whole, whole, other, whole):
        monkeypatch.setattr(short, "pad_to_bucket", fill)
        cache = DynamicCache(config=ours.config)
        first = ours(inputs_embeds=embeds, past_key_values=cache, logits_to_keep=1).logits
        then = ours(prompt(2, 1, 3).cuda(), past_key_values=cache).logits
        held = [t.clone() for layer in cache.layers for t in (layer.keys, layer.values)]
        assert [t.shape for t in held] == shapes and all(t.isfinite().all() for t in held)
        found.append([first, then, *held])
    assert len(prefill_graphs(ours)) == 1
    for one in found[3:]:
        assert all(map(torch.equal, one, found[2]))


CASES = [case for op in OPS if op.name == "paged_attention" for case in op.cases
         if "prefill" in case.name and "ragged" not in case.name]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if "more" not in case.name and "all" not in case.name],
                         ids=lambda case: case.name)  # fmt: skip
def test_the_kernel_reads_the_blocks_by_their_addresses(case, dtype):
    """Keys and values that it is shown besides are another store's."""
    op = next(op for op in OPS if op.name == "paged_attention")
    (*qkv, theirs, scale), kwargs = case.make(torch.device("cuda"), torch.float64)
    truth = op.reference(*qkv, theirs, scale, **kwargs)
    (*qkv, theirs, scale), kwargs = case.make(torch.device("cuda"), dtype)
    stock = op.reference(*qkv, theirs, scale, **kwargs)
    (*qkv, mine, scale), kwargs = case.make(torch.device("cuda"), dtype)
    nothing = float("nan") if mine.keys.is_floating_point() else 99
    if mine.is_prefill and qkv[1] is not None:
        for held in (mine.keys, mine.values):
            held.fill_(nothing)  # whatever lay there before
    shown = {name: torch.full_like(getattr(mine, name), nothing) for name in ("keys", "values")}
    ours = op.triton(*qkv, mine._replace(by_address=True, **shown), scale, **kwargs)
    errors = [float((got.double() - truth).pow(2).mean().sqrt()) for got in (ours, stock)]
    assert errors[0] <= 2 * errors[1] + 1e-7, errors
    assert all((t.isnan() if t.is_floating_point() else t == nothing).all() for t in shown.values())


MIXED = [family.name for family in BY_NAME.values() if family.expected == "some"]


@pytest.mark.parametrize("more", [{}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_texts_are_those_of_stock(name, more):
    stock = make(name).cuda()
    ours = accel.optimize(copy.deepcopy(stock))
    assert any(rule == "decoder layer" and status == "patched" for _, rule, status, _ in accel.report(ours).sites)
    inputs = [tensor.cuda() for tensor in padded()]
    torch.cuda.synchronize()
    same(generate(ours, *inputs, **more), generate(stock, *inputs, **more))
    assert not accel.report(ours).fallbacks


def test_a_graph_runs_the_op_that_its_model_was_optimized_with():
    counter = torch.zeros((), device="cuda", dtype=torch.int64)

    def counts(x, *args, **more):
        if not x.is_cuda:
            return NotImplemented
        counter.add_(1)  # by a replay too
        return rms_norm.reference(x, *args, **more)

    model = make("llama").cuda()
    ids = prompt().cuda()

    def calls(tokens: int) -> int:
        counter.zero_()
        model.generate(ids, max_new_tokens=tokens, do_sample=False)
        return int(counter)

    wanted = model.generate(ids, max_new_tokens=20, do_sample=False)
    with accel.register_op("rms_norm", counts):
        accel.optimize(model, graphs=True)
    calls(20)
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), wanted)
    assert any(row["status"] == "graph" for row in accel.report(model).graphs)
    norms = 2 * model.config.num_hidden_layers + 1
    assert calls(30) - calls(20) >= 10 * norms
    accel.optimize(model, graphs=True)
    calls(20)
    assert calls(20) == 0


def test_a_function_that_is_wrong_on_the_gpu_alone_is_refused():
    def wrong(x, *args, **more):
        y = rms_norm.reference(x, *args, **more)
        return y if not x.is_cuda else tuple(t * 1.1 for t in y) if isinstance(y, tuple) else y * 1.1

    with pytest.raises(ValueError, match="on cuda: error"):
        accel.register_op("rms_norm", wrong)
