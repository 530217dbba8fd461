"""GPTQ, AWQ and SmoothQuant."""
