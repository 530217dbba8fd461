"""The verdict on models that choose experts hangs on no chance, and what is wrong in a router or an expert shows."""

import copy
from dataclasses import replace

import pytest
import torch

import accel
from accel.llm.generation import routing
from accel.llm.generation.decoder import DecoderForward
from accel.llm.moe.experts import ExpertsForward
from accel.llm.moe.router import RouterForward
from accel.llm.routed import decoder_forward, far, routed, row_rms
from accel.llm.runtime.mlp import BoundMlp
from accel.planning.plan import PLAN
from accel.tolerances import MEDIAN, MOVED
from support.everything import EVERYTHING
from support.llm import optimized_models
from support.llm.families import make, prompt
from support.llm.near_ties import LEAST, clear_seeds, deep_gpt_oss, smallest_gap
from support.llm.outputs import ran_fast


def optimized(name: str = "mixtral", dtype: torch.dtype = torch.bfloat16, **options):
    return optimized_models.optimized(name, dtype, (("max_position_embeddings", 256),), **options)


@pytest.mark.parametrize("seed", [*range(6), 11])
@pytest.mark.share(8)
@pytest.mark.turns(2)
def test_where_rounding_sends_tokens_is_not_judged(seed):
    """Judged by every token, with no routing for both, 1 and 11 failed; with ours and stock exchanged others would."""
    ours = optimized(weights="int8")
    quality = accel.verify(ours, input_ids=prompt(1, 96, seed))
    assert quality.passed, str(quality)
    for name in ("prompt", "decode"):
        fixed, free = quality.parts[name], quality.parts[f"{name}, free routing"]
        assert fixed.measure == "relative RMS from full precision" and fixed.error < fixed.allowed < 0.1
        assert fixed.note == "accel and full precision repeat the experts that stock chose"
        assert free.measure == "relative RMS of the median token from stock" and free.error < free.allowed
        assert "rounding may send tokens to other experts" in free.note and "noise of the size of" in free.note
    assert {"routed layers", "each expert", "each router"} <= quality.parts.keys()


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
def test_many_layers_of_near_ties():
    """After 12 layers hardly any token has all of stock's experts: freely, stock in bf16 is as far from itself in fp32
    as ours is from stock. With the routing fixed both are within a few roundings.
    """
    model = deep_gpt_oss(layers=12, spread=0.2)
    ids = prompt(2, 24)
    stock, exact = model(ids).logits[0], copy.deepcopy(model).float()(ids).logits[0]
    noise = row_rms([exact], [stock], MEDIAN)
    quality = accel.verify(accel.optimize(model), input_ids=ids)
    ran_fast(model)
    fixed, free = quality.parts["prompt"], quality.parts["prompt, free routing"]
    assert quality.passed, str(quality)
    assert fixed.error < fixed.allowed < noise and fixed.error < min(noise, free.error) / 3
    assert noise / 3 < free.error < free.allowed < 1
    assert quality.agreement.own_from == "itself with noise of the size of rounding"
    assert quality.agreement.kl < 10 * quality.agreement.own_kl


def test_choices_are_repeated_without_graphs(monkeypatch):
    """A graph would ask no hooks. Calls that choose freely have it again."""
    ours = optimized()
    forward, run, seen = decoder_forward(vars(ours)[PLAN]), DecoderForward.run, set()
    experts, runner = forward.experts[0].module, object()
    forward.runner = runner

    def looked_at(self, *given):
        seen.add((bool(experts._forward_pre_hooks), self.runner is runner))
        return run(self, *given)

    monkeypatch.setattr(DecoderForward, "run", looked_at)
    assert accel.verify(ours).passed and accel.report(ours).fallbacks == []
    assert seen == {(True, False), (False, True)} and forward.runner is runner


def test_choices_that_cannot_be_noted(monkeypatch):
    """The median token is all there is."""
    monkeypatch.setattr(routing, "_chosen", lambda args, kwargs: None)
    quality = accel.verify(optimized())
    assert quality.passed and not any("free routing" in part for part in quality.parts)
    assert quality.parts["prompt"].measure == "relative RMS of the median token from full precision"


def test_as_much_in_float32():
    quality = accel.verify(optimized(dtype=torch.float32))
    assert quality.passed and all(part.allowed < 1e-4 for part in quality.parts.values()), str(quality)


def biases_left_out(self, fast, x, index, shares):
    given = self.formula.weights(self.module)
    return self.kernels.experts(x, index, shares, given._replace(gate_up_bias=None, down_bias=None))


def other_alpha(self, fast, x, index, shares):
    wrong = copy.copy(self)
    wrong.formula = replace(self.formula, gating=self.formula.gating._replace(alpha=1.0))
    return fast(wrong, x, index, shares)


def given(change):
    """Experts that are given other choices and shares."""
    return lambda self, fast, x, index, shares: fast(self, x, *change(index, shares))


def chosen(change):
    """A router that gives other choices and shares."""

    def wrong(self, fast, x, *more):
        logits, shares, index = fast(self, x, *more)
        return logits, *change(shares, index)

    return wrong


