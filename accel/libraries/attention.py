"""How transformers chooses attention, masks and experts: a configuration's name for one, registries of functions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accel.libraries.code import function_tables

__all__ = ["eager_mask"]

# Functions by their names in configurations.
ATTENTIONS, MASKS, MIXTURES = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, ALL_EXPERTS_FUNCTIONS
ATTENTION = "_attn_implementation"  # of a configuration: the attention that it names
EAGER = "eager"  # such a name, of a function in the model's own file
MASK = "attention_mask"  # of a model and of its layers
FIELD = "_attn_implementation_internal"  # where the name is kept
PAGED = "paged|"  # of implementations that attend through the paged cache of continuous batching, and no other
# Arguments of an attention function that change nothing, or whose effect a recording shows.
KNOWN_ARGUMENTS = set("scaling dropout softcap sliding_window s_aux position_ids use_cache cache_position".split())
LONGEST = "max_seqlen"  # of packed sequences, which layers are told where their configuration names flash attention


@contextmanager
def lent_attention(name: str, attend: Callable, mask: Callable) -> Iterator[None]:
    """Inside, a configuration may name this attention and the function that makes its masks."""
    registries = {AttentionInterface: attend, AttentionMaskInterface: mask}
    try:
        for registry, function in registries.items():
            registry.register(name, function)
        yield
    finally:
        for registry in registries:
            for table in function_tables(registry):
                table.pop(name, None)
