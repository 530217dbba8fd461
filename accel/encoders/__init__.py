"""Text encoders: bidirectional transformers whose batches are packed, without their padding."""
