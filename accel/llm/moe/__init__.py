"""Mixtures of experts: what routers and experts compute, and the fused forwards in their place."""
