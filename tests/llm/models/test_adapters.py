"""Models of PEFT, by every kind of adapter: they give what stock gives, switched and merged too, and are restored."""

import copy

import pytest
import torch

import accel
from accel.llm.runtime.layer import LayerForward
from support.llm.families import make, prompt
from support.patched import sites
from support.state import differences

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
UNKNOWN = {"adaption-prompt": "what follows the attention is not the sum of it"}  # of which the report says why


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
def layers(monkeypatch):
    """Of fused layers that ran."""
    ran, fast = [], LayerForward.fast
    monkeypatch.setattr(LayerForward, "fast", lambda self, *a, **k: ran.append(self.path) or fast(self, *a, **k))
    return ran


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.share(3)
@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_adapter(name, layers):
    ours, stock = adapted(name), adapted(name)
    assert accel.optimize(ours) is ours
    equal(ours, stock)
    with ours.disable_adapter(), stock.disable_adapter():
        equal(ours, stock)
    equal(ours, stock)
    (told,) = sites(ours, "language model").values()
    if name in UNKNOWN:
        assert told[0] == "skipped" and UNKNOWN[name] in told[1]
    else:
        assert told[0] == "patched" and layers and accel.report(ours).fallbacks == []
    accel.restore(ours)
    for model in (ours, stock):  # where PEFT leaves the method of the class
        vars(model.base_model).pop("prepare_inputs_for_generation", None)
    assert not differences(ours, stock)
    assert all(map(torch.equal, answers(ours), answers(stock)))


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_switched_merged_and_taken_off(layers):
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
    assert layers and not torch.equal(texts[0], texts[1])
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
