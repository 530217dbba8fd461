"""Several cards of one host: `torchrun --nproc-per-node N -m benchmarks NAME`, or one process that spreads a model."""
