"""Linear attention: kinds that keep a state of fixed size."""
