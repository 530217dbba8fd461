"""The rows of a cache in another order, in place: each beam goes on from the tokens of the one that it has come of."""

import torch

from accel_kernels.op import make_op, random_cases

MOST = 32  # beams of a text


def reference(kept, order, length, *, beams):
    """kept: (parts, rows, room, width), contiguous, tokens of a row one behind another; order: (rows,) int64, of which
    row each is to be, one of the same text, which has `beams` rows one behind another. length: () int64, tokens of a
    row that count; others stay where they are. Changes `kept`, and returns it.
    """
    used = kept[:, :, : int(length)]
    used.copy_(used.index_select(1, order))
    return kept


def supports(kept, order, length, *, beams) -> str | None:
    if kept.dim() != 4 or not kept.is_contiguous() or kept.numel() == 0 or kept.shape[3] * kept.element_size() % 8:
        return f"kept of shape {tuple(kept.shape)}, not contiguous, or tokens that are not whole words of 8 bytes"
    if any(one.dtype != torch.int64 or one.device != kept.device for one in (order, length)):
        return "an order or a length that is not int64, or elsewhere"
    if kept.shape[1] % beams or order.shape != kept.shape[1:2] or not order.is_contiguous() or length.numel() != 1:
        return f"an order of shape {tuple(order.shape)} for {kept.shape[1]} rows of {beams} beams"
    return f"{beams} beams, more than {MOST}" if beams > MOST else None


@random_cases
def _case(rand, parts, texts, beams, room, width, length=None):
    """length: None for all of the room."""
    kept = rand(parts, texts * beams, room, width)
    order = (rand.uniform(texts, beams) * beams).long() + torch.arange(texts, device=rand.device)[:, None] * beams
    return (kept, order.flatten(), torch.tensor(length or room, device=rand.device)), {"beams": beams}


CASES = (
    _case("one", 2, 1, 1, 3, 8, small=True),
    _case("odd", 3, 2, 3, 5, 40, small=True),
    _case("wide", 2, 2, 4, 9, 1028, small=True),
    _case("bart", 24, 4, 4, 64, 1024),
    _case("nllb", 24, 4, 5, 256, 1024),
)

reorder_beams = make_op("reorder_beams", reference, supports, CASES, changes=True)
