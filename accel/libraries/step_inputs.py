"""Whether a class that prepares the inputs of a step of generate() itself gives what transformers' own method gives."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from accel.errors import reason_of
from accel.libraries.cache import NAMES, cache_argument
from accel.libraries.generation import AS_IMPORTED, PREPARE

MASK, KEEP = "attention_mask", "logits_to_keep"
LONGEST = 2**22  # tokens of a text that may be a bound in a configuration
FEW = (2, 3, 17)  # lengths that are always tried
PLAIN = (bool, int, float, str, type(None))


class _Past:
    """Stands for a cache that holds so many tokens."""

    is_compileable = False

    def __init__(self, tokens: int):
        self.tokens = tokens

    def get_seq_length(self, *args: object) -> int:
        return self.tokens


def prepares_as_stock(model: PreTrainedModel, attends: bool) -> bool:
    """Whether this holds at every length that its configuration could mean: what it adds is the same at all of them.

    attends: a layer reads the mask of a step, which therefore may not be left out.
    """
    own = partial(getattr(type(model), PREPARE), model)
    usual = partial(AS_IMPORTED[PREPARE], model)
    name = cache_argument(AS_IMPORTED[PREPARE]) or NAMES[0]
    numbers = {number + more for number in _numbers(model.config.to_dict()) for more in (-1, 0, 1, 2)}
    added: dict[str, Any] | None = None
    try:
        for length in sorted({*FEW, *(number for number in numbers if 1 < number <= LONGEST)}):
            row = torch.zeros(1, 1, dtype=torch.int64, device=model.device).expand(1, length)
            given = {name: _Past(length - 1), MASK: row, "position_ids": row, "use_cache": True, KEEP: 1}
            found, wanted = (prepare(row, next_sequence_length=1, **given) for prepare in (own, usual))
            for key in wanted.keys() - {KEEP}:
                left_out = key == MASK and found.get(key) is None and not attends
                if not left_out and not _same(found.get(key), wanted[key]):
                    return False
            more = {key: value for key, value in found.items() if key == KEEP or key not in wanted}
            if not all(type(value) in PLAIN for value in more.values()) or added not in (None, more):
                return False
            added = more
    except Exception as error:  # it wants more than a step is given
        reason_of(error)
        return False
    return True


def _numbers(config: Any) -> Iterator[int]:
    """Whole numbers of a configuration and of the parts of it."""
    if type(config) is int:
        yield config
    elif isinstance(config, dict | list | tuple):
        for one in config.values() if isinstance(config, dict) else config:
            yield from _numbers(one)


def _same(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, torch.Tensor):
        return found is wanted
    return isinstance(found, torch.Tensor) and found.shape == wanted.shape and torch.equal(found, wanted)
