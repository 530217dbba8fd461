"""docs/measurements/compatibility.md holds: every model there is has a row, and the rows say what happens.

`make test` runs one row of every eighth kind; ACCEL_TEST_EVERYTHING=1 (`make compatibility`, `make test-all`) runs all
and writes the file anew.
"""

import pytest

from support.compatibility import compatibility_table as table
from support.compatibility.comparison import Row, compare, told
from support.everything import EVERYTHING

BLOCK = "diffusion transformer block"
LIKE_A_GPU = {"layout": "channels_last", "cpu": "fuse"}
WRITTEN, ROWS = table.read()
CURRENT = table.versions() == WRITTEN


def kinds() -> list:
    """A row of each outcome and reason, and of these every eighth."""
    found = {}
    for section, rows in ROWS.items():
        for row in rows:
            if row.outcome != "not built":
                found.setdefault((section, row.outcome, row.why), pytest.param(section, row, id=row.model))
    return list(found.values())[::8]


def run(section: str, name: str, tiny) -> Row:
    from support.compatibility import diffusers_calls, tiny_diffusers_models, tiny_language_models

    try:
        if section == "diffusion":
            model = tiny_diffusers_models.build(name)
            calls = diffusers_calls.calls(model)
        else:
            model = tiny_language_models.build(name, section)
            calls = tiny_language_models.calls(model)
    except Exception as error:
        return Row(name, "", "not built", why=told(error))
    return compare(name, model, calls, tiny.differences, **LIKE_A_GPU)


@pytest.mark.skipif(EVERYTHING, reason="all of them are run")
@pytest.mark.parametrize(("section", "pinned"), kinds())
def test_rows(section, pinned, tiny):
    if pinned.model not in table.models()[section]:
        pytest.skip("these versions do not have it")
    row = run(section, pinned.model, tiny)
    assert not row.wrong, row.why
    if CURRENT:
        assert (row.kind, row.outcome) == (pinned.kind, pinned.outcome), f"{row.why}: {table.AGAIN}"


@pytest.mark.skipif(EVERYTHING, reason="the file is written anew")
@pytest.mark.skipif(not CURRENT, reason=f"the table is of {WRITTEN}")
def test_every_model_there_is_has_a_row_and_none_is_wrong():
    for section, names in table.models().items():
        listed = {row.model for row in ROWS[section]}
        assert listed == set(names), f"{section}: {sorted(listed ^ set(names))}: {table.AGAIN}"
        assert not [row for row in ROWS[section] if row.wrong]


@pytest.mark.skipif(not EVERYTHING, reason="ACCEL_TEST_EVERYTHING=1 runs all rows and writes the file")
def test_every_row(tiny):
    rows = {section: [run(section, name, tiny) for name in names] for section, names in table.models().items()}
    table.write(rows)
    assert not [row for found in rows.values() for row in found if row.wrong]
    assert sum(row.outcome != "not built" for row in rows["language"]) >= 100
    assert sum(row.outcome != "not built" for row in rows["diffusion"]) >= 0.8 * len(rows["diffusion"])
    blocks = [row for row in rows["diffusion"] if BLOCK in row.fast.split(", ")]
    assert sum("ran stock" not in row.why for row in blocks) >= 55
