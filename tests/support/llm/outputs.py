"""What a language model gives, flat and by name, and whether two of them are the same."""

import inspect

import torch

import accel
from support.llm.families import padded

NEW = 8


def generate(model, ids, mask, **call) -> dict[str, torch.Tensor]:
    """Greedily, eight words, unless the keywords say otherwise; the mask may be None, and with no ids bos begins."""
    torch.manual_seed(11)
    if mask is not None:
        call = {"attention_mask": mask} | call
    if not {"max_new_tokens", "max_length"} & call.keys():
        call["max_new_tokens"] = NEW
    return flat(model.generate(input_ids=ids, **{"do_sample": False} | call))


def flat(output, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor in what generate or a model gave, by its path; of a cache its length."""
    if isinstance(output, torch.Tensor):
        return {name or "sequences": output}
    if hasattr(output, "get_seq_length"):
        return {f"{name}.length": torch.tensor(int(output.get_seq_length()))}
    if hasattr(output, "items"):
        pairs = output.items()
    elif isinstance(output, list | tuple):
        pairs = enumerate(output)
    else:
        return {}
    found = {}
    for key, value in pairs:
        found |= flat(value, f"{name}.{key}" if name else str(key))
    return found


def ran_fast(model) -> None:
    """Every call of it was computed by the fused forward of the whole model.

    Equal text alone does not say so: a kernel that computes something else is found out when the model is optimized,
    which then stays stock, without a single fallback.
    """
    report = accel.report(model)
    whole = [(status, reason) for _, rule, status, reason in report.sites if rule == "language model"]
    assert [status for status, _ in whole] == ["patched"], whole
    assert report.fallbacks == [], report.fallbacks


def same(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], share: float = 1e-5) -> None:
    """Whole numbers are equal, others within `share` of the largest.

    In float32 stock's logits are up to 2e-6 of the largest one from float64's, so ours may be 4e-6 from stock's, and
    scores add logits up.
    """
    assert ours.keys() == stock.keys(), sorted(ours.keys() ^ stock.keys())
    for name, theirs in stock.items():
        mine = ours[name]
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, (name, mine.shape, theirs.shape)
        if not theirs.is_floating_point():
            assert torch.equal(mine, theirs), f"{name}: {mine.tolist()}, stock {theirs.tolist()}"
            continue
        finite = theirs.isfinite()
        assert torch.equal(mine.isfinite(), finite) and torch.equal(mine[~finite].isnan(), theirs[~finite].isnan()), (
            name
        )
        if finite.any():
            error = float((mine - theirs)[finite].abs().max())
            assert error <= share * float(theirs[finite].abs().max().clamp_min(1e-3)), f"{name}: {error:.1e} apart"


def write_alike(ours, stock, lengths=(9, 5), **call) -> None:
    """They continue prompts of these lengths in the same way."""
    ids, mask = padded(lengths)
    same(generate(ours, ids, mask, **call), generate(stock, ids, mask, **call))


def both(pair, call):
    ours, stock = pair
    theirs = call(stock)
    for _ in range(2):
        same(call(ours), theirs)
    return theirs


def shown(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Where a position may see something: what stock gives for one that sees nothing is of no use to anybody."""
    if mask is None:
        return logits
    return torch.where((mask.cumsum(1) > 0)[..., None], logits, 0)


def second(model) -> str:
    """What a model takes as its second argument: most a mask, some a cache before it."""
    return list(inspect.signature(type(model).forward).parameters)[2]
