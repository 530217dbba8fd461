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
from support.objects.encoders import (
    BATCH,
    CONFIGS,
    DEBERTA,
    LENGTH,
    SIZES,
    assert_same,
    assert_same_tensors,
    encoder_of,
    fallbacks,
    ids_and_mask,
    made,
    optimized,
    padded_ids,
)
from support.state import assert_same_state, snapshot


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


def test_methods_that_gptqmodel_replaces_are_a_librarys(monkeypatch):
    name, places = "get_expanded_tied_weights_keys", {"__name__": "gptqmodel.utils.hf"}
    exec(f"def {name}(self, **given): return {{}}", places)
    monkeypatch.setattr(t.PreTrainedModel, name, places[name])
    assert encoder_of(optimized("Bert")[0])


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "ModernBert"])
def test_padding_is_left_out_where_a_head_does_not_see_it(family, monkeypatch):
    rows = []
    pack = EncoderForward._packed

    def counted(self, step, *given):
        x = pack(self, step, *given)
        assert len(x) == step.packing.size  # and no row beyond is computed
        rows.append(step.packing)
        return x

    monkeypatch.setattr(EncoderForward, "_packed", counted)
    model, stock = optimized(family, "ForSequenceClassification")
    assert encoder_of(optimized(family, "ForMultipleChoice")[0]).blind
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
        x = model.embeddings(call["input_ids"])
        packed = forward.padded(call["attention_mask"], None, x).packing(x)
    assert int(packed.starts[-1]) == int(call["attention_mask"].sum()) + 2


@pytest.mark.parametrize("head", ["ForTokenClassification", "ForMaskedLM", "ForQuestionAnswering"])
def test_heads_that_show_rows_of_padding(head):
    model, stock = optimized("Bert", head)
    for side in ("right", "left"):
        assert_same(model, stock, **ids_and_mask(side))
    assert not fallbacks(model) and not encoder_of(model).blind


@pytest.mark.parametrize(("family", "head"), [("Bert", "ForSequenceClassification"), ("T5Encoder", "Model")])
def test_hidden_states_of_padded_texts(family, head):
    """Rows of padding too, of a head that does not see them."""
    model, stock = optimized(family, head)
    for side in ("right", "left"):
        assert_same_tensors(model, stock, padded_ids(side) | {"output_hidden_states": True})
    assert not fallbacks(model)


def test_other_inputs():
    model, stock = optimized("Bert")
    call = ids_and_mask()
    places = torch.arange(LENGTH).flip(0).expand(BATCH, -1)
    assert_same(model, stock, **call, token_type_ids=(call["input_ids"] > 20).long(), position_ids=places)
    assert_same(model, stock, **call, return_dict=False)
    for mask in (None, call["attention_mask"]):
        shown = {"input_ids": call["input_ids"], "attention_mask": mask, "output_hidden_states": True}
        assert_same_tensors(model, stock, shown)
    embeddings = stock.embeddings.word_embeddings(call["input_ids"]).detach()
    assert_same(model, stock, inputs_embeds=embeddings, attention_mask=call["attention_mask"].bool())
    assert not fallbacks(model)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
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
    assert torch.equal(seen[0], last) and fallbacks(model) == ["encoder.layer.1: forward hooks"]


class Shifted(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).roll(1, dims=1)


def shifted(module, *_):
    return _[-1].roll(1, dims=1)


