"""Models that see images: the tower that writes is fused, also in the call that is given an image."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import accel
from accel.encoders.stack import EncoderLayerForward
from accel.llm.generation import arguments, trial
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.layer_forward import LayerForward
from accel.llm.generation.layer_inputs import NOT_CAUSAL
from accel.llm.kv_cache.cache import OURS
from accel.llm.recording.recorder import decoder_layers
from support.llm.multimodal import MODELS, make
from support.llm.outputs import flat, generate, same
from support.noted import noted

NEW = 4
PATCHED = {"mllama": 3}  # of layers, where some are not understood
# Of several stacks; which adds a bias of its own for rows and columns; which is given a mask of scores.
STOCK_TOWERS = ("mllama", "got-ocr2", "qwen2-audio")


@pytest.fixture
def steps(monkeypatch):
    """How often a fused layer ran, as a list to read the length of."""
    return noted(monkeypatch, LayerForward, "fast", lambda self, *args, **kwargs: self.path)


def pair(name: str):
    model, text, image = make(name)
    stock = copy.deepcopy(model)
    return accel.optimize(model), stock, text, image


def written(model, inputs: dict, **call) -> dict:
    given = {key: value for key, value in inputs.items() if key not in ("input_ids", "attention_mask")}
    call = {"max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True} | given | call
    return generate(model, inputs["input_ids"], inputs.get("attention_mask"), **call)


def vision_depth(model) -> int:
    config = model.config.vision_config
    return getattr(config, "num_hidden_layers", None) or config.depth


def fallbacks(model) -> dict[str, int]:
    return {reason: calls for _, reason, calls in accel.report(model).fallbacks}


@pytest.fixture
def tower(monkeypatch):
    """As `steps`, of what sees."""
    return noted(monkeypatch, EncoderLayerForward, "fast", lambda self, *args, **kwargs: self.path)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.share(12)
@pytest.mark.turns(4)
def test_text_and_image(name, steps, tower):
    ours, stock, text, image = pair(name)
    sites = [site for site in accel.report(ours).sites if site[1] == "decoder layer"]
    depth = [status for _, _, status, _ in sites].count("patched")
    assert depth == PATCHED.get(name, ours.config.get_text_config().num_hidden_layers)

    steps.clear()
    same(written(ours, text), written(stock, text))
    assert len(steps) == NEW * depth and not fallbacks(ours)

    mask = torch.ones_like(text["input_ids"])
    mask[1, :2] = 0
    steps.clear()
    same(written(ours, text | {"attention_mask": mask}), written(stock, text | {"attention_mask": mask}))
    assert len(steps) == NEW * depth  # all of it

    steps.clear()
    tower.clear()
    same(written(ours, image), written(stock, image))
    read = {"mllama": 0, "hunyuan-vl": NEW - 1}.get(name, NEW)  # others' pictures are seen apart from the text
    assert len(steps) == read * depth and NOT_CAUSAL not in fallbacks(ours)
    assert len(tower) == (0 if name in STOCK_TOWERS else vision_depth(ours))

    accel.restore(ours)
    assert torch.equal(*(model(**image).logits for model in (ours, stock)))


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", ["qwen2.5-vl", "paligemma", "gemma3"])
def test_other_ways_of_writing_after_an_image(name):
    ours, stock, text, image = pair(name)
    mask = torch.ones_like(image["input_ids"])
    for call in ({"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}, {"attention_mask": mask}):
        same(written(ours, image, **call), written(stock, image, **call))
    same(written(ours, text), written(stock, text))  # nothing of the image is left


@pytest.mark.turns(2)
@pytest.mark.parametrize(("name", "turns"), [("qwen3-vl", 1), ("llava", 2), ("gemma3", 2), ("lfm2-vl", 2)])
@pytest.mark.parametrize("hidden", [0, 2])
@pytest.mark.share(2)
def test_all_that_a_call_with_an_image_gives_and_leaves(name, turns, hidden, steps):
    """Of one image after another over one cache, as in a chat; the second row begins with padding."""
    ours, stock, _, image = pair(name)
    length = image["input_ids"].shape[1]
    shown: list[dict] = []
    for model in (ours, stock):
        steps.clear()
        cache, left = None, []
        for turn in range(turns):
            mask = torch.ones(2, (turn + 1) * length, dtype=torch.long)
            mask[1, :hidden] = 0
            output = model(**image, attention_mask=mask, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            stored = [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "keys", None) is not None]
            left += [output.logits[:, hidden:], output.get("image_hidden_states"), output.get("rope_deltas")]
            left += [[t[:, :, hidden:].clone() for t in one] for one in stored]
        deltas = [vars(module)["rope_deltas"] for module in model.modules() if "rope_deltas" in vars(module)]
        shown.append(flat([left, deltas, type(output)(logits=output.logits[:, -1])]))
        assert len(steps) == (model.config.get_text_config().num_hidden_layers * turns if model is ours else 0)
    same(*shown)
    assert not fallbacks(ours)


def test_what_no_text_gives_its_layers_is_found_out_once(steps):
    """Layers that see an image apart from the text, in every step: from the second call on the cache stays stock's."""
    ours, stock, text, image = pair("mllama")
    steps.clear()
    for ran in (1, 2):
        same(written(ours, image), written(stock, image))
        found = fallbacks(ours)
        assert not steps and sum(found.values()) == ran * NEW and all("as no text gives it" in one for one in found)
    cache = ours(**image, use_cache=True).past_key_values
    assert not any(type(layer) in OURS for layer in cache.layers)
    same(written(ours, text), written(stock, text))
    assert steps


