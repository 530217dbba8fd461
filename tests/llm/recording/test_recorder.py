"""Looking at a model beside other threads, and where its stock forward cannot be run on what is tried."""

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

import accel
from accel.llm.recording.position_table import within_tables
from accel.llm.recording.recorder import record
from accel.llm.runtime.analyze import formulas
from support.llm.edits.modules import llama_with
from support.llm.families import make, prompt
from support.llm.outputs import flat, generate, same
from support.together import meeting


def whole(model) -> tuple[str, str]:
    """Status and reason of the language model in the report."""
    (found,) = [(status, reason) for _, rule, status, reason in accel.report(model).sites if rule == "language model"]
    return found


@pytest.fixture
def registries():
    """Those of transformers, which a test must leave as they were."""
    kinds = (AttentionInterface, AttentionMaskInterface)
    before = [dict(kind._global_mapping) for kind in kinds]
    yield kinds
    assert [kind._global_mapping for kind in kinds] == before


# -- beside other threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "bloom", "mpt", "falcon-alibi"])
def test_another_model_of_the_same_configuration_computes_what_it_does(name, registries):
    """On another thread, while the first is looked at: to the bit, with the registries' own functions."""
    model = make(name)
    other = type(model)(model.config).eval()
    assert other.config is model.config
    ids, makers = prompt(2, 12), dict(AttentionMaskInterface._global_mapping)
    wanted, seen = other(ids).logits, []

    def meet():
        own = all(AttentionMaskInterface._global_mapping[name] is maker for name, maker in makers.items())
        seen.append(own and torch.equal(other(ids).logits, wanted))

    meeting(model, meet, apart=True)
    accel.optimize(model)
    assert whole(model)[0] == "patched"
    assert seen and all(seen)
    assert all(module.config is model.config for module in model.modules() if hasattr(module, "config"))


def test_models_optimized_at_the_same_time_are_all_fused(registries):
    first, second = make("llama"), make("bloom")
    meeting(first, lambda: accel.report(second).sites or accel.optimize(second), apart=True)
    accel.optimize(first)
    assert whole(first)[0] == whole(second)[0] == "patched"


# -- stock forwards that cannot be run ---------------------------------------------------------------------------------


def answer(model, ids):
    """Logits of a call without pages; or why there are none, as transformers up to 5.23 says."""
    try:
        with torch.no_grad():
            return model(ids).logits.tolist()
    except ValueError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:The `paged")
@pytest.mark.parametrize(
    ("name", "plain"),
    [("llama", "sdpa"), ("mixtral", "sdpa"), *((name, "eager") for name in ("llama", "gemma2", "lfm2"))],
)
@pytest.mark.share(1)
@pytest.mark.turns(2)
def test_an_attention_for_pages_is_understood_without_them(name, plain, registries):
    """transformers' own raises in every call that has no pages; 5.23 takes "paged|sdpa" for "sdpa"."""
    model = make(name)
    model.set_attn_implementation(f"paged|{plain}")
    stock, paged, named = copy.deepcopy(model), copy.deepcopy(model), model.config._attn_implementation
    stock.set_attn_implementation(plain)
    accel.optimize(model)
    assert whole(model)[0] == "patched" and model.config._attn_implementation == named
    assert all(module.config is model.config for module in model.modules() if hasattr(module, "config"))
    ids = prompt(2, 12)
    with torch.no_grad():
        same(flat(model(ids)), flat(stock(ids)))
    same(generate(model, ids, None), generate(stock, ids, None))
    assert not accel.report(model).fallbacks
    accel.restore(model)
    assert answer(model, ids) == answer(paged, ids)


@pytest.mark.filterwarnings("ignore:The `paged")
@pytest.mark.parametrize("name", ["users_own", "sdpa", "paged|eager"])
def test_an_attention_of_the_users_is_called(name, registries):
    """Also where it differs from transformers' for none of the few tokens that a trial has. One for pages is called
    where stock calls it.
    """
    calls, before = [], dict(AttentionInterface._global_mapping)

    def counted(*args, **kwargs):
        calls.append(1)
        return before.get(name, sdpa_attention_forward)(*args, **kwargs)

    AttentionInterface.register(name, counted)
    try:
        if name == "users_own":
            AttentionMaskInterface.register(name, sdpa_mask)
        model = make("llama")
        model.set_attn_implementation(name)
        accel.optimize(model)
        assert whole(model) == ("skipped", f"the attention {name!r} is not one of transformers' own")
        calls.clear()
        if "paged" not in name:
            model(prompt(2, 5))
            assert len(calls) == model.config.num_hidden_layers
    finally:
        AttentionInterface._global_mapping.clear()
        AttentionInterface._global_mapping.update(before)
        AttentionMaskInterface._global_mapping.pop("users_own", None)


