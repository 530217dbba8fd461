"""Adapters of low rank beside products."""
