"""How transformers computes experts: fields of a configuration that say it, and what generate() makes of one."""

import copy
from typing import Any

from torch import nn

CHOSEN = "_experts_implementation"  # of a configuration: the implementation that it names
EXPERTS = "_experts_implementation_internal"  # where the name is kept
TAKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
PROMPTS, STEPS = "grouped_mm", "batched_mm"  # generate() puts the second in the first's place for its steps on a GPU


def experts_of_a_token(model: nn.Module) -> int | None:
    """How many of a layer its configuration says that a token takes; None where it says nothing."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return next((n for name in TAKEN if type(n := getattr(text, name, None)) is int), None)


def in_steps(module: nn.Module) -> nn.Module | None:
    """A twin over the same weights that computes as in a step of generate(); None where that is as in any call."""
    config = vars(module).get("config")
    if getattr(config, EXPERTS, None) != PROMPTS:
        return None
    twin = copy.copy(module)
    vars(twin)["config"] = copy.copy(config)
    vars(vars(twin)["config"])[EXPERTS] = STEPS
    return twin
