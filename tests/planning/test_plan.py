"""A plan applies its patches in order and takes them back last in, first out, whoever asks for it."""

import pytest
from torch import nn

from accel.errors import PatchConflict
from accel.options import Options
from accel.patching.rule import Match, Rule
from accel.planning.plan import Plan, create_context


class Noted:
    """A patch that notes what is done to it. broken: applying it raises."""

    def __init__(self, name: str, log: list[str], broken: bool = False):
        self.name, self.log, self.broken = name, log, broken

    def apply(self) -> None:
        if self.broken:
            raise MemoryError(self.name)
        self.log.append(f"+{self.name}")

    def check(self) -> None:
        if self.broken:
            raise PatchConflict(self.name)

    def undo(self) -> None:
        self.log.append(f"-{self.name}")


def planned(*patches: Noted) -> Plan:
    rule = Rule("noted", lambda site, context: None if site.path else Match(patches=patches))
    return Plan(nn.Linear(2, 2), [rule], create_context(Options()))


@pytest.fixture
def log():
    return []


def test_undone_last_in_first_out(log):
    plan = planned(*(Noted(name, log) for name in "abc"))
    plan.apply()
    plan.undo()
    assert log == ["+a", "+b", "+c", "-c", "-b", "-a"]


def test_an_error_undoes_what_was_applied_in_that_order_too(log):
    plan = planned(Noted("a", log), Noted("b", log), Noted("c", log, broken=True))
    with pytest.raises(MemoryError):
        plan.apply()
    assert log == ["+a", "+b", "-b", "-a"]


def test_stock_for_a_while_is_undone_and_applied_in_order(log):
    plan = planned(*(Noted(name, log) for name in "ab"))
    plan.apply()
    with plan.unfused():
        log.append("stock")
    assert log == ["+a", "+b", "-b", "-a", "stock", "+a", "+b"]


def test_a_conflict_is_found_before_anything_is_undone(log):
    patches = [Noted(name, log) for name in "ab"]
    plan = planned(*patches)
    plan.apply()
    patches[0].broken = True
    with pytest.raises(PatchConflict):
        plan.undo()
    assert log == ["+a", "+b"]