def test_a_forward_that_raises_when_it_is_tried_is_left_alone():
    """Prompts run, and single tokens do not."""
    model = make("llama")
    layer = model.model.layers[0]

    def forward(self, hidden_states, *args, **kwargs):
        if hidden_states.shape[1] == 1:
            raise RuntimeError("no single tokens\nplease")
        return type(self).__base__.forward(self, hidden_states, *args, **kwargs)

    layer.__class__ = type("Demanding", (type(layer),), {"forward": forward})
    stock = copy.deepcopy(model)
    accel.optimize(model)
    assert whole(model) == ("skipped", "could not be tried: RuntimeError: no single tokens")
    torch.testing.assert_close(model(prompt(2, 5)).logits, stock(prompt(2, 5)).logits)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_an_error_that_says_nothing_about_the_model_is_raised(error, tiny):
    def forward(self, x):
        raise error("the device")

    model = make("llama")
    before = tiny.snapshot(model)
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("Failing", (type(mlp),), {"forward": forward})
    with pytest.raises(error, match="the device"):
        accel.optimize(model)
    mlp.__class__ = type(mlp).__base__
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_a_module_that_is_run_to_be_understood_is_not_recorded():
    """A layer is understood while the hooks of the recording are still on what is inside its modules."""

    def contained(layer):
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn)

    assert all(spec.mlp.activation == "silu" for _, spec in formulas(llama_with(contained), {}))


# -- few positions -----------------------------------------------------------------------------------------------------

TABLES = {"gpt2": "n_positions", "opt": "max_position_embeddings", "biogpt": "max_position_embeddings"}


@pytest.mark.parametrize(("name", "positions"), [("gpt2", 7), ("gpt2", 13), ("opt", 9), ("biogpt", 10)])
def test_models_of_few_positions_are_fused(name, positions):
    model = make(name, **{TABLES[name]: positions})
    stock = copy.deepcopy(model)
    accel.optimize(model)
    assert whole(model)[0] == "patched"
    ids = prompt(2, 4)
    ours, theirs = (
        one.generate(ids, min_length=positions, max_length=positions, do_sample=False, output_logits=True,
                     return_dict_in_generate=True) for one in (model, stock)
    )  # fmt: skip
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), rtol=1e-4, atol=1e-4)
    assert not accel.report(model).fallbacks


READ = [  # by a family with these sizes, of which some are those of a table
    ("llama", {"hidden_size": 64, "max_position_embeddings": 64}, None),
    ("llama", {"intermediate_size": 100, "max_position_embeddings": 98}, None),
    ("mixtral", {"vocab_size": 64, "num_local_experts": 2, "max_position_embeddings": 64}, None),
    ("gpt2", {"n_positions": 50}, 50),
    ("opt", {"max_position_embeddings": 50}, 50),  # in a table of 52 rows
    ("gptj", {"max_position_embeddings": 50}, 50),  # in a buffer, which is copied before it is read
]


@pytest.mark.share(1)
@pytest.mark.parametrize(("name", "sizes", "positions"), READ)
def test_a_table_of_positions_is_what_is_read_by_position(name, sizes, positions):
    seen = record(make(name, **sizes), lambda *_: None)
    assert {layer.most_positions for layer in seen.layers} == {positions}


def test_a_table_is_as_long_as_it_is_whatever_the_configuration_says():
    model = make("gpt2")
    model.transformer.wpe = nn.Embedding(20, model.config.n_embd)
    assert record(model, lambda *_: None).layers[0].most_positions == 20


