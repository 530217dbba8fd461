"""How exactly torch multiplies float32 on a GPU: in full, or rounded to TF32, which keeps 10 bits of a mantissa.

Torch has two ways to say it: `allow_tf32`, and since 2.9 `fp32_precision`. Once the newer one has been set, reading the
older one may raise. So the newer one is read here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

TF32, FULL = "tf32", "ieee"


def _matmul() -> Any:
    return torch.backends.cuda.matmul


def _cudnn() -> Any:
    return torch.backends.cudnn


def products_in_tf32() -> bool:
    """Of matrices. Off by default."""
    return _matmul().fp32_precision == TF32


def convolutions_in_tf32() -> bool:
    """On by default."""
    return _cudnn().conv.fp32_precision == TF32


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 inside; the caller's settings are put back, in the way in which they were made."""
    older, newer = (_matmul(), _cudnn()), (_matmul(), _cudnn().conv, _cudnn().rnn)
    precisions = [setting.fp32_precision for setting in newer]
    allowed = [_allowed(setting) for setting in older]
    try:
        for setting in older:
            setting.allow_tf32 = False
        for setting in newer:  # else what torch.backends.fp32_precision says would hold
            setting.fp32_precision = FULL
        yield
    finally:
        for setting, value in zip(older, allowed, strict=True):
            setting.allow_tf32 = bool(value)
        for setting, precision in zip(newer, precisions, strict=True):
            if setting.fp32_precision != precision:
                setting.fp32_precision = precision


def _allowed(setting: Any) -> bool | None:
    """None where the newer setting alone says it."""
    try:
        return setting.allow_tf32
    except RuntimeError:
        return None
