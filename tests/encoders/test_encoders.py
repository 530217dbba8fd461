"""Text encoders, packed: the same as stock, whatever is padding, and whoever looks at rows of padding."""

import copy

import pytest
import torch
import transformers as t
from accel_kernels import dequantize

import accel
from accel.comparison import relative_rms
from accel.encoders.encoder import EncoderForward
from accel.quantization.module import QuantizedLinear
from support.state import assert_same_state, snapshot

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
BART = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 40}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "ffn_dim": 48}
CONFIGS = {
    "Bert": t.BertConfig(**SIZES),
    "Roberta": t.RobertaConfig(**SIZES),
    "Electra": t.ElectraConfig(**SIZES, embedding_size=16),
    "DistilBert": t.DistilBertConfig(**DISTIL),
    "ModernBert": t.ModernBertConfig(**SIZES, **MODERN),
    "NomicBert": t.NomicBertConfig(**SIZES),
    "Albert": t.AlbertConfig(**SIZES, embedding_size=16, num_hidden_groups=2, inner_group_num=2),
    "CLIPText": t.CLIPTextConfig(**SIZES | IDS),
    "Esm": t.EsmConfig(**SIZES, mask_token_id=5, pad_token_id=1, token_dropout=True, position_embedding_type="rotary"),
    "MPNet": t.MPNetConfig(**SIZES),
    "T5Encoder": t.T5Config(**T5),
    "UMT5Encoder": t.UMT5Config(**T5, feed_forward_proj="gated-gelu"),
    "Bart": t.BartConfig(**BART),
    "OPT": t.OPTConfig(**BART, num_hidden_layers=2, num_attention_heads=4, hidden_size=32, word_embed_proj_dim=32),
    "Qwen3": t.Qwen3Config(**SIZES, **GROUPED),
    "Mistral": t.MistralConfig(**SIZES, **GROUPED, sliding_window=6),
    "Gemma3Text": t.Gemma3TextConfig(**SIZES, **GROUPED, **GEMMA),
}
BATCH, LENGTH = 3, 19


