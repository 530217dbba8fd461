"""Kinds of attention that call modules of the model as they are."""
