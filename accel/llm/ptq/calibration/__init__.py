"""Calibration data, and one decoder layer while it is worked on."""
