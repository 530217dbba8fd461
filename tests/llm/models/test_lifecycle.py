"""A model that is restored, copied, saved, moved, or given adapters."""

import copy
import pickle

import pytest
import torch

import accel
from accel.llm.generation.layer_forward import LayerForward
from support.llm.families import FAMILIES, layers, make, padded, prompt
from support.llm.miniatures.family import SIZES, TOKENS
from support.llm.outputs import generate, same, write_alike
from support.patched import sites
from support.state import differences

CORE = [family.name for family in FAMILIES if family.core]


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", CORE)
@pytest.mark.share(16)
def test_a_copy_is_a_model_of_its_own(name, way, pair):
    """Made while a cache is in use; it keeps its own weights, is fast, and is restored by itself."""
    ours, stock = pair(name)
    ids, mask = padded()
    wanted = generate(stock, ids, mask)
    same(generate(ours, ids, mask), wanted)
    copied = copy.deepcopy(ours) if way == "deepcopy" else pickle.loads(pickle.dumps(ours))
    with torch.no_grad():
        for weight in ours.parameters():
            weight.mul_(-0.7)
    same(generate(copied, ids, mask), wanted)
    assert accel.report(copied).sites == accel.report(ours).sites
    accel.restore(ours)
    same(generate(copied, ids, mask), wanted)
    accel.restore(copied)
    assert torch.equal(copied(ids).logits, stock(ids).logits)


def test_saving_and_loading(pair, tmp_path):
    from transformers import AutoModelForCausalLM

    ours, stock = pair("llama-tied")
    ids, mask = padded()
    generate(ours, ids, mask)
    ours.save_pretrained(tmp_path / "ours")
    stock.save_pretrained(tmp_path / "stock")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes(), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    same(generate(accel.optimize(loaded), ids, mask), generate(stock, ids, mask))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_where_it_was_optimized_does_not_matter(mode):
    stock = make("llama")
    ids, mask = padded()
    ours = copy.deepcopy(stock)
    with mode():
        accel.optimize(ours)
    for each in (torch.inference_mode, torch.no_grad):
        with each():
            same(generate(ours, ids, mask), generate(stock, ids, mask))
    with torch.enable_grad():
        ours(ids, labels=ids).loss.backward()
    assert all(weight.grad is not None for weight in ours.parameters())


def test_weights_made_under_inference_mode_count_no_changes():
    with torch.inference_mode():
        stock = make("llama")
        ours = accel.optimize(copy.deepcopy(stock))
        for _ in range(2):
            write_alike(ours, stock)
            for model in (ours, stock):
                for weight in model.parameters():
                    weight.mul_(1.1)


def test_options_and_blocks(pair):
    ours, stock = pair("llama")
    ids, mask = padded()
    wanted = generate(stock, ids, mask)
    sites = accel.report(ours).sites
    for options in ({"graphs": False}, {"graphs": True}, {}):
        same(generate(accel.optimize(ours, **options), ids, mask), wanted)
    assert accel.report(ours).sites == sites
    accel.restore(ours)
    with accel.optimized(ours):
        same(generate(ours, ids, mask), wanted)
        assert accel.report(ours).sites == sites
    assert accel.report(ours).sites == [] and accel.restore(ours) is ours


