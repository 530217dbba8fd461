"""Encoder-decoder models: a step of the decoder as one CUDA graph, over keys and values at fixed addresses."""
