"""Scripts of language models: generate() of every kind of layer, and the ways that people call it."""

from typing import Any

import torch

from accel.bench.llm.configs import CONFIGS, NEMOTRON
from accel.bench.llm.models import answers, endless, from_config, requests
from accel.bench.scripts.script import Built, Script, Size, script
from accel.bench.weights import SEED
from accel.libraries.cache import DynamicCache, cache_given

TINY: dict = dict(vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
TINY |= dict(num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0)
PROMPT, NEW = 512, 64


def published(size: Size, name: str, tiny: dict | None = None, **changes: Any) -> Any:
    """A model of `accel bench llm`, or of this type, with random weights; its end-of-text token it cannot write."""
    from transformers import AutoConfig

    kind, real = CONFIGS.get(name, (name, {}))
    config = AutoConfig.for_model(kind, **size(real | changes, TINY | (tiny or {})))
    return endless(from_config(config, size.device, size.bf16).requires_grad_(False))


def _prompt(model: Any, size: Size, rows: int = 1, tokens: int = PROMPT) -> dict[str, torch.Tensor]:
    ids = size.ids(rows, size(tokens, 12), model.config.get_text_config().vocab_size)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generating(model: Any, size: Size, rows: int = 1, new: int = NEW, tokens: int = PROMPT) -> Built:
    """The model, and a greedy call of generate() with prompts of so many tokens."""
    inputs = _prompt(model, size, rows, tokens)
    return model, lambda: model.generate(**inputs, max_new_tokens=size(new, 4), do_sample=False)


def text_script(name: str, about: str, kind: str, tiny: dict | None = None, new: int = 32, **changes: Any) -> Script:
    """A greedy call of one of `published`."""
    return Script(name, about, lambda size: generating(published(size, kind, tiny, **changes), size, new=new))


HYBRID: dict = dict(head_dim=16, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8)
HYBRID |= dict(linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)
TINY_MAMBA = dict(num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=8)
TINY_LATENT: dict = dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, kv_lora_rank=16)
TINY_LATENT |= dict(q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, moe_intermediate_size=16)
TINY_LATENT |= dict(first_k_dense_replace=1, num_key_value_heads=4, n_group=1, topk_group=1)
EXPERTS = dict(head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
SLIDING = ["sliding_attention", "full_attention"]
OSS: dict = dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, layer_types=SLIDING)
TEXTS = (
    text_script("llama", "Llama-8B, 512 tokens in, 64 out", "llama-8b", new=NEW),
    text_script("qwen3-0.6b", "Qwen3-0.6B, 512 tokens in, 64 out", "qwen3-0.6b", {"head_dim": 8}, NEW),
    text_script("qwen3.5", "Qwen3.5-9B, a hybrid of linear and full attention, 16 of 32 layers: 512 tokens in, 32 out",
                "qwen3.5-9b", HYBRID, num_hidden_layers=16),
    text_script("mamba2", "Mamba2-2.7B, 512 tokens in, 32 out", "mamba2-2.7b", TINY_MAMBA),
    text_script("deepseek-v2-lite", "DeepSeek-V2-Lite, latent attention and experts, 14 of 27 layers: 512 in, 32 out",
                "deepseek-v2-lite", TINY_LATENT, num_hidden_layers=14),
    text_script("qwen3-moe", "Qwen3-30B-A3B, 16 of 48 layers: 512 tokens in, 32 out", "qwen3-30b-a3b", EXPERTS,
                num_hidden_layers=16),
    text_script("gpt-oss", "GPT-OSS-20B, 12 of 24 layers: 512 tokens in, 32 out", "gpt-oss-20b", OSS,
                num_hidden_layers=12, layer_types=6 * SLIDING),
)  # fmt: skip


@script("nemotron-h", "Nemotron-H-9B, Mamba, MLP and 2 of attention, 28 of 56 layers: 512 tokens in, 32 out")
def nemotron(size: Size) -> Built:
    half = NEMOTRON[: len(NEMOTRON) // 2]
    tiny = dict(hybrid_override_pattern="M-*", head_dim=8, mamba_num_heads=4, mamba_head_dim=16)
    tiny |= dict(ssm_state_size=8, n_groups=2, chunk_size=8, num_hidden_layers=3)
    real = dict(hybrid_override_pattern=half, num_hidden_layers=len(half))
    return generating(published(size, "nemotron-h-9b", tiny, **real), size, new=32)


@script("llama-static-cache", "Llama-8B, 64 tokens with cache_implementation='static', which generate() compiles")
def static_cache(size: Size) -> Built:
    model = published(size, "llama-8b")
    inputs = _prompt(model, size)
    given = dict(max_new_tokens=size(NEW, 4), do_sample=False, cache_implementation="static")
    if size.tiny:  # compiling takes a minute of a CPU
        given["disable_compile"] = True
    return model, lambda: model.generate(**inputs, **given)


@script("llama-compiled", "Llama-1B whose forward torch.compile was given, 64 tokens", cards=1)
def compiled(size: Size) -> Built:
    model = published(size, "llama-1b")
    model.forward = torch.compile(model.forward, dynamic=True)
    return generating(model, size)


def _plain(obj: Any, size: Size) -> torch.Tensor:
    return obj.generate(**_prompt(obj, size), max_new_tokens=size(NEW, 4), do_sample=False)


@script("llama-assisted", "Llama-8B with an assistant of Llama-1B, 64 tokens", greedy=_plain)
def assisted(size: Size) -> Built:
    model, helper = published(size, "llama-8b"), published(size, "llama-1b", {"num_hidden_layers": 1})
    inputs = _prompt(model, size)
    given = dict(max_new_tokens=size(NEW, 4), do_sample=False, assistant_model=helper)
    return model, lambda: model.generate(**inputs, **given)


@script("llama-chat", "Llama-8B, a chat of ten turns of 48 tokens in and 24 out, the cache kept")
def chat(size: Size) -> Built:
    model = published(size, "llama-8b")
    vocabulary, turns = model.config.vocab_size, size(10, 3)
    said = [size.ids(1, size(48, 6), vocabulary, SEED + turn) for turn in range(turns)]

    def call() -> torch.Tensor:
        ids, answers = said[0][:, :0], []
        kept = cache_given(type(model).prepare_inputs_for_generation, DynamicCache(config=model.config))
        for text in said:
            ids = torch.cat([ids, text], dim=1)
            given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=size(24, 3))
            out = model.generate(ids, do_sample=False, **given, **kept)
            answers.append(out[:, ids.shape[1] :])
            ids = out
        return torch.cat(answers, dim=1)

    return model, call


def _requests(model: Any, size: Size) -> tuple[list[list[int]], int]:
    return requests(model, *size((64, 32, 512), (3, 4, 10))), size(64, 3)


def _each(obj: Any, size: Size) -> torch.Tensor:
    """What one request after the other is answered, of the first few."""
    prompts, new = _requests(obj, size)
    rows = [
        obj.generate(torch.tensor([ids], device=size.device), max_new_tokens=new, do_sample=False)
        for ids in prompts[:4]
    ]
    return torch.cat([row[:, -new:] for row in rows])


@script("llama-batch", "Llama-8B, generate_batch of 64 requests of 32 to 512 tokens, 64 out", cards=1)
def batch(size: Size) -> Built:
    model = published(size, "llama-8b", attn_implementation="sdpa")
    prompts, new = _requests(model, size)
    return model, lambda: torch.tensor(answers(model, prompts, new))
