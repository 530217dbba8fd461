"""A causal language model stock and optimized: the logits of a prompt, those of every decode step, and greedy text.

Tokens are chosen by comparing logits that may be nearly equal, so that in half precision texts part by rounding alone.
Both are therefore also made to write the same text, stock's, by generate() itself: its cache and its steps, judged like
any model's output by the error against full precision.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from accel.comparison import first_differences, worst
from accel.llm.logits import GREEDY, Decode, Logits, Prompt
from accel.llm.ptq.formats.prequantized_import import PrequantizedImport
from accel.llm.recording.inputs import KNOWN, TOKENS, causal, example_inputs, most_configured
from accel.llm.routed import RoutedLayers
from accel.planning.plan import Plan
from accel.quantization.activation_quantization import rounding_linears
from accel.quantization.module import unrounded
from accel.tolerances import TIMES_STOCK
from accel.verification.agreement import Agreement, distributions, perplexity
from accel.verification.call import seeded
from accel.verification.metrics import Quality, compare
from accel.verification.rounded_products import judge
from accel.verification.verify import stock_models

NEW = 16  # tokens written: a first step that runs eagerly, a second that captures a graph, and replays


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
    return example_inputs(model, tokens=max(1, min(TOKENS, (most_configured(model) or 2 * TOKENS) // 2)))


def _new(model: PreTrainedModel, inputs: dict) -> int:
    """Tokens to be written: NEW, or as many as the model may have positions for. The last one needs none."""
    most = most_configured(model)
    read = next(inputs[name].shape[1] for name in ("input_ids", "inputs_embeds") if name in inputs)
    return NEW if most is None or read > most else max(1, min(NEW, most - read + 1))


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
    rounds = bool(rounding_linears(model))
    asked, note = _told(plan, rounds), ""
    with seeded(seed):
        ours = _greedy(model, inputs)[0]
    with plan.only(PrequantizedImport) if plan.prequantized else stock_models([plan]), unrounded(model), seeded(seed):
        tokens, logits = _greedy(model, inputs)
        prompt, decode, layers = _recorded(plan, inputs, tokens)
    stock, read = _joined(prompt.outputs, decode.outputs), prompt.outputs[-1][0]
    own = _own(prompt, decode)
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
        if prompt.choices is not None or decode.choices is not None:  # not yet as calls run
            prompt, decode = prompt.with_free_routing(), decode.with_free_routing()
            parts |= {"prompt, free routing": prompt.judge(seed), "decode, free routing": decode.judge(seed)}
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
    equal, differences = first_differences(tokens, ours, logits)
    margin = worst(margin for margin, _ in differences) if differences else None
    agreement = Agreement(kl, worst_kl, top1, len(stock), equal, tokens.numel(), margin)
    if margin is not None:
        # Each of two logits may be off by the largest error, and here by more than where that was looked for.
        agreement = replace(agreement, margin_allowed=2 * TIMES_STOCK * whole.max_error)
    if own is not None:
        own_kl, _, own_top1 = distributions(own[1], stock)
        agreement = replace(agreement, own_kl=own_kl, own_top1=own_top1, own_from=own[0])
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
        kinds = {module.activations for module in rounding_linears(plan.root)}
        chosen["activations"] = options.activations or ", ".join(sorted(filter(None, kinds)))
    names = ("weights", "activations", "kv_cache")
    return {name: value for name in names if (value := chosen.get(name)) is not None}


def _recorded(plan: Plan, inputs: dict, tokens: torch.Tensor) -> tuple[Logits, Logits, RoutedLayers]:
    """The prompt, and the steps that write these tokens, as the model is now; and its layers that choose experts."""
    model, layers = plan.root, RoutedLayers(plan)
    recorder = layers.recorder()
    prompt: Logits = Prompt(model)
    decode: Logits = Decode(model)
    for record, given in ((prompt, inputs), (decode, inputs | {"tokens": tokens})):
        with recorder:
            record.observe(plan, given)
        record.perturb(plan)
        record.measure()
    layers.keep(recorder)
    return prompt, decode, layers


def _joined(prompt: list[list[torch.Tensor]], decode: list[list[torch.Tensor]]) -> torch.Tensor:
    """Logits of both, (positions, vocabulary)."""
    return torch.cat([prompt[-1][0], decode[-1][0]])


def _own(prompt: Logits, decode: Logits) -> tuple[str, torch.Tensor] | None:
    """By what stock may be off by itself, in words, and the logits that it is compared with; None if it is not known.

    Full precision repeats the experts that stock chose, and so does not say it of a model that has any.
    """
    if prompt.perturbed is not None and decode.perturbed is not None:
        return "itself with noise of the size of rounding", _joined([prompt.perturbed], [decode.perturbed])
    if prompt.exact is None or decode.exact is None:
        return None
    return "full precision", _joined(prompt.exact, decode.exact)


def _greedy(model: PreTrainedModel, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (rows, `_new`) and the logits they were chosen by, (rows, `_new`, vocabulary)."""
    new = _new(model, inputs)
    written = model.generate(**inputs, min_new_tokens=new, max_new_tokens=new, **GREEDY)
    return written.sequences[:, -new:], torch.stack(written.logits, dim=1)


def _texts(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(text, str) for text in value))
