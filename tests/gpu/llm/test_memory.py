"""The memory that loading, quantizing and optimizing take; in a module of its own, where nothing else is held."""

import copy
import os

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import accel
from accel.bench.memory import device_bytes, device_peak, release
from accel.llm.generation.trial_warmup import WIDE
from accel.llm.kv_cache.shape import BLOCK
from accel.offload.blocks import sizes_of
from accel.offload.budget import SLACK
from accel.offload.call_hooks import calls_checked, streamed_model
from support.device_memory import allocated
from support.llm.families import make, prompt
from support.llm.outputs import generate

pytestmark = pytest.mark.usefixtures("exact")

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 2}
LAYERS = 12
CARD = torch.device("cuda", 0)


@pytest.fixture
def folder(tmp_path):
    """Gives the folder of a model stored by a scheme, and the bytes of one of its layers in 16 bits."""

    def saved(scheme: str):
        model = make("llama", torch.bfloat16, num_hidden_layers=LAYERS, **SIZES)
        layer = sum(p.nbytes for p in model.model.layers[0].parameters())
        accel.quantize(model, scheme, out=tmp_path / scheme)
        return tmp_path / scheme, layer

    return saved


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_loading_takes_what_stays_and_two_layers_at_most(folder, scheme):
    path, layer = folder(scheme)
    start = allocated()
    torch.cuda.reset_peak_memory_stats()
    model = accel.load(path, device="cuda")
    peak = torch.cuda.max_memory_allocated() - start
    final = allocated() - start
    print(f"{scheme}: peak {peak / 2**20:.1f} MiB, final {final / 2**20:.1f}, a layer in 16 bits {layer / 2**20:.1f}")
    assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
    assert final < 0.62 * LAYERS * layer  # it is stored as in the file
    assert peak <= final + 2 * layer
    ids = torch.arange(1, 9, device="cuda")[None]
    accel.optimize(model, graphs=False)
    assert accel.verify(model, input_ids=ids).passed
    assert generate(model, ids, torch.ones_like(ids))["sequences"].shape[1] > 8
    del model
    assert abs(allocated() - start) < 2**20 + layer // 8  # and all of it is given back


# How many layers in 16 bits there may be at most on the device, with what a method computes; 12 are all. Measured on an
# H200: 3.0, 5.4, 5.0, 5.0. GPTQ's squares of the inner size outgrow the layer where that is wide, unlike here: of 8B
# they make 12.7 layers, see docs/measurements/quantization.md.
WAYS = {("int8", "rtn"): 3.5, ("int4", "gptq"): 6, ("int4", "awq"): 5.5, ("int8", "smoothquant"): 5.5}


