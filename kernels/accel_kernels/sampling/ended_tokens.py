"""What follows the choice of tokens: padding behind the end of a row, and which rows have ended now."""

import torch

from accel_kernels.op import make_op, random_cases

MOST_ENDS = 128  # tokens that end a row


def reference(chosen, unfinished, ends=None, pad=None):
    """chosen: (rows,) int64 tokens; unfinished: (rows,) int64, 1 where a row goes on, else 0.

    ends: int64 tokens that end a row, or None. pad: int64, one number, the token of rows that have ended, or None,
    where these keep what was chosen. Returns (2, rows) int64: the tokens, and `unfinished` after them.
    """
    if pad is not None:
        chosen = chosen * unfinished + pad * (1 - unfinished)
    if ends is not None:
        unfinished = unfinished & ~torch.isin(chosen, ends)
    return torch.stack((chosen, unfinished))


def supports(chosen, unfinished, ends=None, pad=None) -> str | None:
    given = [one for one in (chosen, unfinished, ends, pad) if one is not None]
    if any(one.dtype != torch.int64 or not one.is_contiguous() for one in given):
        return "not contiguous int64"
    if any(one.device != chosen.device for one in given):
        return "tokens on several devices"
    if chosen.dim() != 1 or chosen.shape != unfinished.shape or chosen.numel() == 0:
        return f"tokens of shape {tuple(chosen.shape)}"
    if pad is not None and pad.numel() != 1:
        return f"{pad.numel()} tokens to fill up with"
    if ends is not None and not 0 < ends.numel() <= MOST_ENDS:
        return f"{ends.numel()} tokens that end a row, at most {MOST_ENDS}"
    return None


@random_cases
def _case(rand, rows, ends=0, pad=False, step=1):
    """step: of the tokens of `ends`, which lie among those that are chosen, 0 not."""
    chosen = torch.arange(rows, device=rand.device)
    unfinished = (torch.arange(rows, device=rand.device) % 3 < 2).long()
    given = {"ends": torch.arange(1, 1 + ends * step, step, device=rand.device)} if ends else {}
    return (chosen, unfinished), given | ({"pad": torch.tensor(7, device=rand.device)} if pad else {})


CASES = (
    _case("one", 1, ends=1, small=True),
    _case("plain", 5, small=True),
    _case("pad", 9, pad=True, small=True),
    _case("many", 131, ends=3, pad=True, step=40, small=True),
    _case("batch", 1024, ends=100, pad=True),
)

ended_tokens = make_op("ended_tokens", reference, supports, CASES)
