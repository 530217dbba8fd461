"""Models that lie on the CPU and come to the GPU for their turn, always to the same addresses, so graphs stay valid."""