def made(family, head="Model", **fields):
    """A tiny model with random norms and biases, and a deep copy of it that stays stock."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[family])
    config.update(fields)
    model = getattr(t, family + head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.4)
    return model, copy.deepcopy(model)


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


@pytest.mark.parametrize("family", CONFIGS)
def test_an_encoder_gives_what_stock_gives(family):
    model, stock = optimized(family)
    for side in (None, "full", "right"):
        assert_same(model, stock, **ids_and_mask(side))
    assert_same(model, stock, **{name: one if one is None else one[1:2] for name, one in ids_and_mask().items()})
    assert not fallbacks(model)
    for side in ("left", "holes"):
        assert_same(model, stock, **ids_and_mask(side))
    by_distance = encoder_of(model).sight.distances
    assert fallbacks(model) == ["padding on no one side, and attention by distances"] * by_distance
    assert_same(model, stock, **ids_and_mask("empty"))
    assert "a sequence that is all padding" in fallbacks(model)


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "ModernBert"])
def test_padding_is_left_out_where_a_head_does_not_see_it(family, monkeypatch):
    rows = []
    packing = EncoderForward.packing

    def counted(self, *given):
        rows.append(packing(self, *given))
        return rows[-1]

    monkeypatch.setattr(EncoderForward, "packing", counted)
    model, stock = optimized(family, "ForSequenceClassification")
    rows.clear()
    call = ids_and_mask()
    assert_same(model, stock, **call)
    assert [int(one.starts[-1]) for one in rows] == [int(call["attention_mask"].sum())]
    assert_same(model.base_model, stock.base_model, **call)  # whose rows the caller sees
    with model.base_model.register_forward_hook(lambda *given: None):
        assert_same(model, stock, **call)
    assert_same(model, stock, **call)
    assert [int(one.starts[-1]) for one in rows[1:]] == [BATCH * LENGTH, BATCH * LENGTH, rows[0].starts[-1]]
    assert not fallbacks(model)


def test_rows_of_padding_that_are_alike_are_computed_once():
    model, stock = optimized("Roberta")
    call = ids_and_mask()
    call["input_ids"] = call["input_ids"].masked_fill(call["attention_mask"] == 0, model.config.pad_token_id)
    assert_same(model, stock, **call)
    forward = encoder_of(model)
    with torch.no_grad():
        packed = forward.packing(model.embeddings(call["input_ids"]), call["attention_mask"], False)
    assert int(packed.starts[-1]) == int(call["attention_mask"].sum()) + 2


@pytest.mark.parametrize("head", ["ForTokenClassification", "ForMaskedLM", "ForQuestionAnswering"])
def test_heads_that_show_rows_of_padding(head):
    model, stock = optimized("Bert", head)
    for side in ("right", "left"):
        assert_same(model, stock, **ids_and_mask(side))
    assert not fallbacks(model) and not encoder_of(model).blind


def test_other_inputs():
    model, stock = optimized("Bert")
    call = ids_and_mask()
    places = torch.arange(LENGTH).flip(0).expand(BATCH, -1)
    assert_same(model, stock, **call, token_type_ids=(call["input_ids"] > 20).long(), position_ids=places)
    assert_same(model, stock, **call, return_dict=False)
    shown = {"input_ids": call["input_ids"], "output_hidden_states": True, "return_dict": False}
    with torch.no_grad():
        for got, wanted in zip(model(**shown)[2], stock(**shown)[2], strict=True):  # without a mask
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-4)
    embeddings = stock.embeddings.word_embeddings(call["input_ids"]).detach()
    assert_same(model, stock, inputs_embeds=embeddings, attention_mask=call["attention_mask"].bool())
    assert not fallbacks(model)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"output_hidden_states": True}, "output_hidden_states: its layers run stock where each is looked at"),
        ({"output_attentions": True}, "output_attentions: its layers run stock where each is looked at"),
        ({"attention_mask": torch.ones(BATCH, 1, LENGTH, LENGTH).tril().bool()}, "a mask that is not one of tokens"),
        ({"encoder_hidden_states": torch.ones(BATCH, 2, 32)}, "encoder_hidden_states is given"),
    ],
)
def test_calls_that_run_stock(more, reason):
    model, stock = optimized("Bert", attn_implementation="eager")
    call = ids_and_mask() | more
    assert_same(model, stock, **call)
    assert [told.startswith(reason) for told in fallbacks(model)] == [True]
    assert_same(model, stock, **ids_and_mask())  # transformers' hooks stay behind
    assert len(fallbacks(model)) == 1


def test_training_gradients_and_autocast_run_stock():
    model, stock = optimized("Bert")
    model(**ids_and_mask())
    model.train()
    with torch.no_grad():
        model(**ids_and_mask())
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(model, stock, **ids_and_mask())
    assert {reason.partition(" (")[0] for reason in fallbacks(model)} == {
        "gradients are on", "training mode", "autocast is on"
    }  # fmt: skip


def test_what_changes_is_followed():
    model, stock = optimized("Bert")
    assert_same(model, stock, **ids_and_mask())
    other = torch.nn.Linear(32, 32).requires_grad_(False)
    for one in (model, stock):
        with torch.no_grad():
            one.encoder.layer[1].intermediate.dense.weight.mul_(0.5)
        one.encoder.layer[0].attention.self.key = copy.deepcopy(other)
    assert_same(model, stock, **ids_and_mask())
    seen = []
    model.encoder.layer[1].register_forward_hook(lambda module, given, output: seen.append(output))
    with torch.no_grad():
        last = model(**ids_and_mask()).last_hidden_state
    assert torch.equal(seen[0], last) and fallbacks(model) == ["encoder.layer.1 has forward hooks"]


def test_restore_gives_the_stock_model_back():
    model, stock = made("ModernBert", "ForMaskedLM")
    before = snapshot(model)
    accel.optimize(model)
    assert_same(model, stock, **ids_and_mask())
    assert_same(copy.deepcopy(model), stock, **ids_and_mask())
    assert_same_state(snapshot(accel.restore(model)), before)


def test_what_is_no_such_encoder_says_why():
    config = t.DebertaV2Config(**SIZES, relative_attention=True, position_buckets=8, pos_att_type=["c2p", "p2c"])
    model = t.DebertaV2Model(config).eval()
    rows = [row for row in accel.report(accel.optimize(model)).sites if row[1] == "encoder"]
    assert [row[2:] for row in rows] == [("skipped", "its own code attends, by a formula that is not known")]


def test_big_bird_is_put_back_after_it_was_looked_at():
    """A first short text makes it attend to all for good."""
    model = t.BigBirdModel(
        t.BigBirdConfig(**SIZES | {"max_position_embeddings": 256}, block_size=4, num_random_blocks=1)
    )
    before = snapshot(model.eval())
    accel.optimize(model)
    ids = torch.randint(64, (1, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert model(ids).last_hidden_state.shape == (1, 128, 32) and model.attention_type == "block_sparse"
    assert_same_state(snapshot(accel.restore(model)), before)


def test_own_code_may_have_windows_that_a_short_text_does_not_show(monkeypatch):
    def near(scores, dim, softmax=torch.nn.functional.softmax):
        at = torch.arange(scores.shape[-1])
        return softmax(scores.masked_fill((at - at[:, None]).abs() > 25, -torch.inf), dim)

    monkeypatch.setattr(torch.nn.functional, "softmax", near)
    model = accel.optimize(made("MPNet")[0])
    (row,) = [row for row in accel.report(model).sites if row[1] == "encoder"]
    assert row[2] == "skipped" and row[3].startswith("it computes something else: last_hidden_state is off by")


def padded_ids(side, pad=0):
    call = ids_and_mask(side)
    return call | {"input_ids": call["input_ids"].masked_fill(call["attention_mask"] == 0, pad)}


def test_a_decoder_makes_its_cache_when_somebody_looks_into_it():
    model, stock = optimized("Mistral")
    call = padded_ids("left")
    assert_same(model, stock, **call, return_dict=False)
    with torch.no_grad():
        got, wanted = model(**call), stock(**call)
        assert not fallbacks(model) and isinstance(got.cache, t.DynamicCache)
        call["input_ids"].zero_()
        for ours, theirs in zip(copy.deepcopy(got.cache).layers, wanted.cache.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        assert type(got.cache) is t.DynamicCache
        more = [one(call["input_ids"][:, :1], cache=had.cache)[0] for one, had in ((model, got), (stock, wanted))]
    assert torch.equal(*more) and fallbacks(model) == ["cache is given"]
    assert_same(model, stock, **call, use_cache=False)
    assert_same(model, stock, **call)
    assert fallbacks(model) == ["cache is given", "a cache, into which somebody looks"]


def test_a_decoder_with_a_class_for_its_last_word_leaves_padding_out():
    model, stock = optimized("Qwen3", "ForSequenceClassification", pad_token_id=0)
    forward, rows = encoder_of(model), []
    packing = forward.packing
    forward.packing = lambda *given: rows.append(packing(*given)) or rows[-1]
    for side in ("right", "left"):
        assert_same(model, stock, **padded_ids(side))
    assert_same(model, stock, **padded_ids("right", pad=5))  # its class is that of a row of padding
    real = int(ids_and_mask()["attention_mask"].sum())
    assert [int(one.starts[-1]) for one in rows] == [real, real + 2, BATCH * LENGTH] and not fallbacks(model)


def test_weights_and_activations_in_8_bits():
    model, stock = made("ModernBert")
    accel.optimize(model, weights="int8", activations="int8")
    call = ids_and_mask()
    with torch.no_grad():
        for path, module in model.layers.named_modules():
            if isinstance(module, QuantizedLinear):
                stock.layers.get_submodule(path).weight.copy_(dequantize(module.quantized, torch.float32))
        assert_same(model, stock, **call)  # of few rows
        many = {name: one.repeat(8, 1) for name, one in call.items()}
        lost = relative_rms(model(**many).last_hidden_state, stock(**many).last_hidden_state)
    assert 1e-3 < lost < 0.1 and not fallbacks(model)
    assert sum(row[1:3] == ("weights", "patched") for row in accel.report(model).sites) == 8
    with pytest.raises(ValueError, match="holds none"):
        accel.optimize(t.T5ForConditionalGeneration(CONFIGS["T5Encoder"]), weights="int8")


def test_several_texts_in_a_row_run_stock():
    model, stock = optimized("Qwen3", use_cache=False)
    places = torch.arange(LENGTH).remainder(7).expand(BATCH, -1)
    assert_same(model, stock, input_ids=ids_and_mask()["input_ids"], position_ids=places)
    assert fallbacks(model) == ["positions without a mask, which may be those of several texts in a row"]


def test_a_configuration_that_changes_its_masks_is_followed():
    model, stock = optimized("Qwen3", use_cache=False)
    for one in (model, stock):
        one.config.is_causal = False
    assert_same(model, stock, **ids_and_mask())
    assert fallbacks(model) == ["its configuration has changed since it was optimized"]


def test_rows_of_padding_before_a_text_are_computed_once_where_they_see_nothing():
    model, stock = optimized("Qwen3", use_cache=False)
    call = ids_and_mask("left")
    call["input_ids"] = call["input_ids"].masked_fill(call["attention_mask"] == 0, 0)
    assert_same(model, stock, **call)
    with torch.no_grad():
        packed = encoder_of(model).packing(model.embed_tokens(call["input_ids"]), call["attention_mask"], False)
    assert int(packed.starts[-1]) == int(call["attention_mask"].sum()) + 2 and packed.mirrored


def test_an_attention_that_sees_padding_before_a_text_runs_stock_there():
    model, stock = optimized("Qwen3", _attn_implementation="eager")
    assert_same(model, stock, **ids_and_mask("right"))
    assert not fallbacks(model)
    assert_same(model, stock, **ids_and_mask("left"))
    assert fallbacks(model) == ["padding on no one side, and attention by distances"]


def test_a_position_bias_is_known_up_to_the_length_at_which_it_was_seen():
    model, stock = optimized("T5Encoder", relative_attention_max_distance=2000, relative_attention_num_buckets=32)
    ids = torch.randint(64, (1, 600), generator=torch.Generator().manual_seed(0))
    assert_same(model, stock, input_ids=ids[:, :512])
    assert not fallbacks(model)
    assert_same(model, stock, input_ids=ids)
    assert fallbacks(model) == ["a text of more than 512 tokens, and a position bias"]
    with torch.no_grad():
        for one in (model, stock):
            one.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.mul_(2.0)
    assert_same(model, stock, input_ids=ids[:, :40])
    assert_same(model, stock, **ids_and_mask("left"))
    assert len(fallbacks(model)) == 1


def test_the_encoder_of_a_sequence_to_sequence_model():
    torch.manual_seed(0)
    model = t.T5ForConditionalGeneration(CONFIGS["T5Encoder"]).eval()
    stock = copy.deepcopy(model)
    accel.optimize(model)
    call = ids_and_mask() | {"decoder_input_ids": torch.arange(4, 8).expand(BATCH, -1)}
    assert_same(model, stock, **call)
    assert not fallbacks(model) and encoder_of(model).module is model.encoder


def test_rows_of_padding_are_zeros_where_the_user_asks_for_that():
    model, stock = made("Bert")
    accel.optimize(model, padding="zeros")
    call = ids_and_mask()
    real = call["attention_mask"].bool()
    with torch.no_grad():
        got, wanted = (one(**call).last_hidden_state for one in (model, stock))
    torch.testing.assert_close(got[real], wanted[real], rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))
    assert not got[~real].any() and not fallbacks(model)
    with pytest.raises(ValueError, match="padding='none' is not one of 'stock', 'zeros'"):
        accel.optimize(model, padding="none")