def test_a_model_without_weights():
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **TOKENS)).eval()
    with pytest.raises(ValueError, match="meta device"):
        accel.optimize(model)
    assert model(torch.zeros(1, 4, dtype=torch.long, device="meta")).logits.shape == (1, 4, SIZES["vocab_size"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CORE)
@pytest.mark.share(16)
def test_half_precision_is_as_near_to_the_truth_as_stock(name, dtype):
    """A prompt and steps after it; at most twice stock's own error, and a part of a rounding of the largest logit."""
    stock = make(name).to(dtype)
    exact = copy.deepcopy(stock).float()
    ours = accel.optimize(copy.deepcopy(stock))
    ids, mask = padded((9, 6))

    def logits(model):
        output, found, grown = model(ids, attention_mask=mask), [], mask
        found.append(output.logits[mask.bool()])
        for step in range(4):
            grown = torch.cat([grown, grown.new_ones(2, 1)], 1)
            output = model(prompt(2, 1, step), attention_mask=grown, past_key_values=output.past_key_values)
            found.append(output.logits[:, 0])
        return torch.cat(found).double()

    truth = logits(exact)
    error, allowed = (float((logits(model) - truth).pow(2).mean().sqrt()) for model in (ours, stock))
    assert error <= 2 * allowed + torch.finfo(dtype).eps * float(truth.abs().max()) / 8


@pytest.mark.turns(2)
def test_compiled_on_top(pair):
    torch._dynamo.reset()
    ours, stock = pair("llama")
    ids = prompt(2, 6)
    compiled = torch.compile(ours, backend="eager")
    try:
        same({"x": compiled(ids).logits}, {"x": stock(ids).logits})
        same({"x": compiled(ids).logits}, {"x": stock(ids).logits})
        same(generate(ours, ids, None), generate(stock, ids, None))
    finally:
        torch._dynamo.reset()


def test_hooks_of_accelerate(pair):
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Louder(ModelHook):
        def post_forward(self, module, output):
            return (output[0] * 1.4, *output[1:]) if isinstance(output, tuple) else output * 1.4

    ours, stock = pair("llama")
    ids, mask = padded()
    plain = generate(stock, ids, mask)
    for at in (lambda m: next(iter(layers(m).values())), lambda m: next(iter(layers(m).values())).mlp.down_proj):
        for model in (ours, stock):
            add_hook_to_module(at(model), Louder())
        theirs = generate(stock, ids, mask)
        same(generate(ours, ids, mask), theirs)
        assert not torch.equal(theirs["sequences"], plain["sequences"])
        for model in (ours, stock):
            remove_hook_from_module(at(model))
        same(generate(ours, ids, mask), plain)
    accel.restore(ours)
    same(generate(ours, ids, mask), plain)


peft = pytest.importorskip("peft")

AT = {"target_modules": ["q_proj", "v_proj"]}
DRAWN = AT | {"init_weights": False}
LORA = AT | {"init_lora_weights": False}
VIRTUAL = {"num_virtual_tokens": 3}
ADAPTERS = {
    "lora": ("Lora", LORA),
    "lora-everywhere": ("Lora", LORA | {"target_modules": "all-linear", "use_rslora": True}),
    "lora-on-the-head": ("Lora", LORA | {"target_modules": ["lm_head"]}),
    "lora-on-embeddings": ("Lora", LORA | {"target_modules": ["embed_tokens"]}),
    "lora-in-one-layer": ("Lora", LORA | {"layers_to_transform": [0]}),
    "lora-beside-a-saved-head": ("Lora", LORA | {"modules_to_save": ["lm_head"]}),
    "lora-with-tokens": ("Lora", LORA | {"trainable_token_indices": [1, 2]}),
    "dora": ("Lora", LORA | {"use_dora": True}),
    "adalora": ("AdaLora", LORA | {"total_step": 10}),
    "ia3": ("IA3", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prompt-tuning": ("PromptTuning", VIRTUAL),
    "p-tuning": ("PromptEncoder", VIRTUAL | {"encoder_hidden_size": 16}),
    "prefix-tuning": ("PrefixTuning", VIRTUAL),
    "adaption-prompt": ("AdaptionPrompt", {"adapter_len": 3, "adapter_layers": 2}),
    "loha": ("LoHa", DRAWN),
    "lokr": ("LoKr", DRAWN),
    "oft": ("OFT", AT | {"oft_block_size": 4}),
    "boft": ("BOFT", DRAWN | {"boft_block_size": 4}),
    "vera": ("Vera", DRAWN | {"target_modules": ["q_proj", "o_proj"]}),
    "fourierft": ("FourierFT", AT | {"n_frequency": 10}),
    "vblora": ("VBLoRA", AT | {"num_vectors": 8, "vector_length": 4}),
    "hra": ("HRA", DRAWN | {"r": 2}),
    "layer-norms": ("LNTuning", {}),
    "shira": ("Shira", AT | {"r": 2}),
    "miss": ("Miss", DRAWN | {"r": 4}),
    "randlora": ("RandLora", AT | {"r": 4}),
    "c3a": ("C3A", AT | {"block_size": 8}),
    "tokens": ("TrainableTokens", {"token_indices": [1, 2]}),
    "waveft": ("WaveFT", AT | {"n_frequency": 10}),
}


def adapted(name: str, seed: int = 0):
    """A model with this adapter, whose weights make a difference."""
    kind, settings = ADAPTERS[name]
    torch.manual_seed(seed)
    model = peft.get_peft_model(make("llama"), getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **settings))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape)
    return model.eval()


def answers(model) -> list[torch.Tensor]:
    ids = prompt()
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        text = model.generate(**call, max_new_tokens=5, do_sample=False)
        return [text, model(**call).logits]


