"""The parts of a decoder layer: a spec of what each computes, found in a recorded run, and its fused operations."""
