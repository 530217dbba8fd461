"""What the layers of a language model compute, found by recording a small run and comparing."""