def test_a_prompt_whose_tokens_see_each_other_without_a_picture():
    """And a step behind it without position_ids, which the model counts from one."""
    ours, stock, text, _ = pair("paligemma")
    mask = torch.ones_like(text["input_ids"])
    mask[1, :2] = 0
    given = text | {"attention_mask": mask, "token_type_ids": torch.zeros_like(mask)}
    same(written(ours, given), written(stock, given))
    shown = []
    for model in (ours, stock):
        begun = model(**{name: one[:1] for name, one in given.items()}, use_cache=True)
        step = {"input_ids": given["input_ids"][:1, :1], "attention_mask": mask[:1, :1].expand(1, mask.shape[1] + 1)}
        shown.append({"logits": model(**step, past_key_values=begun.past_key_values).logits})
    same(*shown)


def by_hand(model, image: dict, positions: bool) -> list[torch.Tensor]:
    """Logits of a loop of calls after an image, as users write it."""
    output, found = model(**image, use_cache=True), []
    length = image["input_ids"].shape[1]
    for number in range(3):
        given = {"position_ids": torch.full((3, 2, 1), length + number - 2)} if positions else {}
        ids = torch.full((2, 1), 5 + number)
        output = model(input_ids=ids, past_key_values=output.past_key_values, use_cache=True, **given)
        found.append(output.logits)
    return found


@pytest.mark.turns(2)
@pytest.mark.parametrize(("name", "positions"), [("qwen2-vl", False), ("qwen2-vl", True), ("aya-vision", False)])
def test_calls_by_hand(name, positions, steps):
    """A model that remembers how far an image moved its positions goes on from there. Sizes that a tower ignores are
    handed on to the layers, which ignore them too.
    """
    ours, stock, _, image = pair(name)
    image |= {"image_sizes": torch.tensor([[16, 16]] * 2)} if name == "aya-vision" else {}
    steps.clear()
    mine, theirs = by_hand(ours, image, positions), by_hand(stock, image, positions)
    same(dict(enumerate(mine)), dict(enumerate(theirs)))
    assert len(steps) == 4 * ours.config.get_text_config().num_hidden_layers and not fallbacks(ours)


