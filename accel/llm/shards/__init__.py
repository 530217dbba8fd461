"""Weights divided into files, for each rank its own: written by `accel shard`, read by `accel.load`."""
