"""Models of unusual make, and models that are changed while they are optimized."""

import copy

import pytest
import torch
import transformers
from torch import nn

import accel
from support.everything import EVERYTHING
from support.llm.changes import CHANGES
from support.llm.families import make, padded, prompt
from support.llm.miniatures.family import SIZES, TOKENS
from support.llm.outputs import generate, same, write_alike
from support.llm.random_weights import randomize


def randomized(model):
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        randomize(model.get_submodule(name.rpartition(".")[0]), parameter.data, generator, 0.5)
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


# -- classes of users' -------------------------------------------------------------------------------------------------


def causal_lm(change):
    """A subclass of LlamaForCausalLM whose forward, of any signature, changes what stock's gives."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Own(LlamaForCausalLM):
        forward = change(LlamaForCausalLM)

    return randomized(Own(LlamaConfig(**SIZES, **TOKENS)))


def negated(kind):
    def forward(self, *args, **kwargs):
        output = kind.forward(self, *args, **kwargs)
        output.logits = -output.logits
        return output

    return forward


def hotter(kind):
    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, heat=1.0, **kwargs):
        output = kind.forward(
            self, input_ids=input_ids, attention_mask=attention_mask, past_key_values=past_key_values, **kwargs
        )
        output.logits = output.logits / heat
        return output

    return forward


@pytest.mark.parametrize("change", [negated, hotter])
def test_a_subclass_with_a_forward_of_its_own(change):
    stock = causal_lm(change)
    ours = causal_lm(change)
    accel.optimize(ours)
    for call in ({}, {"num_beams": 2}, {"heat": 3.0, "output_scores": True, "return_dict_in_generate": True}):
        if change is hotter or "heat" not in call:
            write_alike(ours, stock, **call)
    accel.restore(ours)
    write_alike(ours, stock)


def test_a_model_inside_another_module():
    """As a value head is put on: the inner model is optimized, and called by one that is not."""

    class Valued(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.value = model, nn.Linear(SIZES["hidden_size"], 1)

        def forward(self, **inputs):
            output = self.model(**inputs, output_hidden_states=True)
            return output.logits, self.value(output.hidden_states[-1])

    torch.manual_seed(0)
    ours = Valued(make("llama"))
    stock = copy.deepcopy(ours)
    accel.optimize(ours.model)
    ids, mask = padded()
    for _ in range(2):
        mine, theirs = (model(input_ids=ids, attention_mask=mask) for model in (ours, stock))
        same(dict(zip("ab", mine, strict=True)), dict(zip("ab", theirs, strict=True)))


def test_two_heads_that_share_a_decoder():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    ours = make("llama")
    stock = copy.deepcopy(ours)
    judges = []
    for model in (ours, stock):
        judge = randomized(LlamaForSequenceClassification(LlamaConfig(**SIZES, **TOKENS)))
        judge.model = model.model
        judges.append(judge)
    accel.optimize(ours)
    ids, mask = padded()
    same(generate(ours, ids, mask), generate(stock, ids, mask))
    same(*({"x": judge(ids, attention_mask=mask).logits} for judge in judges))
    same(generate(ours, ids, mask), generate(stock, ids, mask))


DECODER_SIZES = {name: size for name, size in SIZES.items() if name != "vocab_size"}
WHISPER = {
    "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "decoder_ffn_dim": 96, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "num_mel_bins": 8, "max_source_positions": 10,
    "max_target_positions": 40, "decoder_start_token_id": 1,
}  # fmt: skip
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
# Models that are no causal LM and see no images: by class their configuration, and whether they write texts.
OTHERS = {
    "T5ForConditionalGeneration": (T5, True),
    "WhisperForConditionalGeneration": (WHISPER, True),
    "LlamaForSequenceClassification": (DECODER_SIZES | {"num_labels": 5}, False),
    "Qwen3Model": (DECODER_SIZES, False),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.turns(2)
def test_models_of_other_kinds(name):
    kind, (config, writes) = getattr(transformers, name), OTHERS[name]
    torch.manual_seed(0)
    stock = randomized(kind(kind.config_class(vocab_size=99, **TOKENS, **config)))
    ours = accel.optimize(copy.deepcopy(stock))
    ids, mask = padded()
    inputs = {"input_ids": ids, "attention_mask": mask}
    if config is WHISPER:
        inputs = {"input_features": torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0))}
    for call in ({}, {"num_beams": 3}, {"do_sample": True}) if writes else ():
        outputs = []
        for model in (ours, stock):
            torch.manual_seed(0)
            outputs.append({"ids": model.generate(**inputs, max_new_tokens=6, **{"do_sample": False} | call)})
        same(*outputs)
    if not writes:
        same(*({"x": model(**inputs)[0]} for model in (ours, stock)))
        accel.restore(ours)
        assert torch.equal(*(model(**inputs)[0] for model in (ours, stock)))


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 20, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 7},
        {"head_dim": 128, "num_attention_heads": 1, "num_key_value_heads": 1},
        {"head_dim": 2},
        {"vocab_size": 5, "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2},
        {"num_hidden_layers": 7},
        {"hidden_act": "gelu"},
        {"hidden_act": "relu"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"hidden_act": "quick_gelu"},
        {"hidden_act": "mish"},
        {"rms_norm_eps": 0.1},
    ],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()),
)
def test_odd_sizes_and_settings(changes, pair):
    ours, stock = pair("llama", **changes)
    ids, mask = padded()
    ids %= stock.config.vocab_size
    same(generate(ours, ids, mask), generate(stock, ids, mask))
    same(
        {"x": ours(prompt(3, 33) % stock.config.vocab_size).logits},
        {"x": stock(prompt(3, 33) % stock.config.vocab_size).logits},
    )


def test_a_prompt_longer_than_any_block(pair):
    """Hundreds of tokens, on and on over the same cache."""
    ours, stock = pair("llama", max_position_embeddings=2048)
    ids = prompt(2, 300)
    mask = torch.ones_like(ids)
    mask[0, :130] = 0
    same(generate(ours, ids, mask, max_new_tokens=60), generate(stock, ids, mask, max_new_tokens=60))


FAMILIES = ("llama", "gpt2", "gpt-neox")
# One of them in turn.
TABLE = [
    (name, change)
    for number, change in enumerate(CHANGES)
    for name in (change.only or (FAMILIES if EVERYTHING else FAMILIES[number % 3 :][:1]))
]


def calls(model, padded_batch: bool) -> dict[str, torch.Tensor]:
    """What generate gives, and every logit of a direct call."""
    ids, mask = padded((9, 5) if padded_batch else (7, 7))
    found = generate(model, ids, mask, max_new_tokens=5, output_logits=True, return_dict_in_generate=True)
    # What a hidden word computes is anybody's guess.
    return found | {"all": model(input_ids=ids, attention_mask=mask).logits[mask.bool()]}


@pytest.mark.parametrize(("name", "change"), TABLE, ids=str)
@pytest.mark.share(12)
@pytest.mark.turns(2)
def test_a_change_between_two_calls_is_seen_by_the_next(name, change, pair):
    ours, stock = pair(name)
    for model in (ours, stock):
        model.family = name
    plain = calls(stock, True)
    same(calls(ours, True), plain)
    for number, step in enumerate((*change.steps, *filter(None, [change.reverse]))):
        ours, stock = (step(model) or model for model in (ours, stock))
        theirs = calls(stock, True)
        for _ in range(2):
            mine = calls(ours, True)
            close(mine, theirs, change)
        if number == 0 and change.shows:
            assert float((theirs["all"] - plain["all"]).abs().max()) > 1e-2
        close(calls(ours, False), calls(stock, False), change)
    if change.reverse is not None and change.slack == 1:
        close(mine, plain, change)


def close(mine, theirs, change):
    if change.slack == 1:
        same(mine, theirs)
    else:  # tokens may part ways, and everything after them
        ours, stock = mine["all"].double(), theirs["all"].double()
        assert float((ours - stock).abs().max()) <= change.slack * 1e-5 * float(stock.abs().max())