def test_marks_that_say_something_are_not_passed_over(steps):
    """Of a text whose words are marked as an image's: they see each other. The second time without asking."""
    ours, stock, text, _ = pair("gemma3")
    ids = text["input_ids"]
    marks = torch.zeros_like(ids)
    plain = ours(input_ids=ids, token_type_ids=marks, use_cache=True).logits
    assert not fallbacks(ours)
    marks[:, 3:7] = 1
    steps.clear()
    for _ in range(2):
        mine, theirs = (m(input_ids=ids, token_type_ids=marks, use_cache=True).logits for m in (ours, stock))
        same({"logits": mine}, {"logits": theirs})
    assert float((mine - plain).abs().max()) > 1e-2 and len(steps) == 4 and not fallbacks(ours)


@pytest.mark.turns(2)
def test_parts_of_positions_that_are_alike_are_one(monkeypatch):
    """Of a text, where a picture's would turn halves of a head otherwise."""
    ours, stock, text, _ = pair("hunyuan-vl")
    ran = noted(monkeypatch, DecoderForward, "run", lambda self, *args: self.path)
    same(written(ours, text), written(stock, text))
    assert len(ran) == NEW


@pytest.mark.turns(4)
def test_what_generate_leaves_in_the_model_changes_nothing():
    """Layers stay bound to their weights, as graphs would stay captured."""
    ours, _, text, image = pair("qwen2-vl")
    forward = vars(ours)["forward"]
    written(ours, text)
    left, seen = ours.model.rope_deltas, forward.seen
    written(ours, image)
    assert ours.model.rope_deltas is not left and forward.seen is seen
    with torch.no_grad():
        ours.model.language_model.layers[0].mlp.act_fn = nn.ReLU()
    written(ours, text)
    assert forward.seen is not seen


def test_a_hook_on_the_tower_that_sees_leaves_the_other_fast():
    """As users look at features of images: it is called by the prompt alone, once."""
    ours, stock, text, image = pair("llava")
    shown = []
    for model in (ours, stock):
        layer = next(m for path, m in model.named_modules() if path.endswith("layers.0") and "vision" in path)
        layer.register_forward_hook(lambda _, args, output: shown.append(args[0]))
    same(written(ours, image), written(stock, image))
    assert len(shown) == 2
    torch.testing.assert_close(*shown)
    same(written(ours, text), written(stock, text))
    assert list(fallbacks(ours)) == ["model.vision_tower.encoder.layers.0: forward hooks"]


def test_the_tower_that_writes_is_found_wherever_it_is():
    """The first list of the right length is another, or the last is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from support.llm.miniatures.family import SIZES, TOKENS

    for before in (True, False):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **TOKENS)).eval()
        idle = nn.ModuleList(nn.Linear(4, 4) for _ in range(SIZES["num_hidden_layers"]))
        children = model._modules
        if before:
            model._modules = {"ears": idle, **children}
        else:
            model.ears = idle
        assert decoder_layers(model)[0] == "model.layers"
        stock = copy.deepcopy(model)
        accel.optimize(model)
        ids = torch.arange(3, 12)[None]
        same(generate(model, ids, None), generate(stock, ids, None))
        assert not fallbacks(model)


COMPILING = type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no such thing"), COMPILING("no such thing")], ids=repr)
def test_an_error_that_says_nothing_of_what_a_model_takes_is_told(error, monkeypatch):
    """Prompts without a mask would run stock for a reason that is not true."""

    def stock(**piece):
        return SimpleNamespace(logits=torch.zeros(1, 3, 4))

    def fast(**piece):
        raise error

    module = nn.ModuleDict({"layers": nn.ModuleList()})
    module.config = None
    given = {"reference": stock, "fast": fast, "experts": [], "routers": [], "given_cache": lambda cache: {}}
    given |= {"partial": False, "ranks": None}
    given["embeddings"] = lambda: torch.zeros(1)
    monkeypatch.setattr(trial, "new_cache", lambda model: None)
    with pytest.raises(type(error), match="no such thing"):
        arguments._agrees(SimpleNamespace(module=module, stack="layers", layers=[], **given), [{}])
