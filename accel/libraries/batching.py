"""Continuous batching of transformers: what it gives of a request, and where a model keeps its manager."""

from transformers import ContinuousBatchingConfig, PretrainedConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus, logger

__all__ = ["GenerationOutput", "RequestStatus", "logger"]

INIT = "init_continuous_batching"
CACHED = "_cached_continuous_batching_manager"  # where a model keeps a manager for its next call


def steady_tokens(config: PretrainedConfig) -> int | None:
    """Tokens up to which a text's rotary frequencies do not depend on the longest of the batch; None for any number."""
    rotary = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for one in (rotary, *(part for part in rotary.values() if isinstance(part, dict))):  # by kinds of layers
        if one.get("rope_type") == "longrope":
            return one["original_max_position_embeddings"]
        if one.get("rope_type") == "dynamic":
            return config.get_text_config().max_position_embeddings
    return None


def page_size(config: ContinuousBatchingConfig) -> int:
    """Tokens of one of stock's pages; transformers before 5.18 calls it a block."""
    return config.page_size if hasattr(config, "page_size") else config.block_size
