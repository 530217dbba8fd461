"""Experts by products of warpgroups: Hopper's own instructions, in gluon."""
