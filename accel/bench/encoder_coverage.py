"""Which encoders and encoder-decoders of the installed transformers are fused by layers: every class, tiny."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from accel.bench.llm.tiny import PROMPT, NotBuilt, build_tiny, numbers_in, tiny_call
from accel.bench.outcomes import NOT_BUILT, PART, STOCK, WHOLE, WRONG, generalized, wrong_answer
from accel.bench.results import REASON
from accel.comparison import relative_max
from accel.encoders.own_attention import ALONE
from accel.errors import logged

TEXTS, PAIRS, IMAGES, SOUNDS = "text", "encoder-decoder", "image", "sound"
FUSED = "its layers fused"  # as the report says of steps of a decoder


ATTENDING: tuple[Any, ...] = (torch.softmax, F.softmax, torch.Tensor.softmax, F.scaled_dot_product_attention)
ATTENDING += (F.multi_head_attention_forward, torch.exp, torch.logsumexp, torch.acos)  # of WavLM, Reformer, YOSO


class Attends(TorchFunctionMode):
    """Sees whether anything attends."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.found = self.found or func in ATTENDING
        return func(*args, **(kwargs or {}))


def encoder_kinds() -> dict[str, dict[str, str]]:
    """By what they encode, classes by model types: those that transformers lists as such, or below heads for it."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as listed

    def below(heads: Iterable[dict[str, str]]) -> dict[str, str]:
        names = {kind: name for one in heads for kind, name in one.items() if "ConditionalGeneration" not in name}
        found = ((kind, listed.MODEL_MAPPING_NAMES.get(kind)) for kind in names)
        return {kind: name if isinstance(name, str) else name[0] for kind, name in found if name}

    pairs = listed.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES | listed.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    pairs = {kind: name for kind, name in pairs.items() if getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False)}
    images: dict[str, Any] = listed.MODEL_FOR_IMAGE_MAPPING_NAMES
    sounds = below((listed.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES, listed.MODEL_FOR_CTC_MAPPING_NAMES))
    return {
        TEXTS: below((listed.MODEL_FOR_MASKED_LM_MAPPING_NAMES,)) | listed.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
        PAIRS: pairs,
        IMAGES: {kind: one if isinstance(one, str) else one[0] for kind, one in images.items()},
        SOUNDS: {kind: name for kind, name in sounds.items() if kind not in pairs},
    }


def examine_encoder(name: str) -> Iterator[dict]:
    """As `examine`, of a class of these."""
    import transformers

    import accel

    yield {"stage": "building"}
    try:
        model = build_tiny(getattr(transformers, name))
    except (NotBuilt, ImportError, AttributeError) as error:
        yield {"outcome": NOT_BUILT, "reasons": [str(error)[:REASON]]}
        return
    yield {"model_type": model.config.model_type, "stage": "running stock"}
    with Attends() as watched:
        stock = hidden_states_of(model)
    yield {"attends": watched.found, "stage": "optimizing"}
    accel.optimize(model, cpu="fuse")
    yield {"stage": "running optimized"}
    ours, report = hidden_states_of(model), accel.report(model)
    told = [(status, reason) for _, rule, status, reason in report.sites if rule == "encoder"]
    told = told or [("skipped", "it has no list of layers, or attends to nothing")]
    steps = [(status, reason) for _, rule, status, reason in report.sites if rule == "encoder-decoder"]
    told += [(status if FUSED in reason else "skipped", reason) for status, reason in steps]
    left = [generalized(reason) for status, reason in told if status != "patched"]
    row: dict[str, Any] = {"outcome": WHOLE if not left else PART if len(left) < len(told) else STOCK}
    row["reasons"] = left + [ALONE] * any(ALONE in reason for _, reason in told)
    row["fallbacks"] = dict(Counter(reason for _, reason, _ in report.fallbacks))
    differs = wrong_answer(stock, ours)
    if differs and not only_rounds(hidden_states_of(accel.restore(model).double()), stock, ours):
        row |= {"outcome": WRONG, "reasons": [differs]}
    yield row


def only_rounds(exact: dict[str, Any], stock: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether no answer is farther from float64's than twice stock's: some random models are far from it."""
    pairs = ((exact[name], stock[name], ours[name]) for name in exact)
    return all(
        isinstance(got, torch.Tensor) and relative_max(got, right) <= 2 * relative_max(theirs, right)
        for right, theirs, got in pairs
        if isinstance(theirs, torch.Tensor)
    )


@torch.no_grad()
def hidden_states_of(model: Any) -> dict[str, Any]:
    """By call what an encoder gives, for two texts of which one is padded too, or in words what was raised instead."""
    given = tiny_call(model)
    calls = {"alone": given}
    if "input_ids" in given:
        given = {name: torch.cat([one, one.roll(1, dims=1)]) for name, one in given.items()}
        mask = torch.ones_like(given["input_ids"])
        mask[1, 2 * PROMPT // 3 :] = 0
        masks = {"padded on the right": mask, "padded on the left": mask.flip(1)}
        calls = {"alone": given} | {name: given | {"attention_mask": one} for name, one in masks.items()}
    found: dict[str, Any] = {}
    for name, call in calls.items():
        torch.manual_seed(0)  # some hide patches by chance
        try:
            found[name] = numbers_in(model(**call))
        except Exception as error:  # some take no mask
            found[name] = logged(error)[:REASON]
    return found


def share_of(rows: list[dict]) -> str:
    """How many of the classes that attend, and were built, are fused by layers: by kind, then of all."""
    kinds = encoder_kinds()
    counts: dict[str, tuple[int, int]] = {}
    for kind, classes in kinds.items():
        mine = [row for row in rows if row["class"] in classes.values() and row.get("attends")]
        counts[kind] = sum(row["outcome"] == WHOLE for row in mine), len(mine)
    whole, every = (sum(one[at] for one in counts.values()) for at in (0, 1))
    told = ", ".join(f"{fused} of {number} {kind}" for kind, (fused, number) in counts.items() if number)
    alone = sum(ALONE in row["reasons"] for row in rows if row["outcome"] == WHOLE)
    told += f"; of {alone} of them the attentions alone" if alone else ""
    return f"{whole} of {every} encoders that attend ({whole / every:.0%}) are fused by layers: {told}" if every else ""
