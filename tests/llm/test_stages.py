"""The stages of optimizing a language model, what it is known by, and the memory that it takes."""

import gc
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import accel
from accel.libraries.models import is_causal_lm
from accel.llm.generation import self_test
from accel.llm.generation import trial_warmup as check
from accel.llm.generation.trial import fused_layers
from accel.llm.recording import window
from accel.llm.stages import language_plan
from accel.options import Options
from accel.planning.plan import create_context
from support.everything import EVERYTHING
from support.llm.families import FAMILIES, available, layers, make
from support.llm.held_out import LiveBytes
from support.llm.prequantized.models import prequantized
from support.llm.quantized import held_by


def odd(model):
    """The model with an activation that no MLP known here has."""
    next(iter(layers(model).values())).mlp.act_fn = nn.Hardtanh()
    return model


CASES = {
    "weights": (lambda: make("llama-biases"), {"weights": "int8", "activations": "int8"}),
    "weights of a model that is not understood": (lambda: odd(make("llama")), {"weights": "int8"}),
    "prequantized": (lambda: prequantized("gptq")[0], {}),
    "activations of quantized layers": (
        lambda: accel.quantize(make("llama-biases"), "int8"),
        {"activations": "int8", "kv_cache": "int8"},
    ),
}


@pytest.fixture(params=CASES, ids=list(CASES))
def case(request):
    """A model, and options for it."""
    build, options = CASES[request.param]
    return build(), Options(**options)


def state(model, tiny) -> tuple[dict, dict]:
    return tiny.snapshot(model), {name: value.clone() for name, value in model.state_dict().items()}


def same_state(before, after, tiny) -> None:
    tiny.assert_same_state(before[0], after[0])
    assert before[1].keys() == after[1].keys()
    assert all(torch.equal(value, after[1][name]) for name, value in before[1].items())


def test_every_stage_looks_only_and_its_patches_are_undone_alone(case, tiny):
    model, options = case
    first = state(model, tiny)
    stages, context = language_plan(model, create_context(options).for_model()).pending
    before, done = first, []
    for stage in stages:
        staged = stage(model, context)
        same_state(before, state(model, tiny), tiny)
        for patch in staged.patches:
            patch.apply()
        for patch in reversed(staged.patches):
            patch.undo()
        same_state(before, state(model, tiny), tiny)
        for patch in staged.patches:
            patch.apply()
        before, done = state(model, tiny), [*done, *staged.patches]
    assert len(done) > 3 and held_by(model)
    for patch in reversed(done):
        patch.undo()
    same_state(first, state(model, tiny), tiny)


def test_what_is_a_causal_lm():
    from transformers import AutoModel, CLIPTextConfig, CLIPTextModel, T5Config, T5ForConditionalGeneration

    model = make("llama")
    assert is_causal_lm(model) and is_causal_lm(make("gpt2"))
    assert not is_causal_lm(AutoModel.from_config(model.config)) and not is_causal_lm(nn.Linear(2, 2))
    text = CLIPTextConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    assert not is_causal_lm(CLIPTextModel(text))
    both = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20, decoder_start_token_id=0)
    assert not is_causal_lm(T5ForConditionalGeneration(both))


FAST = ["llama", "gemma2", "bloom", "mixtral", "phi3-longrope", *(["gpt2", "falcon-grouped", "granite"] * EVERYTHING)]
OTHERS = [family.name for family in FAMILIES if family.expected != "fast"][: 4 if EVERYTHING else 1]


def tensors() -> list[torch.Tensor]:
    """All that are not set aside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects do not like to be asked what they are
        return [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]


@pytest.mark.usefixtures("few_positions")
@pytest.mark.parametrize("name", [*FAST, *OTHERS])
@pytest.mark.share(4)
def test_optimizing_keeps_nothing_of_what_it_looked_at(name, few_objects):
    """A record of an 8B model is 200 MB; in a circle of references it stayed for many calls."""
    model = make(name)
    gc.collect()
    known = {id(tensor) for tensor in tensors()}
    gc.disable()
    try:
        accel.optimize(model)
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        left = sum(one.nbytes for one in tensors() if id(one) not in known | own)
    finally:
        gc.enable()
    assert left <= 1024, f"{left} bytes"


# By the name that each has for its depth.
MEASURED = (
    ("llama", "num_hidden_layers"),
    ("gemma2", "num_hidden_layers"),
    ("phi3", "num_hidden_layers"),
    ("gpt2", "n_layer"),
    ("bloom", "n_layer"),
)
OPTIONS = ({}, {"kv_cache": "int8"})
DEPTHS = (3, 7)
TOKEN_BYTES = 2 * 4 * 16 * 4  # keys and values of a token of at most 4 heads of 16 in fp32
SMALL = 512  # bytes a layer: places of keys and values, scales


@pytest.fixture
def few_positions(monkeypatch):
    """A window is looked for among a million positions on the CPU, whatever the model: it would hide all else."""
    monkeypatch.setattr(window, "QUERIES", (3, 77))


@pytest.fixture
def warmups(monkeypatch):
    """Those that ran, as they do on a GPU but for the compiler."""
    runs = []

    @contextmanager
    def warming_up(forward, lengths, longer=()):
        runs.append(lengths)
        with fused_layers(forward):
            check._run_through(forward, lengths, longer)
        yield

    for module in (self_test, check):
        monkeypatch.setattr(module, "warming_up_trial", warming_up)
    return runs


def model(family: str, **depth):
    if not available(family):
        pytest.skip(f"this transformers has no {family}")
    return make(family, **depth)


@pytest.mark.usefixtures("few_positions")
@pytest.mark.parametrize(
    ("family", "name", "options"),
    [(*family, options) for i, family in enumerate(MEASURED) for j, options in enumerate(OPTIONS)
     if EVERYTHING or (i + j) % 2 == 0],
    ids=str,
)  # fmt: skip
@pytest.mark.share(16)
@pytest.mark.turns(4)
def test_a_deep_model_needs_no_more_than_a_shallow_one(family, name, options, warmups):
    """A record of every layer, or room for keys and values in every layer while only one of a kind runs, is more."""
    peaks = []
    for depth in DEPTHS:
        one = model(family, **{name: depth})
        with LiveBytes(one) as live:
            accel.optimize(one, **options)
        peaks.append(live.peak)
        assert set(accel.report(one).fallbacks) == set() and "forward" in vars(one)
    assert len(warmups) >= 2 * (1 + bool(options))
    scores = 2 * 7 * TOKEN_BYTES if options else 0  # by which it is judged what may be rounded
    assert peaks[1] - peaks[0] <= (DEPTHS[1] - DEPTHS[0]) * (SMALL + scores), peaks
