"""Kinds of attention: how each is found in a record, and the operations it runs."""