# By what is wrong: what is replaced, by a function of the object, the method there and the arguments; which parts fail.
ONE_EXPERT = given(lambda index, shares: (index, shares * (1 + 0.02 * (index == 1)).to(shares.dtype)))
NOT_NORMED = given(lambda index, shares: (index, shares if index.shape[1] == 1 else shares * 0.8))
WRONG = {
    "one expert": (ExpertsForward, ONE_EXPERT, ["each expert"]),
    "experts swapped": (ExpertsForward, given(lambda index, shares: (index ^ 1, shares)), ["each expert"]),
    "shares not normed": (ExpertsForward, NOT_NORMED, ["routed layers"]),
    "shares changed": (ExpertsForward, given(lambda index, shares: (index, shares.flip(-1))), ["routed layers"]),
    "neighbors chosen": (RouterForward, chosen(lambda shares, index: (shares, index ^ 1)), ["each router"]),
    "shares not scaled": (RouterForward, chosen(lambda shares, index: (shares * 0.9, index)), ["each router"]),
    "around them": (
        BoundMlp,
        lambda self, call, *args, **named: 1.1 * call(self, *args, **named),
        ["prompt", "decode"],
    ),
}
DEEP = {"an alpha": other_alpha, "no biases": biases_left_out}  # in many layers of near ties


@pytest.mark.parametrize(("dtype", "weights"), [(torch.bfloat16, "int8"), (torch.float32, None)], ids=str)
@pytest.mark.parametrize("name", [*WRONG, *DEEP])
@pytest.mark.share(6)
@pytest.mark.turns(2)
def test_what_is_wrong_fails_where_it_is(name, dtype, weights, monkeypatch):
    deep = (ExpertsForward, DEEP.get(name), ["prompt", "decode", "each expert"])
    owner, wrong, parts = WRONG.get(name, deep)
    ours = optimized(dtype=dtype, weights=weights) if name in WRONG else accel.optimize(deep_gpt_oss(dtype, layers=8))
    method = "__call__" if owner is BoundMlp else "fast"
    right = getattr(owner, method)
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, lambda self, *args, **named: wrong(self, right, *args, **named))
        quality = accel.verify(ours, input_ids=prompt(1, 96, 1)) if name in WRONG else accel.verify(ours)
    assert not quality.passed and not any(quality.parts[part].passed for part in parts), str(quality)


@pytest.mark.parametrize(("name", "part"), [("mixtral", "each router"), ("phi-moe", "routed layers")])
def test_a_router_that_chooses_otherwise_fails(name, part):
    """A fused one is looked at by itself; where stock's runs, both choose by the same numbers."""
    ours = optimized(name)
    (path, layer), *_ = routed(vars(ours)[PLAN]).items()
    quality = accel.verify(ours)
    assert quality.parts[part].error < quality.parts[part].allowed
    plan, router = vars(ours)[PLAN], next(one for one in layer.children() if "Router" in type(one).__name__)
    kept, weight = plan.apply, router.weight.detach().clone()

    def apply():
        kept()
        with torch.no_grad():
            router.weight.copy_(weight.roll(1, 0))

    plan.apply = apply
    quality = accel.verify(ours)
    assert not quality.parts[part].passed and path in quality.parts[part].note


@pytest.mark.turns(2)
def test_experts_of_layers_that_are_not_understood():
    ours = optimized("llama4")
    assert len(routed(vars(ours)[PLAN])) == 2
    quality = accel.verify(ours)
    assert quality.passed and "routed layers" in quality.parts, str(quality)


def test_models_without_routers_are_judged_by_every_token():
    ours = optimized("llama")
    assert not routed(vars(ours)[PLAN])
    quality = accel.verify(ours)
    assert quality.passed and set(quality.parts) == {"prompt", "decode"}
    assert all(part.measure == "relative RMS from full precision" for part in quality.parts.values())


def test_the_error_of_one_row():
    wanted = torch.tensor([[3.0, 4.0]] * 5)
    got = wanted + torch.tensor([0.0, 0.05, 0.1, 5.0, 50.0])[:, None] * torch.tensor([1.0, 0.0])
    assert row_rms([wanted], [got], MEDIAN) == pytest.approx(0.02, rel=1e-4)
    assert row_rms([wanted], [got], MOVED) == pytest.approx(1.0, rel=1e-4)
    assert far([wanted], [got]) == 2
    got[0, 0] = torch.nan
    for share in (MEDIAN, MOVED):
        assert row_rms([wanted], [got], share) != row_rms([wanted], [got], share)


def test_prompts_without_near_ties():
    """Of these rows one token of layer 0 has two experts that differ by less than a rounding."""
    model = make("gpt-oss", max_position_embeddings=2048)
    assert smallest_gap(model, prompt(96, 5, 0)) < 1e-7
    (seed,) = clear_seeds(model, 96, 5, 1)
    assert smallest_gap(model, prompt(96, 5, seed)) > LEAST
    with pytest.raises(LookupError, match="nothing in this model chooses"):
        smallest_gap(make("llama"), prompt())