INSIDE = {  # of the middle of a layer, where rows are packed
    "output": (lambda model: model.encoder.layer[1].output.dense.register_forward_hook(shifted), "forward hooks"),
    "forward": (lambda model: setattr(
        model.encoder.layer[0].attention.self.key, "forward",
        lambda x, linear=model.encoder.layer[0].attention.self.key: shifted(linear, type(linear).forward(linear, x))),
        "a replaced forward (function)"),
    "class": (lambda model: setattr(
        model.encoder.layer[1].intermediate, "dense", Shifted(model.encoder.layer[1].intermediate.dense)),
        "Shifted.forward is not the library's own"),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_what_the_user_puts_into_a_layer_sees_its_rows(name):
    (model, stock), (change, reason) = optimized("Bert"), INSIDE[name]
    for one in (model, stock):
        change(one)
    assert_same(model, stock, **ids_and_mask())
    assert [told.partition(": ")[2] for told in fallbacks(model)] == [reason]


def test_restore_gives_the_stock_model_back():
    model, stock = made("ModernBert", "ForMaskedLM")
    before = snapshot(model)
    accel.optimize(model)
    assert_same(model, stock, **ids_and_mask())
    assert_same(copy.deepcopy(model), stock, **ids_and_mask())
    assert_same_state(snapshot(accel.restore(model)), before)


def test_what_is_no_such_encoder_says_why(monkeypatch):
    config = t.DebertaV2Config(**SIZES, relative_attention=True, position_buckets=8, pos_att_type=["c2p"])
    rows = accel.report(accel.optimize(t.DebertaV2Model(config).eval())).sites
    (told,) = (row[3] for row in rows if row[1:3] == ("encoder", "patched"))
    assert told.startswith("2 attentions are fused inside of its own code, as its own code attends, by a formula that")
    sizes = {"block_size": 40, "hidden_size": 32, "num_heads": 4, "input_vocab_size": 64, "output_vocab_size": 64}
    model = t.BarkSemanticModel(t.BarkSemanticConfig(**sizes, num_layers=2)).eval()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    (told,) = (row[3] for row in accel.report(accel.optimize(model)).sites if row[1] == "encoder")
    assert "numbers from 0 to 511, of a table with 40" in told  # on a GPU such a read ends the process


CONTENT = {
    "DebertaV2": t.DebertaV2Config(**SIZES, **DEBERTA, share_att_key=False, pos_att_type=["p2c", "c2p"]),
    "DebertaV2 shared": t.DebertaV2Config(**SIZES, **DEBERTA, share_att_key=True, pos_att_type=["p2c", "c2p"]),
    "Deberta": t.DebertaConfig(**SIZES, **DEBERTA | {"max_relative_positions": 9}, pos_att_type=["c2p", "p2c"]),
    "Deberta far": t.DebertaConfig(**SIZES, **DEBERTA | {"max_relative_positions": -1}, pos_att_type=["p2c", "c2p"]),
}


@torch.no_grad()
@pytest.mark.share(1)
@pytest.mark.parametrize("name", CONTENT)
def test_scores_by_content_and_distance(monkeypatch, name):
    family, *more = name.split()
    monkeypatch.setitem(CONFIGS, family, CONTENT[name])
    model, stock = made(family, "ForSequenceClassification" if more else "Model")
    for one in (model, stock):
        for path, parameter in one.named_parameters():
            parameter.mul_(not path.endswith(("q_bias", "v_bias")))  # as they are when none was trained
    accel.optimize(model)
    lengths = 39, 90 if "far" not in name else 40
    for again in range(2):
        for side in (None, "full", "right", "left"):
            assert_same(model, stock, **ids_and_mask(side))
        for length in lengths:
            assert_same(model, stock, input_ids=torch.arange(length)[None] % 64)
        for one in (model, stock):
            generator = torch.Generator().manual_seed(again)
            for parameter in one.base_model.encoder.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    assert not fallbacks(model)
    assert_same(model, stock, **ids_and_mask("holes"))
    assert fallbacks(model) == ["padding on no one side, and attention by distances"]


def test_a_norm_of_what_is_nearly_one_already():
    """In bfloat16 the sum before it, and itself, are as near to what the MLP is added to as numbers are."""
    torch.manual_seed(0)
    model = accel.optimize(t.BertModel(t.BertConfig(**SIZES)).bfloat16().eval())
    specs = [layer.spec for layer in encoder_of(model).layers]
    assert all(one.after_attention is not None and one.before_mlp is None for one in specs)


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
    def near(scores, dim=None, **more):
        at = torch.arange(scores.shape[-1])
        return torch.softmax(scores.masked_fill((at - at[:, None]).abs() > 25, -torch.inf), dim)

    monkeypatch.setattr(torch.nn.functional, "softmax", near)
    model = accel.optimize(made("MPNet")[0])
    (row,) = [row for row in accel.report(model).sites if row[1] == "encoder"]
    assert "own code, as it computes something else: last_hidden_state is off by" in row[3]


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


def test_a_configuration_that_changes_its_masks_is_followed():
    model, stock = optimized("Qwen3", use_cache=False)
    for one in (model, stock):
        one.config.is_causal = False
    assert_same(model, stock, **ids_and_mask())
    assert fallbacks(model) == ["its configuration has changed since it was optimized"]


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


def test_a_mask_with_whose_numbers_a_model_computes(monkeypatch):
    monkeypatch.setitem(CONFIGS, "MarkupLM", t.MarkupLMConfig(**SIZES))
    model, stock = optimized("MarkupLM")
    call = ids_and_mask()
    other = call | {"attention_mask": call["attention_mask"].cumsum(1)}  # it adds 10,000 times as much to scores
    for given in (call, other):
        assert_same(model, stock, **given)
    assert fallbacks(model) == ["a mask of other numbers than 0 and 1, with which its code computes"]
    small = encoder_of(model).calls
    assert [small.takes({name: one[:1] for name, one in given.items()}) for given in (call, other)] == [True, False]


def test_the_encoder_of_a_sequence_to_sequence_model():
    torch.manual_seed(0)
    model = t.T5ForConditionalGeneration(CONFIGS["T5Encoder"]).eval()
    stock = copy.deepcopy(model)
    accel.optimize(model)
    call = ids_and_mask() | {"decoder_input_ids": torch.arange(4, 8).expand(BATCH, -1)}
    assert_same(model, stock, **call)
    assert not fallbacks(model) and encoder_of(model).module is model.encoder
