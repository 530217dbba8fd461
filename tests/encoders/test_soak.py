"""Random calls of encoders of texts and of encoder-decoders, each compared with a copy that stays stock."""

import copy
import gc
import random
from functools import partial
from statistics import median

import pytest
import torch
import transformers as t

import accel
from accel.bench.encoder_coverage import PAIRS, TEXTS, encoder_kinds
from accel.bench.llm.tiny import NotBuilt, build_tiny
from accel.comparison import relative_rms
from accel.encoders.inputs import tensors_of
from support.everything import EVERYTHING

ALL = {name: kind for kind in (TEXTS, PAIRS) for name in encoder_kinds()[kind].values()}
FEW = {"BertModel": TEXTS, "XLMModel": TEXTS, "T5ForConditionalGeneration": PAIRS}
CALLS = 40 if EVERYTHING else 6
LONGEST = 24
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.int64: 0.0}
ENOUGH, MEDIAN = 15, 1.25  # outputs in bfloat16; how far their median error may be from stock's
CHAOS = 0.1  # relative: where a model makes so much of rounding, chance decides who is nearer
GROWTH = 60  # objects that 20 calls may leave behind: names of shapes, counted reasons


def random_call(chance, model, kind):
    """A text or several, and what is asked of them."""
    rows, length = chance.randint(1, 4), chance.randint(1, LONGEST)
    words = model.config.get_text_config().vocab_size
    numbers = torch.Generator().manual_seed(chance.randint(0, 10**6))
    call = {"input_ids": torch.randint(3, words - 8, (rows, length), generator=numbers)}
    side = chance.choice([None, None, "full", "right", "left", "holes"])
    if side is not None:
        mask = torch.ones(rows, length, dtype=chance.choice([torch.int64, torch.int64, torch.bool]))
        for row in mask if side != "full" else ():
            if side == "holes":
                row[torch.rand(length, generator=numbers) < 0.2] = 0
            else:
                row[chance.randint(1, length) :] = 0
        mask[:, 0] = 1
        call["attention_mask"] = mask.flip(1) if side == "left" else mask
    if chance.random() < 0.2:
        call["return_dict"] = False
    for name in ("output_hidden_states", "output_attentions"):
        if chance.random() < 0.1:
            call[name] = True
    if kind == PAIRS:
        ids = torch.randint(3, words - 8, (rows, chance.randint(1, 6)), generator=numbers)
        if chance.random() < 0.3 and "return_dict" not in call:
            return {**call, "return_dict": True, "max_new_tokens": 5, "num_beams": chance.choice([1, 1, 2])}
        call["decoder_input_ids"] = ids
    return call


def answer(model, call):
    """What a call gives by name, or the error that it raises."""
    try:
        if "max_new_tokens" not in call:
            return tensors_of(model(**call))
        call = {name: one for name, one in call.items() if name != "return_dict"}
        return {"tokens": model.generate(**call, do_sample=False)}
    except Exception as error:
        return error


def differs(got, wanted, exact, errors):
    """How an answer differs from stock's. exact: gives the answer in a wider dtype, of which the latter may be off too:
    some random models are far from it, and one call says little. errors: ours and stock's go there, which over many
    calls are alike where ours are of rounding.
    """
    if isinstance(wanted, Exception) or isinstance(got, Exception):
        return None if isinstance(wanted, Exception) else f"raised {got!r}"
    if list(got) != list(wanted):
        return f"gave {list(got)}, stock {list(wanted)}"
    for name, one in wanted.items():
        mine = got[name]
        if mine.shape != one.shape or mine.dtype != one.dtype:
            return f"{name} is {mine.dtype} {tuple(mine.shape)}, stock's {one.dtype} {tuple(one.shape)}"
        most = float(one.nan_to_num().abs().max()) if one.numel() else 0.0
        if torch.allclose(mine, one, rtol=1e-4, atol=1e-4 * most, equal_nan=True):
            continue
        if not isinstance(right := exact(), Exception):
            ours, theirs = (relative_rms(given, right[name]) for given in (mine, one))
            errors.append((ours, theirs))
            if not ours <= 4 * theirs + ROUNDED[one.dtype]:
                return f"{name} is off by {ours:.1e}, stock's by {theirs:.1e}"
    return None


@pytest.mark.parametrize("name", ALL if EVERYTHING else FEW)
@torch.no_grad()
def test_random_calls(name):
    kind, chance = ALL[name], random.Random(name)
    try:
        stock = build_tiny(getattr(t, name))
    except (NotBuilt, ImportError, AttributeError) as error:
        pytest.skip(str(error))
    stocks = {"double": copy.deepcopy(stock).double(), "full": stock, "half": copy.deepcopy(stock).bfloat16()}
    models = {dtype: accel.optimize(copy.deepcopy(one)) for dtype, one in stocks.items() if dtype != "double"}
    counted, wrong, errors = [], [], {"full": [], "half": []}
    for number in range(CALLS):
        dtype, call = chance.choice(["full", "full", "half"]), random_call(chance, stock, kind)
        if "max_new_tokens" in call:
            dtype = "full"
        wider = stocks["double" if dtype == "full" else "full"]
        reason = differs(
            answer(models[dtype], call), answer(stocks[dtype], call), partial(answer, wider, call), errors[dtype]
        )
        if reason is not None:
            shown = {given: one.tolist() if isinstance(one, torch.Tensor) else one for given, one in call.items()}
            wrong.append(f"call {number}, {dtype}: {reason}; {shown}")
        if number + 1 in (CALLS // 2, CALLS):
            gc.collect()
            counted.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))
    assert not wrong, "\n".join(wrong)
    half = [pair for pair in errors["half"] if max(pair) < CHAOS]
    if len(half) >= ENOUGH:
        ours, theirs = map(median, zip(*half, strict=True))
        assert ours <= MEDIAN * theirs
    assert counted[1] - counted[0] <= GROWTH
