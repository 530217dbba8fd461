"""Several processes that share one model: which they are, what each holds of it, and what they must agree on."""
