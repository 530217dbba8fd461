"""Deep models amplify rounding: logits that are further off for that alone are no error, and errors are refused."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MambaConfig

import accel
from accel.bench.llm.tiny import build_tiny
from accel.llm.generation import arguments, self_test, trial
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.mixed import MixedForward
from accel.llm.generation.trial import fused_layers, fused_logits, pieces_of, stock_logits
from accel.llm.moe.experts import ExpertsForward
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.resting import resting
from accel.llm.runtime.layer import BoundLayer
from accel.quantization.module import QuantizedLinear
from accel.tolerances import DRIFT, LOGITS, MOST_MOVED, TIMES_STOCK
from support.llm.families import make, padded
from support.llm.near_ties import model_of
from support.noted import noted
from support.precision import off

LAYERS = 10
LENGTHS = (9, 1, 1, 3)


def llama(layers, dtype=torch.bfloat16):
    """(optimized, stock)."""
    stock = model_of("llama", dtype, num_hidden_layers=layers)
    return accel.optimize(copy.deepcopy(stock), cpu="fuse"), stock


def told(model) -> str:
    """What the report says of the whole model."""
    return next(reason for _, rule, _, reason in accel.report(model).sites if rule == "language model")


@pytest.fixture(scope="module")
def pair():
    return llama(LAYERS)


@pytest.fixture(scope="module")
def deep(pair):
    return vars(pair[0])["forward"]


@pytest.fixture(scope="module")
def shallow():
    return vars(llama(2)[0])["forward"]


@pytest.fixture(scope="module")
def wide():
    """A deep one in float32."""
    return vars(llama(LAYERS, torch.float32)[0])["forward"]


def tried(forward):
    """What another trial finds; the forward keeps its own."""
    before = forward.convention
    try:
        return self_test.find_convention(forward)
    finally:
        forward.convention = before


def refused(forward) -> str:
    with pytest.raises(NotUnderstood, match="the whole model computes something else than its parts") as reason:
        tried(forward)
    return str(reason.value)


def test_a_deep_model_is_fused_whose_rounding_is_beyond_the_bound(pair, deep, shallow):
    assert type(deep) is DecoderForward and "CUDA graphs wait" in told(pair[0])
    with resting(deep.module):
        wanted, _ = stock_logits(deep, LENGTHS)
        with fused_layers(deep):
            got = fused_logits(deep, LENGTHS)
    assert LOGITS[torch.bfloat16] < wanted.off(got) <= MOST_MOVED
    assert 0 < wanted.moves() < wanted.row_off(got) * DRIFT < MOST_MOVED and wanted.agrees(got)
    assert not wanted.agrees(got + DRIFT * (got - wanted.logits))
    # All that trying finds out of a model of two layers is found out of it.
    assert deep.convention == shallow.convention and deep.convention.pads_prompts and deep.convention.counts_positions


def test_it_is_as_exact_as_stock(pair):
    ours, stock = pair
    ids, mask = padded((9, 5))
    models = (ours, stock, copy.deepcopy(stock).float())
    logits, near, exact = (model(ids, attention_mask=mask, use_cache=True).logits[mask.bool()] for model in models)
    assert not torch.equal(logits, near) and not accel.report(ours).fallbacks
    assert off(logits, exact) <= TIMES_STOCK * off(near, exact)


def test_stock_runs_once_more_for_deep_models_alone(deep, shallow, monkeypatch):
    owners = {"reference": DecoderForward, "with_rounding": trial, "differing_part": self_test}
    calls = {name: noted(monkeypatch, owner, name, lambda *_, **__: True) for name, owner in owners.items()}

    def of(forward):
        for each in calls.values():
            each.clear()
        tried(forward)
        return {name: len(each) for name, each in calls.items()}

    once, more = of(shallow), of(deep)
    assert once["with_rounding"] == once["differing_part"] == 0 < once["reference"] < more["reference"]
    assert more["with_rounding"] >= 1 == more["differing_part"]


@pytest.mark.turns(2)
def test_stock_runs_again_as_it_ran_before(monkeypatch):
    """Without noise it gives the same to the bit, whatever has been fused since; quantized products are torch's own."""
    trying, reference, experts = self_test._convention, DecoderForward.reference, ExpertsForward.fast
    found, exact = [], []

    def look(self, **given):
        exact.extend(module.exact for module in self.module.modules() if type(module) is QuantizedLinear)
        return reference(self, **given)

    def convention(forward, lengths, wanted, alone, output):
        with fused_layers(forward), monkeypatch.context() as patch:
            patch.setattr(DecoderForward, "reference", look)
            patch.setattr(ExpertsForward, "fast", lambda *given: 2 * experts(*given))
            found.extend((wanted.moves(), alone.moves()))
        return trying(forward, lengths, wanted, alone, output)

    def unexpected(error):
        raise error

    monkeypatch.setattr(self_test, "_convention", convention)
    monkeypatch.setattr(trial, "reason_of", unexpected)
    with monkeypatch.context() as patch:
        patch.setattr(trial, "LAYER_NOISE", 0.0)
        accel.optimize(make("mixtral", torch.bfloat16))
        accel.optimize(make("llama", torch.bfloat16), weights="int8")
    assert found == [0.0] * 4 and exact and all(exact)
    accel.optimize(make("mixtral", torch.bfloat16))
    assert min(found[4:]) > 0


# -- Errors, each in a part that was compared with stock's before and was right --

RUN, LOGITS_OF, LAYER = DecoderForward.run, DecoderForward.logits_of, BoundLayer.__call__


def unmasked(self, store, tokens, positions, mask, keep):
    return RUN(self, store, tokens, positions, None, keep)


