"""A manager beside stock's class, of whichever version."""

import ast
import inspect
import textwrap

from transformers import ContinuousBatchingManager

from accel.llm.batching.manager import BatchManager
from support.llm.managers.fake_engine import after, answer


def public(names):
    return {name for name in names if not name.startswith("_") or name == "__iter__"}


# Keywords that stock or 5.17 has not, all with defaults.
MORE = {"stop_strings", "tokenizer", "generated", "auto_switch_to_flash"}


def test_no_public_code_of_stocks_is_left(manager):
    """Whatever a version of transformers has there would look at fields that are not ours."""
    assert isinstance(manager, ContinuousBatchingManager)
    assert not public(vars(ContinuousBatchingManager)) - vars(BatchManager).keys()
    for name in public(vars(ContinuousBatchingManager)):
        stock, ours = (getattr(kind, name) for kind in (ContinuousBatchingManager, BatchManager))
        if callable(ours) and name not in ("warmed_up",):
            theirs, mine = (inspect.signature(function).parameters for function in (stock, ours))
            assert (
                [one for one in mine if one in theirs] == list(theirs)
                and mine.keys() - theirs <= MORE
                and all(
                    theirs[one].default == mine[one].default and theirs[one].kind == mine[one].kind for one in theirs
                )
            ), name


INNER = {"input_queue", "cancel_queue", "output_router", "distributed_helper", "logit_processor"}


def test_fields_of_stocks_that_are_not_of_its_inner_works(manager):
    tree = ast.parse(textwrap.dedent(inspect.getsource(ContinuousBatchingManager)))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    fields = public(node.attr for node in nodes if getattr(node.value, "id", None) == "self")
    assert {name for name in fields if not hasattr(manager, name)} == INNER & fields


def test_the_toy_is_what_it_seems():
    assert answer([1, 2], 2) == [after([1, 2]), after([1, 2, after([1, 2])])]
