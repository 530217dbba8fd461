"""What tests of continuous batching share."""
