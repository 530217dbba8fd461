"""Tiny encoders of texts, calls of them, and what compares their outputs."""

import copy

import torch
import transformers as t

import accel
from accel.encoders.encoder import EncoderForward
from accel.encoders.inputs import tensors_of

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 40}
DISTIL = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 40}
MODERN = {"local_attention": 20, **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0)}
MODERN |= dict.fromkeys(("sep_token_id", "eos_token_id"), 1)
IDS = dict.fromkeys(("pad_token_id", "bos_token_id"), 0) | {"eos_token_id": 63}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
GEMMA = {"use_bidirectional_attention": True, "sliding_window": 5}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"]}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"relative_attention_max_distance": 10, "relative_attention_num_buckets": 8}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
BART = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 40}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "ffn_dim": 48}
CONFIGS = {
    "Bert": t.BertConfig(**SIZES),
    "Roberta": t.RobertaConfig(**SIZES),
    "Electra": t.ElectraConfig(**SIZES, embedding_size=16, return_dict=False),
    "DistilBert": t.DistilBertConfig(**DISTIL),
    "ModernBert": t.ModernBertConfig(**SIZES, **MODERN),
    "NomicBert": t.NomicBertConfig(**SIZES),
    "Albert": t.AlbertConfig(**SIZES, embedding_size=16, num_hidden_groups=2, inner_group_num=2),
    "CLIPText": t.CLIPTextConfig(**SIZES | IDS),
    "OwlViTText": t.OwlViTTextConfig(**SIZES | IDS),  # which does not tell where its words are
    "Esm": t.EsmConfig(**SIZES, mask_token_id=5, pad_token_id=1, token_dropout=True, position_embedding_type="rotary"),
    "MPNet": t.MPNetConfig(**SIZES),
    "RoFormer": t.RoFormerConfig(**SIZES, embedding_size=16),
    "T5Encoder": t.T5Config(**T5),
    "UMT5Encoder": t.UMT5Config(**T5, feed_forward_proj="gated-gelu"),
    "Bart": t.BartConfig(**BART),
    "OPT": t.OPTConfig(**BART, num_hidden_layers=2, num_attention_heads=4, hidden_size=32, word_embed_proj_dim=32),
    "Qwen3": t.Qwen3Config(**SIZES, **GROUPED),
    "Mistral": t.MistralConfig(**SIZES, **GROUPED, sliding_window=6),
    "Exaone4": t.Exaone4Config(
        **SIZES, num_key_value_heads=2, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    ),
    "MllamaText": t.MllamaTextConfig(
        **SIZES, num_key_value_heads=2, cross_attention_layers=[1], pad_token_id=0, rope_parameters=ROTARY
    ),
    "ImageGPT": t.ImageGPTConfig(vocab_size=64, n_positions=40, n_embd=32, n_layer=2, n_head=4),
    "Gemma3Text": t.Gemma3TextConfig(**SIZES, **GROUPED, **GEMMA),
}
DEBERTA = {"relative_attention": True, "position_buckets": 8, "max_relative_positions": 16}
DEBERTA |= {"norm_rel_ebd": "layer_norm", "position_biased_input": False}
BATCH, LENGTH = 3, 19


def random_pair(make, deviation=0.4):
    """A model with random norms and biases, and a deep copy of it that stays stock."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, deviation)
    return model, copy.deepcopy(model)


def made(family, head="Model", **fields):
    config = copy.deepcopy(CONFIGS[family])
    config.update(fields)
    return random_pair(lambda: getattr(t, family + head)(config))


def optimized(family, head="Model", **fields):
    model, stock = made(family, head, **fields)
    return accel.optimize(model), stock


def encoder_of(model):
    held = [vars(module).get("forward") for module in model.modules()]
    return next(one for one in (getattr(one, "inner", None) or one for one in held) if isinstance(one, EncoderForward))


def ids_and_mask(side="right"):
    generator = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(4, 64, (BATCH, LENGTH), generator=generator), torch.ones(BATCH, LENGTH, dtype=torch.int64)
    if side in ("right", "left"):
        for row, length in enumerate((LENGTH, 2, 11)):
            mask[row, length:] = 0
        mask = mask if side == "right" else mask.flip(1)
    elif side == "holes":
        mask[0, 3] = mask[2, 5:9] = 0
    elif side == "empty":
        mask[1] = 0
    return {"input_ids": ids, "attention_mask": None if side is None else mask}


def fallbacks(model):
    return [reason for _, reason, _ in accel.report(model).fallbacks]


@torch.no_grad()
def assert_same(model, stock, **call):
    got, wanted = model(**call), stock(**call)
    if isinstance(wanted, tuple):
        got, wanted = (dict(enumerate(one)) for one in (got, wanted))
    assert type(got) is type(wanted) and list(got) == list(wanted)
    for name in (name for name, one in wanted.items() if isinstance(one, torch.Tensor)):
        atol = 2e-5 * float(wanted[name].nan_to_num().abs().max())
        torch.testing.assert_close(got[name], wanted[name], rtol=2e-5, atol=atol, equal_nan=True)


@torch.no_grad()
def assert_same_tensors(model, stock, call, near=2e-5):
    """All that a call gives, inside of others too. near: of the largest number."""
    got, wanted = tensors_of(model(**call)), tensors_of(stock(**call))
    assert list(got) == list(wanted) and got
    for name, one in wanted.items():
        assert type(got[name]) is torch.Tensor
        torch.testing.assert_close(got[name], one, rtol=2e-5, atol=near * float(one.abs().max()))


def padded_ids(side, pad=0):
    call = ids_and_mask(side)
    return call | {"input_ids": call["input_ids"].masked_fill(call["attention_mask"] == 0, pad)}