@pytest.mark.parametrize("positions", [8, 50])
def test_verify_writes_no_more_than_there_are_positions(positions):
    quality = accel.verify(accel.optimize(make("gpt2", n_positions=positions)))
    assert quality.passed and quality.agreement.tokens == 2 * min(16, positions - positions // 2 + 1)


@pytest.mark.parametrize("name", TABLES)
def test_models_of_too_few_positions_are_left_alone(name):
    model = make(name, **{TABLES[name]: 4})
    stock = copy.deepcopy(model)
    accel.optimize(model)
    status, reason = whole(model)
    assert status == "skipped" and "too few positions" in reason
    assert torch.equal(model(prompt(2, 4)).logits, stock(prompt(2, 4)).logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_embeddings_of_another_dtype_are_promoted_as_stock_does(dtype):
    model = make("llama")
    stock = copy.deepcopy(model)
    accel.optimize(model)
    embeds = model.get_input_embeddings()(prompt(2, 5)).to(dtype)
    assert torch.equal(model(inputs_embeds=embeds).logits, stock(inputs_embeds=embeds).logits)
    ((path, reason, _),) = accel.report(model).fallbacks
    assert (path, reason) == ("", "embeddings of another dtype than the model's")


def written(layer):
    """What the first forward of a layer of one's own may do to its weight."""
    weight = layer.weight.data
    return {
        "in place": lambda: weight[1:].t().mul_(0.5),
        "out": lambda: torch.mul(weight, 0.5, out=weight),
        "several": lambda: torch._foreach_mul_([weight], 0.5),
        "data": lambda: setattr(layer.weight, "data", weight * 0.5),
        "another": lambda: setattr(layer, "weight", nn.Parameter(weight * 0.5)),
    }


@pytest.mark.parametrize("how", ["in place", "out", "several", "data", "another", "RWKV"])
@torch.no_grad()
def test_a_forward_that_writes_into_its_weights_does_so_in_a_call_of_the_users(how):
    """It notes on the model that it did, and what was noted was put back."""

    class Once(nn.Linear):
        done = False

        def forward(self, x):
            if not self.done:
                written(self)[how]()
                self.done = True
            return super().forward(x)

    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "attention_hidden_size": 32}
    rwkv = transformers.RwkvConfig(**sizes, num_hidden_layers=4, rescale_every=2)
    model = transformers.RwkvForCausalLM(rwkv).eval() if how == "RWKV" else make("llama")
    if how != "RWKV":
        for layer in model.model.layers:
            layer.mlp.up_proj.__class__ = Once
    stock, ids = copy.deepcopy(model), prompt()
    accel.optimize(model)
    assert all(map(torch.equal, model.parameters(), stock.parameters()))
    for _ in range(2):
        assert torch.equal(model(ids).logits, stock(ids).logits)


@pytest.mark.parametrize("head", ["ForCausalLM", "ForSequenceClassification"])
def test_tables_are_read_within(head):
    """As of padding, whose positions have rows in front of those of a text; conftest.py asks what was read behind."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": 60, "type_vocab_size": 1, "pad_token_id": 5, "max_position_embeddings": 16}
    model = getattr(transformers, f"Roberta{head}")(transformers.RobertaConfig(**sizes, is_decoder=head[3] == "C"))
    stock, call = copy.deepcopy(model.eval()), {"input_ids": torch.arange(6, 15)[None]}
    accel.optimize(model)
    with torch.no_grad():
        torch.testing.assert_close(model(**call).logits, stock(**call).logits)
    assert not accel.report(model).fallbacks


def test_a_table_that_is_too_short_is_not_read(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    table, call = torch.zeros(3, 2), torch.tensor([2, 3])
    for read in (lambda: table[call], lambda: table.index_select(0, call), lambda: torch.embedding(table, call)):
        with within_tables(), pytest.raises(IndexError, match="numbers from 2 to 3, of a table with 3"):
            read()
    with within_tables():
        assert table[call - 4].shape == (2, 2)
