"""Continuous batching of transformers: what it gives of a request, and where a model keeps its manager."""

from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus, logger

__all__ = ["GenerationOutput", "RequestStatus", "logger"]

INIT = "init_continuous_batching"
CACHED = "_cached_continuous_batching_manager"  # where a model keeps a manager for its next call


def page_size(config: ContinuousBatchingConfig) -> int:
    """Tokens of one of stock's pages; transformers before 5.18 calls it a block."""
    return config.page_size if hasattr(config, "page_size") else config.block_size
