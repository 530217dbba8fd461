"""Whatever holds models: they are found inside, give what stock gives, and are as before after `restore`."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import BertConfig, BertModel
from transformers.pipelines import SUPPORTED_TASKS

import accel
from accel.fusion.loop import DenoisingLoop
from accel.libraries.models import is_causal_lm, is_pipeline
from accel.patching.fast_forward import FastForward
from accel.planning.targets import holders_in, models_in, parts_in
from support.llm.calls import tokenizer
from support.llm.families import make, prompt
from support.noted import noted
from support.objects.pipeline_tasks import TASKS
from support.objects.targets import TARGETS
from support.patched import fast_forwards, sites
from support.state import assert_same_state, snapshot


@pytest.fixture
def alone():
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def calls(monkeypatch):
    """How often forwards of ours were called."""
    return noted(monkeypatch, FastForward, "__call__", lambda self, *args, **kwargs: self.path)


@pytest.fixture
def loops(monkeypatch):
    """Those that pipelines began."""
    found, begin = [], DenoisingLoop.begin
    monkeypatch.setattr(DenoisingLoop, "begin", lambda self, schedulers=(): found.append(begin(self, schedulers)))
    return found


def state(obj) -> list[dict]:
    """Of all that may be changed: models and what is around them."""
    modules = {id(one): one for one in (*models_in(obj).values(), *holders_in(obj)) if isinstance(one, nn.Module)}
    others = [one for one in (*parts_in(obj).values(), *holders_in(obj)) if not isinstance(one, nn.Module)]
    return [*(snapshot(module) for module in modules.values()), *(dict(vars(one)) for one in others)]


def same_state(before: list[dict], after: list[dict]) -> None:
    for one, other in zip(before, after, strict=True):
        if any(isinstance(key, tuple) for key in one):
            assert_same_state(one, other)
        else:
            assert one.keys() == other.keys()  # pipelines count their calls, schedulers make timesteps
            kept = {name: value for name, value in one.items() if not isinstance(value, int | torch.Tensor)}
            assert not [name for name, value in kept.items() if other[name] is not value]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.share(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.turns(4)
def test_what_holds_models(name, alone, calls, loops):
    count, make_target = TARGETS[name]
    (obj, call), (stock, _) = make_target(), make_target()
    with torch.no_grad():
        wanted = call(stock)
        call(obj)  # some of it is made by the first call
        before = state(obj)
        assert accel.optimize(obj) is obj
        models = models_in(obj)
        assert len(models) == count and all(map(fast_forwards, models.values())), list(models)
        whole = sites(obj, "language model")
        assert all(whole[path][0] == "patched" for path, model in models.items() if is_causal_lm(model))
        calls.clear()
        for got, one in zip(call(obj), wanted, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-4)
        assert calls and accel.report(obj).fallbacks == []
        assert len(loops) == sum(map(is_pipeline, parts_in(obj).values()))
        assert all(any(site[0].startswith(path) for site in accel.report(obj).sites) for path in models)
        accel.restore(obj)
        same_state(before, state(obj))
        assert all(torch.equal(got, one) for got, one in zip(call(obj), wanted, strict=True))
    assert "not optimized" in str(accel.report(obj))


class Own(nn.Module):
    def __init__(self, *held):
        super().__init__()
        self.held = nn.ModuleList(held)


def unloaded():
    from diffusers import StableDiffusionXLModularPipeline

    return StableDiffusionXLModularPipeline()


def scripted():
    return torch.jit.script(nn.Linear(2, 2))


def without_weights():
    with torch.device("meta"):
        return make("llama")


STOCK_CALLS = ("no cache", "attention_mask is given")  # as of scores, of sound
NOTHING = {
    "None": (lambda: None, TypeError, "a NoneType, which holds no model"),
    "name": (lambda: "meta-llama/Llama-3", TypeError, "load the model from 'meta-llama/Llama-3', and give that"),
    "path": (lambda: Path("folder"), TypeError, "load the model from 'folder', and give that"),
    "tokenizer": (tokenizer, TypeError, "which holds no model of diffusers or transformers; give a model or pipeline"),
    "configuration": (lambda: make("llama").config, TypeError, "LlamaConfig, which holds no model"),
    "class": (lambda: type(make("llama")), TypeError, "the class LlamaForCausalLM: give an instance of it"),
    "method": (lambda: make("llama").generate, TypeError, "a method: give the LlamaForCausalLM whose it is"),
    "module of torch": (lambda: nn.Linear(2, 2), TypeError, "a torch.nn.modules.linear.Linear, which holds no model"),
    "module of his own": (lambda: Own(nn.Linear(2, 2)), TypeError, "Own, which holds no model"),
    "weights": (lambda: make("llama").state_dict(), TypeError, "OrderedDict, which holds no model"),
    "compiled": (lambda: torch.compile(make("llama")), TypeError, "what torch.compile returned: give the model"),
    "scripted": (scripted, TypeError, "a scripted module: give the model that it was made from"),
    "empty list": (list, ValueError, "this list is empty: give a model or pipeline"),
    "empty dictionary": (dict, ValueError, "this dict is empty"),
    "list of texts": (lambda: ["a", "b"], TypeError, "a list, which holds no model"),
    "pipeline without models": (unloaded, ValueError, "holds no model yet: load its components first"),
    "no weights": (without_weights, ValueError, "weights of this LlamaForCausalLM are on the meta device"),
}


@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.share(2)
@pytest.mark.filterwarnings("ignore")
def test_what_holds_none_is_told_what_to_give(name):
    made, kind, told = NOTHING[name]
    obj = made()
    before = dict(getattr(obj, "__dict__", {}))
    with pytest.raises(kind, match=re.escape(told)) as raised:
        accel.optimize(obj)
    assert "\n" not in str(raised.value)
    after = getattr(obj, "__dict__", {})
    assert before.keys() == after.keys() and all(after[key] is value for key, value in before.items())
    if name != "no weights":
        for function in (accel.restore, accel.report, accel.verify):
            with pytest.raises(kind, match=re.escape(told)):
                function(obj)


def sharded_whole(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def sharded_by_layers(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("shard", [sharded_whole, sharded_by_layers])
@pytest.mark.share(1)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_fsdp_divides_stays_stock(shard, alone):
    obj, ids = shard(make("llama").eval()), prompt()
    with torch.no_grad():
        wanted = obj(input_ids=ids).logits
        accel.optimize(obj)
        ((_, rule, status, reason),) = accel.report(obj).sites
        assert (rule, status) == ("model", "skipped") and reason.startswith("FSDP divides its weights among processes")
        assert torch.equal(obj(input_ids=ids).logits, wanted) and not fast_forwards(obj)
        assert accel.verify(obj, input_ids=ids).passed
        accel.restore(obj)
        with pytest.raises(accel.errors.SkippedSite, match="FSDP divides its weights"):
            accel.optimize(obj, strict=True)
    assert "_accel_plan" not in vars(obj) and accel.report(obj).sites == []


def test_a_model_without_weights_among_others_stays_stock():
    """As scripts free a text encoder whose embeddings they have."""
    pair = {"encoder": without_weights(), "writer": make("llama")}
    accel.optimize(pair)
    told = {path: reason for path, rule, _, reason in accel.report(pair).sites if rule == "model"}
    assert told == {"encoder": "its weights are on the meta device, without values"} and fast_forwards(pair["writer"])
    accel.restore(pair)


def test_an_encoder_that_compressed_tensors_has_yet_to_dequantize_stays_stock_until_then():
    def hook(module, args):
        handle.remove()

    hook.__module__ = "compressed_tensors.compressors"
    model = BertModel(BertConfig(vocab_size=9, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)).eval()
    handle = model.register_forward_pre_hook(hook)
    for status in ("skipped", "patched"):
        told = {row[2] for row in accel.report(accel.optimize(model)).sites}
        assert told == {status}
        model(torch.tensor([[0]]))


def test_models_that_are_swapped_are_restored_too():
    held, lone = Own(make("llama")), make("llama")
    first = held.held[0]
    accel.optimize([held, lone])
    held.held[0] = make("llama")
    assert not fast_forwards(held) and fast_forwards(first)
    accel.optimize(held)
    assert fast_forwards(held.held[0])
    swapped, held.held = held.held[0], nn.ModuleList()
    accel.restore(held)
    assert not (fast_forwards(first) or fast_forwards(swapped)) and fast_forwards(lone)
    accel.restore(lone)
    assert set(vars(held)) == set(vars(Own())) and not fast_forwards(lone)


def test_a_model_that_two_use_stays_fast_for_the_other():
    model = make("llama")
    one, other = Own(model), Own(model)
    accel.optimize(one)
    accel.optimize(other)
    one.held = nn.ModuleList()
    with pytest.warns(UserWarning, match="an optimized Own uses it"):
        accel.restore(one)
    assert fast_forwards(model)
    accel.restore(other)
    assert not fast_forwards(model)


def test_what_is_around_a_model_is_verified_and_quantized():
    wrapped, ids = nn.DataParallel(make("llama")), prompt()
    held = {"a": [wrapped]}
    accel.optimize(held)
    assert accel.verify(wrapped).passed and accel.verify(wrapped, input_ids=ids).passed
    assert accel.verify(held).agreement is not None  # the one model in it
    two = [held, make("llama", seed=3)]
    with pytest.raises(TypeError, match="a list is not called: verify what it holds one by one"):
        accel.verify(accel.optimize(two))
    with pytest.raises(TypeError, match="not a list, which holds 2 of them"):
        accel.quantize(two, "int8")
    accel.restore(two)
    stock = copy.deepcopy(wrapped.module)
    assert accel.quantize(held, "int8") is held
    assert not torch.equal(wrapped(input_ids=ids).logits, stock(input_ids=ids).logits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.turns(2)
def test_blocks_of_a_modular_pipeline_are_copied_without_its_models():
    pipe, call = TARGETS["modular pipeline"][1]()
    with torch.no_grad():
        wanted = call(pipe)
        accel.optimize(pipe)
        other = pipe.blocks.init_pipeline()
        assert not models_in(other)
        other.update_components(**pipe.components)
        assert torch.equal(call(other)[0], call(pipe)[0])
        twin = copy.deepcopy(pipe)
        accel.restore(pipe)
        assert not any(map(fast_forwards, models_in(pipe).values())) and torch.equal(call(pipe)[0], wanted[0])
        assert all(map(fast_forwards, models_in(twin).values()))
        assert torch.equal(call(accel.restore(twin))[0], wanted[0])


def agree(ours, stock) -> None:
    """What a pipeline gives: numbers, texts, arrays and images, in lists and dictionaries."""
    if isinstance(stock, dict):
        assert ours.keys() == stock.keys()
        ours, stock = [ours[name] for name in stock], list(stock.values())
    if isinstance(stock, list | tuple):
        assert len(ours) == len(stock)
        for mine, theirs in zip(ours, stock, strict=True):
            agree(mine, theirs)
    elif isinstance(stock, float | torch.Tensor | np.ndarray | np.generic):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(stock), rtol=1e-4, atol=1e-4)
    elif stock is not None and hasattr(stock, "tobytes"):
        assert ours.tobytes() == stock.tobytes()
    else:
        assert type(ours) is type(stock) and ours == stock


# What transformers itself cannot run in its oldest version, and why.
LATER = {
    "image-segmentation": "transformers 5.17 reads this processor's module only with torchvision",
    "text-to-audio": "transformers 5.17 casts tokens, which are no features, to the model's dtype",
}


@pytest.mark.parametrize("name", sorted(TASKS.keys() & SUPPORTED_TASKS.keys()))
@pytest.mark.share(8)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.turns(2)
def test_every_task_of_the_pipelines_of_transformers(name, calls):
    def answer():
        torch.manual_seed(0)
        with torch.no_grad():
            return call(pipe)

    try:
        pipe, call = TASKS[name]()
        wanted, before = answer(), snapshot(pipe.model)
    except (ImportError, TypeError) as error:
        if name not in LATER:
            raise
        pytest.skip(f"{LATER[name]}: {error}"[:200])
    assert accel.optimize(pipe) is pipe and fast_forwards(pipe.model)
    agree(answer(), wanted)
    assert calls and {reason for _, reason, _ in accel.report(pipe).fallbacks} <= set(STOCK_CALLS)
    accel.restore(pipe)
    assert_same_state(before, snapshot(pipe.model))
    agree(answer(), wanted)


def test_no_task_is_forgotten():
    assert SUPPORTED_TASKS.keys() <= TASKS.keys()
