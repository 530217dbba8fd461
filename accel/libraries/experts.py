"""How transformers computes experts: the field of a configuration that says it, and what generate() makes of it."""

import copy

from torch import nn

CHOSEN = "_experts_implementation"  # of a configuration: the implementation that it names
EXPERTS = "_experts_implementation_internal"  # where the name is kept
PROMPTS, STEPS = "grouped_mm", "batched_mm"  # generate() puts the second in the first's place for its steps on a GPU


def in_steps(module: nn.Module) -> nn.Module | None:
    """A twin over the same weights that computes as in a step of generate(); None where that is as in any call."""
    config = vars(module).get("config")
    if getattr(config, EXPERTS, None) != PROMPTS:
        return None
    twin = copy.copy(module)
    vars(twin)["config"] = copy.copy(config)
    vars(vars(twin)["config"])[EXPERTS] = STEPS
    return twin
