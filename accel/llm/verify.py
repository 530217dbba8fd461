"""A causal language model stock and optimized: the logits of a prompt, those of every decode step, and greedy text.

Tokens are chosen by comparing logits that may be nearly equal, so that in half precision texts part by rounding alone.
Both are therefore also made to write the same text, stock's, by generate() itself: its cache and its steps, judged like
any model's output by the error against full precision.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from accel.llm.ptq.formats.prequantized_import import PrequantizedImport
from accel.llm.recording.inputs import KNOWN, TOKENS, causal, example_inputs, table_of_positions
from accel.llm.routed import Layers, far, median_rms
from accel.planning.plan import Plan
from accel.quantization.activation_quantization import rounding
from accel.quantization.module import unrounded
from accel.tolerances import TIMES_STOCK
from accel.verification.agreement import Agreement, distributions, first_differences, perplexity
from accel.verification.call import seeded
from accel.verification.metrics import Quality, compare
from accel.verification.model_record import ModelRecord
from accel.verification.rounded_products import judge
from accel.verification.verify import stock_models

DEEP = 4  # times the units of rounding that one module may be off where full precision cannot be computed
NEW = 16  # tokens written: a first step that runs eagerly, a second that captures a graph, and replays
GREEDY = {"do_sample": False, "num_beams": 1, "return_dict_in_generate": True, "output_logits": True}


class Forced:
    """A logits processor: the next token is the one given. What generate() returns as logits is from before it."""

    def __init__(self, tokens: torch.Tensor):
        self.tokens, self.step = tokens, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = self.tokens[:, self.step, None].to(scores.device)
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class Logits(ModelRecord):
    """Of a deep model, at the far end of all its layers' roundings: an 8B model in bf16 is at 16 units of rounding.

    routed: rounding may send tokens to other experts, so that the median token is what is judged, see `routed`.
    """

    routed = False

    @property
    def allowance(self) -> float:
        return DEEP * super().allowance

    def apart(self, wanted: list[torch.Tensor], got: list[torch.Tensor]) -> float:
        return median_rms(wanted, got) if self.routed else super().apart(wanted, got)

    def judge(self, seed: int) -> Quality:
        quality = super().judge(seed)
        if not self.routed:
            return quality
        stock, ours = list(chain.from_iterable(self.outputs)), list(chain.from_iterable(self.ours))
        truth = None if self.exact is None else list(chain.from_iterable(self.exact))
        tokens = sum(len(logits) for logits in stock)
        if truth is None:
            quality = replace(quality, error=self.apart(stock, ours))
            told = f"{far(stock, ours)} of {tokens} tokens"
        else:
            told = f"of {tokens} tokens {far(truth, stock)} of stock's, {far(truth, ours)} of accel's"
        note = f"judged by the median token; sent to other experts by rounding, or attending to such: {told}"
        measure = quality.measure.replace("relative RMS", "relative RMS of the median token")
        return replace(quality, measure=measure, note="; ".join(filter(None, (quality.note, note))))


class Prompt(Logits):
    """Logits of a prompt, (tokens, vocabulary): those of padding mean nothing and are left out."""

    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        logits = module(**kwargs).logits
        mask = kwargs.get("attention_mask")
        return [logits.flatten(0, 1) if mask is None else logits[mask.bool()]]


class Decode(Logits):
    """Logits of the steps in which generate() writes the `tokens` it is told to, (rows * steps, vocabulary)."""

    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        prompt = {name: value for name, value in kwargs.items() if name != "tokens"}
        return [_written(module, prompt, kwargs["tokens"]).flatten(0, 1)]


def subject(obj: Any, args: tuple, kwargs: dict) -> tuple[PreTrainedModel, dict, bool] | None:
    """The causal language model that a call of obj runs, its inputs, and whether they are text of the caller's; None
    for anything else.

    obj: such a model with inputs that generate() takes too, or none; or a transformers pipeline of one with texts.
    """
    if causal(obj):
        try:
            given = dict(inspect.signature(obj.forward).bind_partial(*args, **kwargs).arguments)
        except TypeError:
            return None  # the call itself says what is wrong with it
        return (obj, given or _example(obj), "input_ids" in given) if set(given) <= KNOWN else None
    model, tokenizer = getattr(obj, "model", None), getattr(obj, "tokenizer", None)
    if tokenizer is None or not causal(model) or kwargs or len(args) > 1:
        return None
    if not args:
        return model, _example(model), False
    return (model, tokenized(model, tokenizer, args[0]), True) if _texts(args[0]) else None


def _example(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Random prompts, which leave room for the text that is written on."""
    most = table_of_positions(model)
    return example_inputs(model) if most is None else example_inputs(model, tokens=max(1, min(TOKENS, most // 2)))


def _new(model: PreTrainedModel, inputs: dict) -> int:
    """Tokens to be written: NEW, or as many as the model has positions for. The last one needs none."""
    most = table_of_positions(model)
    read = next(inputs[name].shape[1] for name in ("input_ids", "inputs_embeds") if name in inputs)
    return NEW if most is None else max(1, min(NEW, most - read + 1))


def tokenized(model: PreTrainedModel, tokenizer: Any, texts: str | list[str]) -> dict[str, torch.Tensor]:
    """Inputs of the model for one text or several, filled up on the left."""
    several = isinstance(texts, list) and len(texts) > 1
    options = {"padding": True, "padding_side": "left"} if several else {}
    inputs = tokenizer([texts] if isinstance(texts, str) else texts, return_tensors="pt", **options)
    known = inspect.signature(model.forward).parameters
    return {name: value.to(model.device) for name, value in inputs.items() if name in known and name in KNOWN}


def agreement_with_stock(
    model: PreTrainedModel, inputs: dict, text: bool, plans: Mapping[str, Plan], seed: int
) -> Quality:
    """Quality of the model on these inputs, judged; it is optimized by `plans`, before and after.

    text: its perplexity means something. Where weights are quantized the whole is compared with the original weights
    and told as lossy; what is judged, part by part, is against stock code over the same quantized weights. So are rows
    that are rounded to 8 bits: their loss is told, prompt and decode are judged without, products of such rows alone.
    """
    (plan,) = plans.values()
    rounds = bool(rounding(model))
    asked, note = _told(plan, rounds), ""
    with seeded(seed):
        ours = _greedy(model, inputs)[0]
    with plan.only(PrequantizedImport) if plan.prequantized else stock_models([plan]), unrounded(model), seeded(seed):
        tokens, logits = _greedy(model, inputs)
        prompt, decode, layers = _recorded(plan, inputs, tokens)
    stock, read = _joined(prompt.outputs, decode.outputs), prompt.outputs[-1][0]
    exact = None if prompt.exact is None or decode.exact is None else _joined(prompt.exact, decode.exact)
    if plan.prequantized:
        note = "stock has the quantized weights here that the model arrived with"
    if plan.weights:
        note = "prompt and decode are judged against stock code over the same quantized weights"
        with plan.unfused(), unrounded(model), seeded(seed):
            prompt, decode, layers = _recorded(plan, inputs, tokens)
        if not all(row["reversible"] for row in plan.weights):
            asked.pop("weights", None)
            note = "stock has the quantized weights here: the originals were not kept"
    with unrounded(model):
        parts = {"prompt": prompt.judge(seed), "decode": decode.judge(seed)}
    if "kv_cache" in asked:
        parts = {name: replace(part, lossy=f"kv_cache={asked['kv_cache']!r}") for name, part in parts.items()}
    with unrounded(model):
        parts |= layers.judge(seed)
    if rounds:
        with seeded(seed):
            products = judge(model, lambda: prompt.run(model, (), inputs))
            prompt.ours = [prompt.run(model, (), inputs)]
            decode.ours = [decode.run(model, (), inputs | {"tokens": tokens})]
        parts |= products
        few = "" if products else ", of which this prompt has too few"
        note = "; ".join(filter(None, (note, f"prompt and decode are judged without rounding rows{few}")))
    note = "; ".join(filter(None, (note, layers.note)))
    lossy = ", ".join(f"{name}={value!r}" for name, value in asked.items()) or None
    optimized = _joined(prompt.ours, decode.ours)
    whole = compare(stock, optimized)
    kl, worst_kl, top1 = distributions(stock, optimized)
    equal, margin = first_differences(tokens, ours, logits)
    agreement = Agreement(kl, worst_kl, top1, len(stock), equal, tokens.numel(), margin)
    if margin is not None:
        # Each of two logits may be off by the largest error, and here by more than where that was looked for.
        agreement = replace(agreement, margin_allowed=2 * TIMES_STOCK * whole.max_error)
    if exact is not None:
        own_kl, _, own_top1 = distributions(exact, stock)
        agreement = replace(agreement, own_kl=own_kl, own_top1=own_top1)
    if text:
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        found = [perplexity(logits, inputs["input_ids"], mask) for logits in (prompt.ours[-1][0], read)]
        agreement = replace(agreement, perplexity=found[0], stock_perplexity=found[1])
    return replace(whole, parts=parts, lossy=lossy, agreement=agreement, note=note)


def _told(plan: Plan, rounds: bool) -> dict[str, str]:
    """What of this model is lossy, by the name of the option that asks for it."""
    options = plan.options
    chosen: dict[str, str | None] = {"weights": options.weights if plan.weights else None, "kv_cache": options.kv_cache}
    if rounds:
        kinds = {module.activations for module in rounding(plan.root)}
        chosen["activations"] = options.activations or ", ".join(sorted(filter(None, kinds)))
    names = ("weights", "activations", "kv_cache")
    return {name: value for name in names if (value := chosen.get(name)) is not None}


def _recorded(plan: Plan, inputs: dict, tokens: torch.Tensor) -> tuple[Prompt, Decode, Layers]:
    """The prompt, and the steps in which these tokens are written, as the model computes them now; and its layers that
    choose experts.
    """
    model, layers = plan.root, Layers(plan)
    recorder = layers.recorder()
    prompt, decode = Prompt(model), Decode(model)
    for record, given in ((prompt, inputs), (decode, inputs | {"tokens": tokens})):
        record.routed = bool(recorder.found)
        with recorder:
            record.keep(((), given), record.run(model, (), given))
        record.measure()
    layers.keep(recorder)
    return prompt, decode, layers


def _joined(prompt: list[list[torch.Tensor]], decode: list[list[torch.Tensor]]) -> torch.Tensor:
    """Logits of both, (positions, vocabulary)."""
    return torch.cat([prompt[-1][0], decode[-1][0]])


def _greedy(model: PreTrainedModel, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (rows, `_new`) and the logits they were chosen by, (rows, `_new`, vocabulary)."""
    new = _new(model, inputs)
    written = model.generate(**inputs, min_new_tokens=new, max_new_tokens=new, **GREEDY)
    return written.sequences[:, -new:], torch.stack(written.logits, dim=1)


def _written(model: PreTrainedModel, inputs: dict, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (rows, steps, vocabulary) of the steps in which generate() writes these tokens."""
    steps = tokens.shape[1]
    options = {"min_new_tokens": steps, "max_new_tokens": steps, "logits_processor": [Forced(tokens)]}
    return torch.stack(model.generate(**inputs, **options, **GREEDY).logits, dim=1)


def _texts(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(text, str) for text in value))
