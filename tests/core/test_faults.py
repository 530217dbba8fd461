"""The table of faults fits the tree: a fault whose place or tests are gone shows nothing."""

from faults.table import ROOT, Fault, faults


def test_every_fault_has_its_place_and_its_tests():
    table = faults()
    gone = {name: fault.gone(ROOT) for name, fault in table.items()}
    assert {name: reason for name, reason in gone.items() if reason is not None} == {}
    lacking = {name: fault.lacking(ROOT) for name, fault in table.items()}
    assert {name: tests for name, tests in lacking.items() if tests} == {}
    assert len(table) >= 60


def test_what_is_gone_is_named():
    here = "tests/core/test_faults.py"
    fault = Fault("a", "tests/faults/table.py", "such a " + "text", "", f"tests/none.py {here}::test_none -k 'x or y'")
    assert fault.gone(ROOT) == "its text stands 0 times in tests/faults/table.py"
    assert fault.lacking(ROOT) == ["tests/none.py", f"{here}::test_none"]
    assert Fault("b", "none.py", "", "", "").gone(ROOT) == "none.py is not there"
    assert Fault("c", here, "Fault", "", here).gone(ROOT) is not None