def equal(ours, stock) -> None:
    """The same words, and logits that differ by rounding."""
    for got, wanted in zip(answers(ours), answers(stock), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.fixture
def layers_ran(monkeypatch):
    """Of fused layers that ran."""
    ran, fast = [], LayerForward.fast
    monkeypatch.setattr(LayerForward, "fast", lambda self, *a, **k: ran.append(self.path) or fast(self, *a, **k))
    return ran


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.share(8)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.turns(2)
def test_every_kind_of_adapter(name, layers_ran):
    ours, stock = adapted(name), adapted(name)
    assert accel.optimize(ours) is ours
    equal(ours, stock)
    with ours.disable_adapter(), stock.disable_adapter():
        equal(ours, stock)
    equal(ours, stock)
    (told,) = sites(ours, "language model").values()
    moved = name == "adaption-prompt"  # which takes its modules out of the layers while it is off
    assert told[0] == "patched" and layers_ran and bool(accel.report(ours).fallbacks) is moved
    if name in ("lora", "lora-everywhere", "dora", "loha"):  # of which the first two are understood
        assert ("peft's" in next(iter(sites(ours, "decoder layer").values()))[1]) is not name.startswith("lora")
    accel.restore(ours)
    for model in (ours, stock):  # where PEFT leaves the method of the class
        vars(model.base_model).pop("prepare_inputs_for_generation", None)
    assert not differences(ours, stock)
    assert all(map(torch.equal, answers(ours), answers(stock)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.turns(2)
def test_what_peft_found_in_an_earlier_plan_and_puts_back_is_taken_off():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", **VIRTUAL)
    ours, stock = (make("llama", num_hidden_layers=1) for _ in range(2))
    ours, stock = (peft.get_peft_model(one, config).eval() for one in (accel.optimize(ours), stock))
    ours.load_state_dict(stock.state_dict())
    equal(accel.optimize(ours), stock)
    accel.restore(ours)
    assert "prepare_inputs_for_generation" not in vars(ours.base_model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.turns(2)
def test_adapters_are_switched_merged_and_taken_off(layers_ran):
    pair = [adapted("lora"), adapted("lora")]
    for model in pair:
        torch.manual_seed(7)
        model.add_adapter("other", peft.LoraConfig(**LORA | {"target_modules": ["q_proj"]}))
    ours, stock = pair
    before = copy.deepcopy(stock)
    accel.optimize(ours)
    texts = []
    for name in ("other", "default", "other"):
        for model in pair:
            model.set_adapter(name)
        equal(ours, stock)
        texts.append(answers(ours)[1])
    assert layers_ran and not torch.equal(texts[0], texts[1])
    for step in ("merge_adapter", "unmerge_adapter"):
        for model in pair:
            getattr(model, step)()
        equal(ours, stock)
    accel.restore(ours)
    assert all(map(torch.equal, answers(ours), answers(stock)))
    accel.optimize(ours)
    whole, other = ours.merge_and_unload(), stock.merge_and_unload()
    equal(whole, other)
    accel.restore(whole)
    assert not differences(whole, other) and type(whole) is type(before.get_base_model())
    assert all(map(torch.equal, answers(whole), answers(other)))


@pytest.mark.filterwarnings("ignore")
def test_rows_with_adapters_of_their_own_and_several_at_once(layers_ran):
    """Also where weights and factors change in place, between calls."""
    pair = [adapted("lora"), adapted("lora")]
    for model in pair:
        torch.manual_seed(7)
        model.add_adapter("other", peft.LoraConfig(**LORA | {"r": 3, "target_modules": ["q_proj", "down_proj"]}))
    ours, stock = pair
    accel.optimize(ours)
    seen = [answers(stock)[1]]

    def change(what):
        for model in pair:
            what(model)
        equal(ours, stock)
        seen.append(answers(stock)[1])
        assert not torch.equal(seen[-1], seen[-2])

    ids = prompt().expand(3, -1).contiguous()
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "adapter_names": ["default", "other", "__base__"]}
    with torch.no_grad():
        got, wanted = (model(**call).logits for model in pair)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
        assert not torch.allclose(wanted[0], wanted[1]) and not torch.allclose(wanted[1], wanted[2])
        assert torch.equal(*(model.generate(**call, max_new_tokens=5, do_sample=False) for model in pair))
    change(lambda model: model.base_model.set_adapter(["default", "other"]))
    change(lambda model: [p.data.mul_(1.7) for name, p in model.named_parameters() if "lora_B" in name])
    scaled = [[one.scaling for one in model.modules() if hasattr(one, "lora_A")] for model in pair]
    change(lambda model: [one.update(other=0.3) for one in scaled[pair.index(model)]])
    assert layers_ran and not accel.report(ours).fallbacks
