"""The parts of a decoder layer as fused operations."""