def masked_one_late(self, store, tokens, positions, mask, keep):
    return RUN(self, store, tokens, positions, mask.roll(1, 1), keep)


def steps_one_late(self, store, tokens, positions, mask, keep):
    return RUN(self, store, tokens, positions + (store.length > 0), mask, keep)


def times(factor):
    return lambda self, *given: factor * LOGITS_OF(self, *given)


def with_share(share, place):
    """Of what the layer at this place adds."""

    def layer(self, kernels, step, x, kwargs):
        y = LAYER(self, kernels, step, x, kwargs)
        return x + share * (y - x) if self.spec.attention.index == place else y

    return layer


OFF = r"logits are off by \d\.\de[+-]\d+, a row of them by \d\.\de[+-]\d+, and rounding moves stock's by \d\.\de-\d+"
STEPS = "steps after a prompt hang on how much the cache holds"
ERRORS = {
    "no mask": ((DecoderForward, "run", unmasked), OFF),
    "mask": ((DecoderForward, "run", masked_one_late), OFF),
    "positions": ((DecoderForward, "run", steps_one_late), f"{OFF}|{STEPS}"),
    "first layer": ((BoundLayer, "__call__", with_share(0, 0)), OFF),
    "head": ((DecoderForward, "logits_of", times(1.2)), OFF),
}
# As large as rounding is where layers amplify it: no bound of logits tells one from the other.
SMALL = {
    "last layer": (
        (BoundLayer, "__call__", with_share(0.5, LAYERS - 1)),
        rf"{OFF}; model\.layers\.{LAYERS - 1} gives something else than stock's of the same input",
    ),
    "factor": ((DecoderForward, "logits_of", times(1.05)), f"{OFF}; logits are others where the last layer gives what"),
}


@pytest.mark.share(1)
@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("error", "model"),
    [(error, "shallow") for error in ERRORS] + [(error, one) for error in ERRORS | SMALL for one in ("deep", "wide")],
)
def test_errors(error, model, request, monkeypatch):
    """Rounding in float32 is far below the bound: there nothing more is let pass than in a model of one layer."""
    (wrong, reason), forward = (ERRORS | SMALL)[error], request.getfixturevalue(model)
    monkeypatch.setattr(*wrong)
    assert re.search(reason.partition(";")[0] if model == "wide" else reason, refused(forward))


def test_the_report_tells_of_an_error(monkeypatch):
    monkeypatch.setattr(*ERRORS["no mask"][0])
    ours, _ = llama(LAYERS)
    assert re.search(OFF, told(ours)) and type(vars(ours).get("forward")) is not DecoderForward


def test_what_else_a_deep_model_takes_is_found_by_the_same_bound(deep, monkeypatch):
    pieces = list(pieces_of(deep, arguments.PIECES))
    with resting(deep.module):
        assert arguments._agrees(deep, pieces)
        with monkeypatch.context() as patch:
            patch.setattr(trial, "LAYER_NOISE", 0.0)
            patch.setattr(trial, "AS_GOOD", 0.0)
            assert not arguments._agrees(deep, pieces)
        for error in ("no mask", "mask", "positions", "first layer"):
            with monkeypatch.context() as patch:
                patch.setattr(*ERRORS[error][0])
                assert not arguments._agrees(deep, pieces), error


@pytest.mark.turns(4)
def test_some_layers_of_a_deep_model(monkeypatch):
    def model():
        kinds = [[["global"], LAYERS]]
        made = model_of("gpt-neo-holes", spread=1.5, num_layers=LAYERS, attention_types=kinds)
        return accel.optimize(made, cpu="fuse")

    looked, look = [], self_test.differing_part
    monkeypatch.setattr(self_test, "differing_part", lambda *given: looked.append(look(*given)) or looked[-1])
    assert type(vars(model())["forward"]) is MixedForward and looked == [None]
    monkeypatch.setattr(BoundLayer, "__call__", with_share(0.5, LAYERS - 2))
    assert f"transformer.h.{LAYERS - 2} gives something else than stock's" in told(model()) and looked[1] is not None


# -- Layers that amplify the rounding inside them --


@pytest.fixture(scope="module")
def sensitive():
    """A Mamba of random weights in bfloat16: three times as far off as noise in what its layers give moves it."""
    model = build_tiny(MODEL_FOR_CAUSAL_LM_MAPPING[MambaConfig]).to(torch.bfloat16).requires_grad_(False)
    return vars(accel.optimize(model, cpu="fuse"))["forward"]


def test_what_is_as_near_to_full_precision_as_stock_is_fused(sensitive, monkeypatch):
    assert type(sensitive) is DecoderForward
    model = sensitive.module
    with resting(model):
        wanted, _ = stock_logits(sensitive, LENGTHS)
        with fused_layers(sensitive), wanted.routed():
            got = fused_logits(sensitive, LENGTHS)
    assert wanted.row_off(got) > DRIFT * wanted.moves() and wanted.agrees(got)
    assert sensitive.module is model and wanted.exact.dtype == torch.float32
    assert not wanted.is_as_good(got + (got - wanted.exact)) and not wanted.is_as_good(got * float("nan"))
    monkeypatch.setattr("accel.verification.precision.MOST_WEIGHTS", 0)
    assert not replace(wanted).agrees(got)


@pytest.mark.parametrize("error", [name for name in ERRORS | SMALL if name != "positions"])
def test_errors_where_rounding_is_as_large(error, sensitive, monkeypatch):
    last = (BoundLayer, "__call__", with_share(0.5, len(sensitive.layers) - 1))
    monkeypatch.setattr(*(last if error == "last layer" else (ERRORS | SMALL)[error][0]))
    assert refused(sensitive)
