"""Fused blocks of UNets and VAEs."""
