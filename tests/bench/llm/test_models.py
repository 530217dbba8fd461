"""Models of `accel bench llm`: their sizes, and the bytes a step of each reads."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, Mamba2Config, MixtralConfig

import accel
from accel.bench.llm import cases, configs, models
from accel.bench.llm.traffic import Traffic
from accel.bench.llm.variants import Variant, lossy_variant
from accel.quantization.experts import QuantizedExperts
from support.everything import EVERYTHING

CPU = torch.device("cpu")
PUBLISHED = {
    "llama-8b": 8030.3,
    "llama-70b": 70553.7,
    "llama-3b": 3212.7,
    "llama-1b": 1235.8,
    "qwen-0.5b": 494.0,
    "qwen-7b": 7615.6,
    "qwen3-0.6b": 596.0,
    "qwen3-8b": 8190.7,
    "mistral-7b": 7248.0,
    "gemma2-2b": 2614.3,
    "gemma3-4b": 3880.3,
    "phi3-mini": 3821.1,
    "deepseek-v2-lite": 15706.5,
    "glm-4.7-flash": 29943.4,
    "gpt2": 124.4,
    "qwen3.5-9b": 8953.8,
    "qwen3.6-27b": 26896.0,
    "qwen3.6-35b-a3b": 34660.6,
    "nemotron-h-9b": 8888.2,
    "falcon-h1-7b": 7585.5,
    "granite4-h-small": 32207.3,
    "mamba2-2.7b": 2702.6,
    "kimi-linear": 49133.1,
    "lfm2-1.2b": 1170.3,
    "qwen3-30b-a3b": 30532.1,
    "mixtral-8x7b": 46702.8,
    "gpt-oss-20b": 20914.8,
    "gpt-oss-20b-mxfp4": 20914.8,
}


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "name", [name for name in configs.CONFIGS if name != "tiny" and (EVERYTHING or "mxfp4" not in name)]
)
def test_real_models_are_the_published_sizes(name):
    """Built on the meta device, so that it costs nothing: the parameter counts everybody knows."""
    model = models.build(name, torch.device("meta"), torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(PUBLISHED[name], abs=0.1)


def test_it_never_ends_by_itself_but_looks_for_the_end(tiny):
    inputs = models.prompt(tiny, 1, 5)
    out = tiny.generate(**inputs, max_new_tokens=40, do_sample=True)
    assert out.shape == (1, 45) and tiny.generation_config.eos_token_id == 256


def test_stock_beside_it_is_over_the_same_weights(tiny):
    stock = models.beside(tiny)
    inputs = models.prompt(tiny, 2, 9)
    with torch.no_grad():
        wanted = stock(**inputs).logits
        accel.optimize(tiny)
        tiny(**inputs)
        pairs = zip(stock.parameters(), tiny.parameters(), strict=True)
        assert all(a is b and a.data_ptr() == b.data_ptr() for a, b in pairs)
        assert torch.equal(stock(**inputs).logits, wanted)
        assert torch.equal(accel.restore(tiny)(**inputs).logits, wanted)
    assert not any("forward" in vars(module) for module in stock.modules())


def test_an_assistant_is_a_small_one_of_the_same_make(tiny):
    tiny.config.num_hidden_layers = 2
    helper = models.assistant(tiny, layers=1)
    assert len(helper.model.layers) == 1 and helper.dtype == tiny.dtype
    tiny.generate(**models.prompt(tiny, 1, 6), max_new_tokens=5, do_sample=False, assistant_model=helper)


def test_bytes_of_a_step_by_hand(tiny):
    traffic = Traffic.of(tiny)
    hidden, inner, kv, vocabulary, layers = 32, 64, 16, 256, 2
    assert traffic.weights == {
        "QKV": 4 * layers * hidden * (hidden + 2 * kv),
        "out": 4 * layers * hidden * hidden,
        "gate and up": 4 * layers * 2 * hidden * inner,
        "down": 4 * layers * hidden * inner,
        "head": 4 * vocabulary * hidden,
        "norms and rest": 4 * (2 * layers + 1) * hidden,
    }
    assert traffic.cache(3, 100) == 4 * 3 * 100 * layers * 2 * kv
    assert traffic.step_bytes(3, 100) == sum(traffic.weights.values()) + traffic.cache(3, 100)
    assert traffic.step(3, 100)["attention"] == traffic.cache(3, 100)


def test_bytes_of_other_makes():
    def traffic(config):
        model = AutoModelForCausalLM.from_config(config).eval()
        return model, Traffic.of(model)

    sizes = {"vocab_size": 61, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model, found = traffic(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, **tokens))
    whole = sum(p.nbytes for p in model.parameters())
    assert sum(found.weights.values()) == whole - model.transformer.wpe.weight.nbytes  # the head is the table, tied
    more = {"intermediate_size": 48, "num_key_value_heads": 1}
    _, found = traffic(Gemma2Config(**sizes, **more, **tokens, head_dim=16, sliding_window=8))
    each = 4 * 2 * 16
    assert found.cache(1, 100) == each * (8 + 100)  # every second layer sees a window
    _, found = traffic(MixtralConfig(**sizes, **more, **tokens, num_local_experts=4, num_experts_per_tok=1))
    experts = found.weights["experts"]
    assert found.step(1, 1)["experts"] == experts // 4
    assert experts * 0.6 < found.step(4, 1)["experts"] < experts * 0.7  # 1 - (3/4)^4
    spaces = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    _, found = traffic(Mamba2Config(vocab_size=61, num_hidden_layers=2, hidden_size=32, **spaces))
    kept = 4 * (8 * 8 * 8 + (64 + 2 * 8) * 4)  # a state, and four inputs of the convolution
    assert found.cache(3, 100) == 3 * 2 * 2 * kept  # read and written, in both layers


def test_a_step_reads_less_of_rounded_experts_as_far_as_they_are_hit():
    config = MixtralConfig(
        vocab_size=61, num_hidden_layers=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, num_local_experts=4, num_experts_per_tok=1,
    )  # fmt: skip
    stock = AutoModelForCausalLM.from_config(config).eval()
    traffic = Traffic.of(stock)
    work = cases.Work(stock, traffic, 1e9, CPU, (1,), (64,), 8, 64)
    fewer, told = lossy_variant(stock, "int8", {"weights": "int8"}, CPU)
    held = [module for module in fewer.model.modules() if isinstance(module, QuantizedExperts)]
    numbers = sum(tensor.nbytes for module in held for tensor in module.buffers())
    assert len(held) == 2 and fewer.saved_experts == 2 * 4 * 3 * 32 * 48 * 4 - numbers > 2 * numbers
    assert told["mb_before"] > told["mb"]
    for rows, hit in ((1, 1 / 4), (4, 1 - 0.75**4)):
        shares = [
            work.rate(rows, 64, {"step": 1e-3, "call": 1e-3}, one)["share_of_bandwidth"]
            for one in (Variant("", stock), fewer)
        ]
        less = fewer.saved + hit * fewer.saved_experts
        assert shares[0] - shares[1] == pytest.approx(less / 1e9 / 1e-3, abs=2e-4)


def test_a_step_reads_less_of_a_rounded_cache(tiny):
    traffic = Traffic.of(tiny)
    work = cases.Work(tiny, traffic, 1e9, CPU, (1,), (64,), 8, 64)
    shares = [
        work.rate(4, 64, {"step": 1e-3, "call": 1e-3}, Variant("", tiny, kept=kept))["share_of_bandwidth"]
        for kept in (1.0, 0.375)
    ]
    cache = traffic.cache(4, 64 + (work.few + work.many) // 2)
    assert shares[0] - shares[1] == pytest.approx(0.625 * cache / 1e9 / 1e-3, abs=2e-4)


@torch.no_grad()
def test_a_model_is_built_of_one_layer_in_fewer_bits():
    model, ids = models.build_by_layers("tiny", CPU, "int8"), torch.arange(9)[None]
    layers = model.model.layers
    assert [layer.self_attn.layer_idx for layer in layers] == list(range(model.config.num_hidden_layers)) == [0, 1]
    assert {type(layer.mlp.up_proj).__name__ for layer in layers} == {"QuantizedLinear"}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert written.shape == (1, 12)
