"""Post-training quantization: how a language model gets weights in fewer bits, is saved and loaded."""
