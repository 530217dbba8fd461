"""Whether all ranks compute the same image, checked at the beginning of a loop, before their rows are gathered."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from accel.errors import Refused
from accel.fusion.loop import DenoisingLoop
from accel.parallel.agreement import require_agreement
from accel.parallel.ranks import Ranks
from accel.tolerances import APART, RANKS_INPUT, bound

CALLS = 2  # of a loop that are looked at: noise that a scheduler draws between steps shows in the second
SAMPLES = 256  # numbers of each tensor that are compared
SEEDS = "give the generators of all ranks one seed, or call torch.manual_seed with one number on all of them"


class LoopChecks:
    """Which calls of a forward are checked: the first two of a loop, and one of another form than the call before.

    begins: whether the last call is the first of its loop. Without an announced loop every call is.
    """

    def __init__(self, loop: DenoisingLoop):
        self.loop = loop
        self.number, self.left, self.begins = 0, 0, False
        self.form: object = None

    def due(self, form: object) -> bool:
        """Whether this call is to be looked at. form: of its arguments, their numbers left aside."""
        number = self.loop.number
        self.begins = number == 0 or number != self.number
        if self.begins:
            self.number, self.left = number, CALLS
        elif form != self.form:
            self.left = max(self.left, 1)
        self.form = form
        self.left -= 1
        return self.left >= 0


def check_same(
    ranks: Ranks,
    place: str,
    told: Mapping[str, object],
    tensors: Sequence[tuple[str, torch.Tensor]],
    device: torch.device,
    advice: str = SEEDS,
) -> None:
    """Raises `errors.Refused` on all ranks where their values of `told` differ, or tensors by more than rounding.

    tensors: by name. device: one for which the group has a backend. Waits for all ranks.
    """
    require_agreement(ranks, place, told)
    if not tensors:
        return
    own = torch.stack([sampled(tensor, device) for _, tensor in tensors])
    of_all = own.new_empty(ranks.size * len(own), own.shape[1])
    dist.all_gather_into_tensor(of_all, own, group=ranks.group)
    first, *others = of_all.cpu().chunk(ranks.size)
    for rank, other in zip(ranks.members[1:], others, strict=True):
        for (name, tensor), a, b in zip(tensors, first, other, strict=True):
            if _apart(a, b, tensor):
                raise Refused(
                    f"{place}: the numbers of {name} are not the same on ranks {ranks.members[0]} and {rank}, which "
                    f"are to compute an image together; {advice}"
                )


def sampled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """(SAMPLES + 1,) float32 on the device: numbers of the tensor, evenly apart, and the mean of all."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().flatten()
    picked = flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES].float()
    mean = flat.float().mean(0, keepdim=True) if len(flat) else picked.new_zeros(1)
    return torch.cat([picked, picked.new_zeros(SAMPLES - len(picked)), mean]).to(device)


def _apart(a: torch.Tensor, b: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether more numbers are apart than rounding explains; whole numbers may not be apart at all."""
    count = min(SAMPLES, tensor.numel())
    a, b = (torch.cat([one[:count], one[-1:]]) for one in (a, b))
    if not tensor.is_floating_point() and not tensor.is_complex():
        return not torch.equal(a, b)
    typical = a.nan_to_num().abs().mean()
    near = (a - b).abs() <= bound(RANKS_INPUT, tensor.dtype) * typical
    same = near | (a == b) | (a.isnan() & b.isnan())  # infinite ones are equal or not
    return bool((~same).float().mean() > APART)
