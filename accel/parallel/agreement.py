"""What ranks must have in common before they compute together, compared through the store that brought them together.

A collective would wait for an absent rank as long as the group's timeout, and mix up what others send. The store is
asked by name, so the error can say which rank said what, or nothing.
"""

import json
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from accel.errors import Refused
from accel.parallel.ranks import Ranks

LONGEST = timedelta(minutes=10)  # to wait for others, where the group does not say
EXCHANGES = "the number of exchanges so far"


def require_agreement(ranks: Ranks, what: str, told: Mapping[str, object]) -> None:
    """Waits until every rank has come to the same place with the same values.

    what: the place, such as "accel.optimize". told: values by name that must be equal; compared by their `repr`. Raises
    `errors.Refused` on every rank where values differ or a rank does not come within the group's timeout. It also
    raises where a rank was interrupted within an earlier call, as its messages are no longer in step.
    """
    said = gather_from_all(ranks, what, told)
    for name in next(iter(said.values())):
        values = by_value({member: one.get(name, "nothing") for member, one in said.items()})
        if len(values) > 1:
            parts = "; ".join(f"{value} on rank {who}" for value, who in values.items())
            raise Refused(f"{what}: {name} is not the same on all ranks that share a model: {parts}")
    if not ranks.whole:
        raise Refused(f"{what}: {ranks.in_step}, on all ranks that share a model; start them anew")


def by_value(said: Mapping[int, str | None]) -> dict[str | None, str]:
    """By what ranks said, their numbers, as "0, 2"."""
    found: dict[str | None, str] = {}
    for rank, value in said.items():
        found[value] = f"{found[value]}, {rank}" if value in found else str(rank)
    return found


def all_agree(ranks: Ranks, what: str, told: object) -> bool:
    """Whether all ranks have the same value; every rank gets the answer. Raises as `require_agreement` otherwise."""
    return len({values["found"] for values in gather_from_all(ranks, what, {"found": told}).values()}) == 1


def gather_from_all(ranks: Ranks, what: str, told: Mapping[str, object]) -> dict[int, dict[str, str]]:
    """The values of each rank at this place, by its number, and its exchanges so far; see `require_agreement`."""
    values = {name: repr(value) for name, value in told.items()} | {EXCHANGES: ranks.in_step}
    try:
        return _said_by_all(ranks, what, values)
    except dist.DistError as error:  # the process that keeps the store has ended
        raise Refused(f"{what}: the ranks that share a model cannot be asked any more: {error}") from error


def _said_by_all(ranks: Ranks, what: str, values: dict[str, str]) -> dict[int, dict[str, str]]:
    store, own = c10d._get_default_store(), dist.get_rank()
    place = f"accel/{what}/{'-'.join(map(str, ranks.members))}"
    turn = store.add(f"{place}/{own}", 1)  # how often this rank has been here
    keys = {member: f"{place}/{turn}/{member}" for member in ranks.members}
    store.set(keys[own], json.dumps(values))
    if ranks.lost:
        raise Refused(f"{what}: {ranks.lost}; start all ranks anew")
    limit = patience(ranks)
    try:
        store.wait(list(keys.values()), limit)
    except BaseException as error:
        absent = [member for member, key in keys.items() if not store.check([key])]
        store.delete_key(keys[own])  # whoever comes yet is not to take it for an answer
        store.add(f"{place}/{own}", -1)
        if not absent or not isinstance(error, RuntimeError):
            raise
        raise Refused(
            f"{what}: rank {', '.join(map(str, absent))} did not call it within {limit.total_seconds():.0f} s; all "
            "ranks that share a model must, in the same order"
        ) from error
    said = {member: json.loads(store.get(key)) for member, key in keys.items()}
    store.delete_key(f"{place}/{turn - 1}/{own}")  # which all have read, as they have come here since
    return said


def patience(ranks: Ranks) -> timedelta:
    """How long this group waits for a rank."""
    for device in ("cuda", "cpu"):
        try:
            return ranks.group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):  # no backend for it, or one without the option
            continue
    return LONGEST
