"""What users do to a language model after it was optimized."""
