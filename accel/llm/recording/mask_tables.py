"""Tables of which keys each query sees, held by modules, as of GPT-Neo's local layers.

A window longer than a recorded run would not show in it. So they are narrowed while the run is made.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from accel.in_flight import alone
from accel.llm.recording.record import NotUnderstood

NARROW = 3  # keys that a query sees by a table while a run is recorded


def hides_keys(table: torch.Tensor | None) -> bool:
    """Whether it says which keys each query sees, and leaves out earlier ones."""
    if table is None or table.dtype != torch.bool or table.dim() < 2 or not 1 < table.shape[-2] == table.shape[-1]:
        return False
    return not bool((table | torch.ones_like(table).triu(1)).all())


@contextmanager
def narrowed(layers: nn.ModuleList) -> Iterator[dict[int, int]]:
    """Inside, tables of windows in these layers are windows of NARROW keys at most; other threads wait. Yields how many
    keys a query sees in truth, by the id of the module that holds the table.
    """
    found: dict[int, int] = {}
    held = [(module, module._buffers) for module in layers.modules()]
    tables = [(module, buffers, name, t) for module, buffers in held for name, t in buffers.items() if t is not None]
    tables = [one for one in tables if hides_keys(one[3])]
    with ExitStack() as undo:
        if tables:
            undo.enter_context(alone(layers))
        for module, buffers, name, table in tables:
            window = int(table.reshape(-1, table.shape[-1])[-1].sum())
            if id(module) not in found and torch.equal(table, _window_like(table, window)):
                found[id(module)] = window
                undo.callback(buffers.__setitem__, name, table)
                buffers[name] = _window_like(table, min(window, NARROW))
        yield found


def window_of_table(module: nn.Module, truly: int | None) -> tuple[int | None, int | None]:
    """How many keys a query sees by the tables of a module, truly, as `narrowed` says, and in the run that is recorded.

    Raises NotUnderstood where a table is no sliding window.
    """
    tables = [one for one in module.buffers() if hides_keys(one)]
    if not tables:
        return None, None
    if truly is None or len(tables) > 1:
        raise NotUnderstood("it holds a mask that is not causal")
    return truly, min(truly, NARROW)


def _window_like(table: torch.Tensor, window: int) -> torch.Tensor:
    return torch.ones_like(table).tril().triu(1 - window)
