"""What small language models are made of."""
