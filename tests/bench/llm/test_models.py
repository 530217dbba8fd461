"""Models of `accel bench llm`: their sizes, and stock beside accel."""

import pytest
import torch

import accel
from accel.bench.llm import configs, models
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


@torch.no_grad()
def test_requests_of_a_batch_are_answered(tiny, monkeypatch):
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # stock's manager looks through all objects of the tests
    prompts = models.requests(tiny, 3, 4, 9)
    assert prompts == models.requests(tiny, 3, 4, 9) and all(4 <= len(one) <= 9 for one in prompts)
    wanted = models.answers(models.beside(tiny), prompts, 3)
    assert models.answers(accel.optimize(tiny, cpu="fuse"), prompts, 3) == wanted
    assert not accel.report(tiny).fallbacks
    with pytest.raises(ValueError, match="instead of 3"):
        monkeypatch.setattr(tiny, "generate_batch", lambda **given: {})
        models.answers(tiny, prompts, 3)


@torch.no_grad()
def test_a_model_is_built_of_one_layer_in_fewer_bits():
    model, ids = models.build_by_layers("tiny", CPU, "int8"), torch.arange(9)[None]
    layers = model.model.layers
    assert [layer.self_attn.layer_idx for layer in layers] == list(range(model.config.num_hidden_layers)) == [0, 1]
    assert {type(layer.mlp.up_proj).__name__ for layer in layers} == {"QuantizedLinear"}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert written.shape == (1, 12)