@pytest.mark.parametrize(("scheme", "method"), WAYS)
def test_layers_go_to_the_gpu_one_by_one_to_be_quantized(scheme, method):
    """The model stays on the CPU; what comes of it is as near to the original as what a CPU makes of it."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
    stock = make("llama", torch.bfloat16, num_hidden_layers=LAYERS, **sizes)
    layer = sum(p.nbytes for p in stock.model.layers[0].parameters())
    data = None if method == "rtn" else [prompt(4, 64, seed) for seed in range(4)]
    rows = prompt(2, 64, 9)
    wanted, errors = stock(rows).logits.float(), []
    for device in (None, "cuda"):
        start = allocated()
        torch.cuda.reset_peak_memory_stats()
        checked = calls_checked()
        model = accel.quantize(copy.deepcopy(stock), scheme, data, method=method, device=device)
        if calls_checked() > checked:  # once, with references, which take memory
            torch.cuda.reset_peak_memory_stats()
            model = accel.quantize(copy.deepcopy(stock), scheme, data, method=method, device=device)
        peak = (torch.cuda.max_memory_allocated() - start) / layer
        print(f"{scheme} by {method}, {device or 'cpu'}: {peak:.1f} layers of {layer / 2**20:.1f} MiB at most")
        assert all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))
        errors.append(float((model(rows).logits.float() - wanted).norm()))
        assert device is None or 0 < peak < WAYS[scheme, method]
    assert abs(errors[1] - errors[0]) <= 0.1 * errors[0], errors


HEADS, KV_HEADS, DIM = 8, 2, 128
FIRST, SHALLOW, DEEP = 2, 8, 24  # layers; the first model only has libraries take what they keep


def llama(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=4096, hidden_size=HEADS * DIM, intermediate_size=3584, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


@pytest.mark.parametrize("options", [{}, {"kv_cache": "int8"}], ids=["as it is", "rounded cache"])
def test_a_deep_model_is_optimized_in_the_memory_of_a_shallow_one(options):
    """The bound is what the warmup stores for one layer; all 16 more would take 33 MiB, their records 14."""
    peaks = {}
    for layers in (FIRST, SHALLOW, DEEP):
        model = llama(layers)
        before = allocated()
        torch.cuda.reset_peak_memory_stats()
        accel.optimize(model, **options)
        torch.cuda.synchronize()
        peaks[layers] = torch.cuda.max_memory_allocated() - before
        assert "forward" in vars(model)
        del model
    one_layer = max(WIDE) * BLOCK * 2 * KV_HEADS * DIM * torch.bfloat16.itemsize
    assert peaks[DEEP] - peaks[SHALLOW] < one_layer, peaks


EXPERTS = {"num_experts": 16, "moe_intermediate_size": 2048, "hidden_size": 1024, "num_hidden_layers": 6}
BATCHES = {  # a model, what is stored of its weights, the share of its blocks that streams, MiB for calls
    "on the card": ("llama", SIZES, None, 0.0, 512),
    "streaming": ("llama", SIZES, None, 0.6, 128),
    "hot experts": ("qwen3-moe", EXPERTS, "int4", 0.5, 96),  # which stay in float32
}


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="reads the GPU's memory, which others take")
@pytest.mark.parametrize("row", BATCHES)
def test_a_batch_of_requests_keeps_its_budget(row):
    """Keys and values of the requests too: their answers are those without a budget, and the device never has more in
    use than it allows.
    """
    kind, sizes, scheme, share, room = BATCHES[row]
    model = make(kind, torch.float32, **{"num_hidden_layers": LAYERS, "max_position_embeddings": 512} | sizes)
    if scheme is not None:
        model = accel.quantize(model, scheme, device="cuda")
    prompts = [prompt(1, length, length)[0].tolist() for length in (90, 1, 17, 64, 200, 40, 5, 33)]
    config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)
    twin = accel.optimize(copy.deepcopy(model).cuda())
    wanted = [one.generated_tokens for one in twin.generate_batch(prompts, generation_config=config).values()]
    held = sizes_of(twin)
    accel.restore(twin)
    del twin
    release(CARD)
    kept, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(CARD).total_memory
    cap, before = kept, device_bytes(CARD) - kept  # contexts, and what others have
    cap += held.total - int(share * sum(held.blocks)) + 2 * max(held.blocks) + SLACK + room * 2**20
    torch.cuda.set_per_process_memory_fraction(cap / total)
    try:
        with device_peak(CARD) as peak:
            accel.optimize(model, memory=cap)
            for _ in range(2):
                found = model.generate_batch(prompts, generation_config=config)
                assert {one.error for one in found.values()} == {None}
                got = [one.generated_tokens for one in found.values()]
                assert got == wanted, [i for i, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1]]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    report, streamed = accel.report(model), streamed_model(model)
    print(f"{row}: {(peak[0] - before) / 2**20:.0f} MiB of {cap / 2**20:.0f}, {kept / 2**20:.0f} at first")
    assert peak[0] - before <= cap and report.batching and not report.fallbacks, report
    assert bool(streamed and streamed.streamed) == (share > 0)
